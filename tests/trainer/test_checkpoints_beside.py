"""A checkpoint is written while the trainer runs other commands, and holds the bits of its version."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trainer_builders import World, advantage, rlhf_recipe, rollout
from waiting import held_back

from areal_tasks.engines.trainer import checkpoint_files, writing
from areal_tasks.engines.trainer.checkpoint import Saving, held_parameters
from areal_tasks.engines.trainer.checkpoint_files import Copies
from areal_tasks.engines.trainer.commands import Checkpoint, Finish, Finished, Load, Train
from areal_tasks.engines.trainer.fencing import StaleCommand, Superseded
from areal_tasks.engines.trainer.local import LocalBackend
from areal_tasks.engines.trainer.memory import host_room
from areal_tasks.engines.trainer.service import Trainer
from areal_tasks.store.backend import StoreError, Unavailable
from schemas.manifest import FileRef

LENGTHS = [9, 4, 13, 6, 11, 3, 8, 5]


@pytest.fixture
def rlhf(world: World) -> World:
    world.recipe = rlhf_recipe()
    return world


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """No checkpoint is written before it is set."""
    with held_back(Saving, "write") as opened:
        yield opened


def train(world: World, version: int) -> Train:
    table = rollout(LENGTHS, seed=version, version=version)
    return world.train_command(version, {"rollout": table, "advantage": advantage(table, seed=version)})


def begin(world: World, trainer: Trainer, attempt: str, version: int, owner: int = 1) -> Callable[[bool], Any]:
    """Begin a checkpoint; returns a function that asks for its files, and perhaps waits for them."""
    named: dict[str, Any] = {"owner": owner, "version": version}
    named["prefix"] = world.folder("checkpoint", version, attempt)
    trainer.run(Checkpoint(**named))

    def files(wait: bool) -> Any:
        found = trainer.run(Finish(**named, wait=wait))
        assert isinstance(found, Finished)
        return found.files

    return files


def state(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of all weights and of AdamW's state."""
    held = held_parameters(trainer.backend.master.model, trainer.backend.optimizer)
    return {f"{name}.{key}": t.clone() for name, parts in held.items() for key, t in parts.items()}


def loaded(world: World, files: tuple[FileRef, ...], version: int) -> Trainer:
    """Another trainer, with this checkpoint."""
    ref = world.commit("checkpoint", version, "a", files)
    trainer = Trainer(world.spec(owner=3))
    trainer.load(Load(owner=3, version=version, weights=world.initial, checkpoint=ref))
    return trainer


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_what_is_written_while_it_trains_is_the_state_of_its_version(rlhf: World, gate: threading.Event) -> None:
    trainer = rlhf.trainer()
    trainer.train(train(rlhf, 0))
    before, progress = state(trainer), trainer.progress
    files = begin(rlhf, trainer, "a", 1)
    trainer.train(train(rlhf, 1))
    after = state(trainer)
    trainer.train(train(rlhf, 2))
    assert files(False) is None and not same(before, after)
    gate.set()
    found = files(True)
    assert files(False) == found == files(True)
    other = loaded(rlhf, found, 1)
    assert same(state(other), before) and other.progress == progress
    other.train(train(rlhf, 1).model_copy(update={"owner": 3}))
    assert same(state(other), after)


def test_one_is_written_at_a_time(rlhf: World, gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later start of the flow has the trainer write another while it writes for the earlier one."""
    trainer, order = rlhf.trainer(), list[str]()
    plan, wait, write_files = trainer.backend.plan_checkpoint, writing.wait, checkpoint_files.write_files

    def planned(*arguments: Any) -> Saving:
        order.append("planned")
        return plan(*arguments)

    def written(*arguments: Any) -> Any:
        found = write_files(*arguments)
        order.append("written")
        return found

    def waits(futures: list[Future[Any]]) -> Any:
        gate.set()
        return wait(futures)

    monkeypatch.setattr(trainer.backend, "plan_checkpoint", planned)
    monkeypatch.setattr("areal_tasks.engines.trainer.checkpoint.write_files", written)
    monkeypatch.setattr(writing, "wait", waits)
    first = begin(rlhf, trainer, "a", 0)
    second = begin(rlhf, trainer, "b", 0, owner=2)
    assert order[:3] == ["planned", "written", "planned"]
    with pytest.raises(Superseded):
        first(True)
    assert {file.path.split("/")[3] for file in second(True)} == {"attempt=b"}


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_cannot_be_written_is_said_once_and_another_may_follow(
    rlhf: World, elsewhere: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On its way to a store `elsewhere`, a checkpoint is in a temporary folder, of which nothing is left."""
    trainer = rlhf.trainer()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(type(rlhf.store), "put_file", _away)
        if elsewhere:
            patch.setattr(type(rlhf.store), "local", lambda *_: None)
        files = begin(rlhf, trainer, "a", 0)
        assert bool(list(tmp_path.glob("arealflow-checkpoint-*"))) == elsewhere
        with pytest.raises(Unavailable, match="the store is away"):
            files(True)
        assert not list(tmp_path.glob("arealflow-checkpoint-*"))
    with pytest.raises(StaleCommand, match=r"no checkpoint is being written below .*attempt=a"):
        files(True)
    assert same(state(loaded(rlhf, begin(rlhf, trainer, "b", 0)(True), 0)), state(trainer))


def _away(*_: Any) -> None:
    raise Unavailable("the store is away")


def test_a_disk_that_refuses_is_named(rlhf: World, tmp_path: Path) -> None:
    trainer = rlhf.trainer()
    place = rlhf.store.local(rlhf.folder("checkpoint", 0, "a"))
    assert place is not None
    (place / "__0_0.distcp").mkdir(parents=True)
    with pytest.raises(StoreError, match=r"attempt=a/__0_0\.distcp cannot be used"):
        begin(rlhf, trainer, "a", 0)(True)


@pytest.mark.parametrize("lacks", ["room", "memory"])
def test_without_memory_for_a_copy_the_trainer_waits(rlhf: World, lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise MemoryError

    if lacks == "room":
        monkeypatch.setattr(writing, "host_room", lambda: 100)
    else:
        monkeypatch.setattr(Copies, "allocate", refused)
    trainer = rlhf.trainer()
    before, files = state(trainer), begin(rlhf, trainer, "a", 0)
    trainer.train(train(rlhf, 0))
    assert same(state(loaded(rlhf, files(False), 0)), before)


def test_copies_lie_in_blocks_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_files, "BLOCK_BYTES", 1024)
    copies = Copies()
    tensors = [torch.randn(10, 30).T, torch.zeros(0, 4), torch.tensor(3.0), torch.arange(80), torch.randn(90)[::2]]
    sizes = [tensor.nbytes for tensor in tensors]
    assert copies.lacking(sizes) == 1216 + 64 + 640 + 192
    found = copies.take(tensors)
    assert all(torch.equal(*pair) and pair[0].is_contiguous() for pair in zip(found, tensors, strict=True))
    assert [len(block) for block in copies.blocks] == [1216, 896] and copies.lacking(sizes) == 0
    places = [copy.data_ptr() for copy in found]
    tensors[0].zero_()
    assert found[0].any()
    again = copies.take(tensors)
    assert [copy.data_ptr() for copy in again] == places and not again[0].any()
    copies.take(tensors[2:])
    assert [len(block) for block in copies.blocks] == [896]


@pytest.mark.parametrize("early", [True, False])
def test_a_backend_may_have_memory_for_copies_allocated_after_the_first_step(
    rlhf: World, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalBackend, "copies_early", early)
    trainer = rlhf.trainer()
    trainer.train(train(rlhf, 0))
    trainer.writer._wait()
    blocks = [block.data_ptr() for block in trainer.writer.copies.blocks]
    before, files = state(trainer), begin(rlhf, trainer, "a", 1)
    trainer.train(train(rlhf, 1))
    assert bool(blocks) == early
    assert not early or [block.data_ptr() for block in trainer.writer.copies.blocks] == blocks
    assert same(state(loaded(rlhf, files(True), 1)), before)


def test_a_container_may_leave_less_memory_than_the_machine(tmp_path: Path) -> None:
    own, groups = tmp_path / "own", tmp_path / "groups"
    own.write_text("0::/job/step\n")
    inner = groups / "job" / "step"
    inner.mkdir(parents=True)
    machine = host_room(own, groups)
    for folder, most, taken in ((groups / "job", "9000", "5000"), (inner, "max", "4000")):
        for name, text in (("max", most), ("current", taken), ("stat", "anon 7\nactive_file 300\ninactive_file 200\n")):
            (folder / f"memory.{name}").write_text(text)
    assert host_room(own, groups) == 4500 < machine
    assert host_room(tmp_path / "none", groups) > 4500
