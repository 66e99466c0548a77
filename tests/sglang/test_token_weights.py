"""What a server tells of the weights of its tokens, with stand-ins for the classes of SGLang that do the work."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_tasks.engines.sglang.token_weights import KEY, UPDATES, abort_quickly, note_weights, runs, tell_weights


def run(work: Any) -> Any:
    return asyncio.run(work)


@dataclass
class Scheduler:
    """Requests with the names of their caches; a step adds a token to each. `synchronized`: in what state it waited."""

    names: dict[str, str | None] = field(default_factory=dict)
    tokens: dict[str, list[tuple[int, bool]]] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        events = self.events

        class Worker:
            def forward_batch_generation(self, batch: Any, *, hint: int = 0) -> Any:
                return SimpleNamespace(logits_output=SimpleNamespace(customized_info=None))

        class Updater:
            def update_weights_from_disk(self, order: Any) -> Any:
                events.append("load")
                return SimpleNamespace(success=order.good)

            update_weights_from_distributed = update_weights_from_tensor = update_weights_from_disk

        note_weights(Worker, Updater, 3, lambda: events.append("synchronize"))
        self.worker, self.updater = Worker(), Updater()

    def begin(self, name: str, cache: str | None) -> None:
        self.names[name], self.tokens[name] = cache, []

    def step(self) -> None:
        batch = SimpleNamespace(reqs=[SimpleNamespace(extra_key=cache) for cache in self.names.values()])
        told = self.worker.forward_batch_generation(batch, hint=1).logits_output.customized_info[KEY]
        for name, token in zip(self.names, told, strict=True):
            self.tokens[name].append(token)

    def update(self, version: str | None, how: str = UPDATES[0], good: bool = True) -> None:
        getattr(self.updater, how)(SimpleNamespace(weight_version=version, good=good))


@pytest.mark.parametrize("how", UPDATES)
def test_a_token_is_of_the_weights_that_were_last_loaded_when_it_was_sampled(how: str) -> None:
    s = Scheduler()
    s.begin("old", "3")
    s.step()
    s.update("4", how)
    s.begin("new", "4")
    s.begin("health", None)
    s.step()
    s.update("5", how, good=False)  # a load that fails
    s.update(None, how)  # a part of the weights
    s.step()
    assert s.tokens["old"] == [(3, False), (4, True), (4, True)]
    assert s.tokens["new"] == s.tokens["health"] == [(4, False)] * 2
    assert s.events == ["synchronize", "load"] * 3, "no step of before meets new weights"


def test_what_came_before_new_weights_and_began_after_them_is_marked() -> None:
    """Its prompt may have been found in the cache of the weights that it was named after."""
    s = Scheduler()
    s.update("4")
    s.begin("queued", "3")
    s.step()
    assert s.tokens["queued"] == [(4, True)]


def test_a_step_that_returns_no_logits_is_left_alone() -> None:
    class Worker:
        def forward_batch_generation(self, batch: Any) -> Any:
            return SimpleNamespace(logits_output=None)

    note_weights(Worker, type("Updater", (), dict.fromkeys(UPDATES, lambda self, order: None)), 0, lambda: None)
    assert Worker().forward_batch_generation(SimpleNamespace(reqs=[])).logits_output is None


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans())))
def test_runs_say_of_each_token_what_was_noted(tokens: list[tuple[int, bool]]) -> None:
    found = runs(tokens)
    columns = [
        [value for value, count in found[name] for _ in range(count)] for name in ("weight_versions", "stale_kv")
    ]
    assert list(zip(*columns, strict=True)) == tokens
    assert all(count > 0 for spans in found.values() for _, count in spans)
    assert all(a[0] != b[0] for spans in found.values() for a, b in pairwise(spans)), "the longest"


class Manager:
    """`_create_tokenized_object` and `generate_request` as SGLang's, for one request or a list of them."""

    version = "3"

    def config_value(self, name: str) -> str:
        assert name == "weight_version"
        return self.version

    def _create_tokenized_object(self, obj: str, input_text: str) -> Any:
        return SimpleNamespace(obj=obj, extra_key=None)

    async def generate_request(self, obj: Any, request: Any = None) -> Any:
        for n in (1, 2):
            told = {"meta_info": {"id": "x", KEY: [(3, False), (4, True)][:n]}}
            yield [told, {"meta_info": {}}] if isinstance(obj, list) else told


def test_answers_tell_runs_and_requests_name_their_cache() -> None:
    class Own(Manager):
        pass

    tell_weights(Own)

    async def answers(obj: Any) -> list[Any]:
        return [answer async for answer in Own().generate_request(obj, request=None)]

    whole = {"id": "x", "weight_versions": [(3, 1), (4, 1)], "stale_kv": [(False, 1), (True, 1)]}
    nothing: dict[str, Any] = {"weight_versions": [], "stale_kv": []}
    assert [answer["meta_info"] for answer in run(answers("one"))][-1] == whole
    assert [answer["meta_info"] for answer in run(answers(["one", "two"]))[-1]] == [whole, nothing]
    assert Own()._create_tokenized_object("one", input_text="").extra_key == "3"


class Pausing:
    """SGLang's pause: it orders an abort, and where requests are under way looks again after a second."""

    def __init__(self, rounds: int) -> None:
        self.left, self.aborts, self.paused, self.is_pause = rounds, 0, "", False
        self.model_update_lock = self

    def abort_request(self, abort_all: bool) -> None:
        assert abort_all and self.is_pause, "new requests would be aborted for ever"
        self.aborts += 1

    async def is_locked(self) -> bool:
        self.left -= 1
        return self.left > 0

    async def pause_generation(self, order: Any) -> None:
        assert order.mode != "abort" or not await self.is_locked(), "this would take a second"
        self.paused = order.mode


@pytest.mark.parametrize(("rounds", "aborts"), [(1, 1), (3, 3)])
def test_an_abort_is_looked_after_until_nothing_is_under_way(rounds: int, aborts: int) -> None:
    class Own(Pausing):
        pass

    abort_quickly(Own, seconds=0.0)
    manager = Own(rounds)
    run(manager.pause_generation(SimpleNamespace(mode="abort")))
    assert (manager.aborts, manager.paused) == (aborts, "abort")
    manager = Own(rounds)
    run(manager.pause_generation(SimpleNamespace(mode="in_place")))
    assert (manager.aborts, manager.paused) == (0, "in_place")
