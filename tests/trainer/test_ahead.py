"""Beside a device the host takes one core; what a thread prepares is the same, in time, and fails where it is used."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from trainer_builders import World, advantage, rlhf_recipe, rollout
from waiting import LIMIT

from areal_tasks.data.batching import Layout, make_layout
from areal_tasks.engines.trainer import forward, service
from areal_tasks.engines.trainer import learner as learner_module
from areal_tasks.engines.trainer.checkpoint import Progress
from areal_tasks.engines.trainer.commands import Logprobs
from areal_tasks.engines.trainer.forward import ahead, one_core
from areal_tasks.engines.trainer.learner import Learned, Learner
from areal_tasks.engines.trainer.local import LocalBackend
from areal_tasks.engines.trainer.plan import make_plan
from areal_tasks.engines.trainer.rows import grpo_batch
from areal_tasks.engines.trainer.settings import read_settings
from schemas.recipe.training import Trainer as TrainerSettings
from schemas.tables import VOLATILE

CPU = torch.device("cpu")
LENGTHS = [9, 4, 13, 6, 11, 3, 8, 2, 10, 7, 12, 5]


@pytest.fixture
def threaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The learner as on a GPU; its thread must be gone afterwards."""
    monkeypatch.setattr(learner_module, "ahead", forward._from_thread)
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def _learn(model: Path, layout: str = "packed") -> tuple[Learned, list[torch.Tensor]]:
    settings = read_settings(rlhf_recipe(trainer={"layout": layout, "micro_batch_tokens": 16}))
    backend = LocalBackend(settings.trainer, settings.model)
    backend.load(model, 0)
    table = rollout(LENGTHS)
    batch = grpo_batch({"rollout": table, "advantage": advantage(table)}, 0)
    learned = Learner(backend, settings, batch, make_plan(batch, settings, 0)).learn(0, Progress())
    return learned, [tensor.clone() for _, tensor in backend.named_weights()]


def _numbers(table: pa.Table) -> dict[str, str]:
    """All but time and memory; as text, in which NaN is NaN and no digit is lost."""
    return {name: repr(table[name].to_pylist()) for name in table.column_names if name not in VOLATILE}


def test_on_a_cpu_an_item_is_made_when_it_is_asked_for() -> None:
    made: list[int] = []
    with ahead((made.append(n) or n for n in range(3)), CPU) as items:  # type: ignore[func-returns-value]
        assert made == []
        assert (next(items), made) == (0, [0])
        assert list(items) == [1, 2]


def test_a_thread_makes_an_item_while_the_one_before_is_used() -> None:
    made = [threading.Event() for _ in range(3)]

    def source() -> Iterator[tuple[int, str, int]]:
        for number, event in enumerate(made):
            event.set()
            yield number, threading.current_thread().name, torch.get_num_threads()

    with forward._from_thread(source(), CPU) as items:
        number, name, threads = next(items)
        assert (number, threads) == (0, 1) and name != threading.current_thread().name
        assert made[1].wait(LIMIT)
        assert not made[2].is_set()  # one ahead, not more: items take memory
        assert [number for number, *_ in items] == [1, 2]


def test_later_threads_begin_with_the_cores_of_the_process() -> None:
    found: list[int] = []
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with forward._from_thread(iter(()), CPU):
            other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
            other.start()
            other.join()
        assert found == [torch.get_num_threads()] == [3]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("device", "settings", "threads"), [("cuda", {}, 1), ("cuda", {"cpu_offload": True}, 3), ("cpu", {}, 3)]
)
def test_beside_a_gpu_the_host_takes_one_core(device: str, settings: dict[str, Any], threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with one_core(torch.device(device), TrainerSettings(**settings)):
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_every_pass_of_the_service_finds_the_same_number_of_threads(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.recipe = rlhf_recipe()
    monkeypatch.setattr(service, "one_core", lambda device, settings: one_core(torch.device("cuda"), settings))
    found: list[int] = []
    for name in ("learn", "score"):
        own = getattr(LocalBackend, name)
        monkeypatch.setattr(LocalBackend, name, lambda *a, own=own: found.append(torch.get_num_threads()) or own(*a))
    torch.set_num_threads(2)
    try:
        trainer, table = world.trainer(), rollout(LENGTHS)
        ref = world.write("rollout", table)
        trainer.logprobs(Logprobs(owner=1, version=0, which="policy", table=ref, prefix=world.prefix()))
        trainer.train(world.train_command(0, {"rollout": table, "advantage": advantage(table)}))
    finally:
        torch.set_num_threads(1)
    assert len(found) > 2 and set(found) == {1}


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_thread_changes_no_bit(tiny: Path, layout: str, request: pytest.FixtureRequest) -> None:
    expected, weights = _learn(tiny, layout)
    request.getfixturevalue("threaded")
    found, same = _learn(tiny, layout)
    assert _numbers(found.train_samples) == _numbers(expected.train_samples)
    assert _numbers(found.train_steps) == _numbers(expected.train_steps)
    assert all(map(torch.equal, same, weights))


@pytest.mark.usefixtures("threaded")
def test_a_layout_that_fails_fails_the_iteration(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def second_fails(*arguments: Any) -> Layout:
        names.append(threading.current_thread().name)
        if len(names) == 2:
            raise ValueError("no such layout")
        return make_layout(*arguments)

    monkeypatch.setattr(learner_module, "make_layout", second_fails)
    with pytest.raises(ValueError, match="no such layout"):
        _learn(tiny)
    assert len(set(names)) == 1 and threading.current_thread().name not in names
