"""What a server tells of the weights of its tokens, with stand-ins for the classes of SGLang that do the work."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_tasks.engines.sglang.child import abort_quickly
from areal_tasks.engines.sglang.scheduler import score_first
from areal_tasks.engines.sglang.token_weights import (
    KEY,
    UPDATES,
    Changes,
    note_weights,
    report_weights,
    segments,
)


def run(work: Any) -> Any:
    return asyncio.run(work)


class Request:
    """A request that SGLang's scheduler has: what it needs to know of it, and how many tokens it has sent."""

    def __init__(self, prompt: int, cache: str | None) -> None:
        self.origin_input_ids, self.extra_key = [0] * prompt, cache
        self.customized_info: dict[str, Changes] | None = None
        self.output, self.sent = list[int](), 0
        self.told: list[tuple[int, int, bool]] = []

    def send(self) -> None:
        """As SGLang's output streamer does, after any number of tokens."""
        assert self.customized_info is not None
        self.told += self.customized_info[KEY][self.sent : len(self.output)]
        self.sent = len(self.output)


class Scheduler:
    """Requests by name; a step adds a token to each. `events`: when it waited for the GPU, when it loaded weights."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        events = self.events = list[str]()

        class Worker:
            def forward_batch_generation(self, batch: Any, *, hint: int = 0) -> Any:
                return hint

        class Updater:
            def update_weights_from_disk(self, order: Any) -> Any:
                events.append("load")
                return SimpleNamespace(success=order.good)

            update_weights_from_distributed = update_weights_from_tensor = update_weights_from_disk

        note_weights(Worker, Updater, 3, lambda: events.append("synchronize"))
        self.worker, self.updater = Worker(), Updater()

    def begin(self, name: str, cache: str | None, prompt: int = 5) -> None:
        self.requests[name] = Request(prompt, cache)

    def pass_(self, *, missing: int = 0) -> None:
        """A forward pass; `missing` tokens of each prompt come in a later one."""
        lengths = [len(r.origin_input_ids) + len(r.output) - missing for r in self.requests.values()]
        batch = SimpleNamespace(reqs=[*self.requests.values()], seq_lens_cpu=np.array(lengths))
        assert self.worker.forward_batch_generation(batch, hint=1) == 1

    def step(self) -> None:
        self.pass_()
        for request in self.requests.values():
            request.output.append(0)

    def update(self, version: str | None, how: str = UPDATES[0], good: bool = True) -> None:
        getattr(self.updater, how)(SimpleNamespace(weight_version=version, good=good))

    def tokens(self, name: str) -> list[tuple[int, bool]]:
        """(version, stale) of each token, by the request's answer."""
        request = self.requests[name]
        request.send()
        found = segments(request.told, len(request.output))
        versions, stale = (
            [value for value, count in found[column] for _ in range(count)]
            for column in ("weight_versions", "stale_kv")
        )
        return [(version, bool(old)) for version, old in zip(versions, stale, strict=True)]


@pytest.mark.parametrize("how", UPDATES)
def test_a_token_is_of_the_weights_that_were_last_loaded_when_it_was_sampled(how: str) -> None:
    s = Scheduler()
    s.begin("old", "3")
    s.step()
    s.update("4", how)
    s.begin("new", "4", prompt=2)
    s.begin("health", None)
    s.step()
    s.update("5", how, good=False)  # a load that fails
    s.update(None, how)  # a part of the weights
    s.step()
    assert s.tokens("old") == [(3, False), (4, True), (4, True)]
    assert s.tokens("new") == s.tokens("health") == [(4, False)] * 2
    assert s.events == ["synchronize", "load"] * 3, "no step of before meets new weights"


def test_what_came_before_new_weights_and_began_after_them_is_marked() -> None:
    """Its prompt may have been found in the cache of the weights that it was named after."""
    s = Scheduler()
    s.update("4")
    s.begin("queued", "3")
    s.step()
    assert s.tokens("queued") == [(4, True)]


def test_a_prompt_that_takes_several_passes_is_of_the_weights_of_the_last() -> None:
    s = Scheduler()
    s.begin("long", "3")
    s.pass_(missing=3)
    s.update("4")
    s.pass_(missing=1)
    s.step()
    assert s.tokens("long") == [(4, True)]


@given(st.lists(st.sampled_from(["step", "update", "send", "begin"]), max_size=30))
def test_each_token_is_told_once_however_often_answers_are_sent(events: list[str]) -> None:
    s, version = Scheduler(), 3
    expected: dict[str, list[tuple[int, bool]]] = {}
    named: dict[str, int] = {}
    for event in ["begin", *events]:
        if event == "begin":
            name = str(len(named))
            named[name], expected[name] = version, []
            s.begin(name, str(version))
        elif event == "update":
            version += 1
            s.update(str(version))
        elif event == "send":
            for request in s.requests.values():
                if request.customized_info is not None:
                    request.send()
        else:
            s.step()
            for name, tokens in expected.items():
                tokens.append((version, version > named[name]))
    assert {name: s.tokens(name) for name, tokens in expected.items() if tokens} == {
        name: tokens for name, tokens in expected.items() if tokens
    }


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
            told = {"meta_info": {"id": "x", "completion_tokens": n, KEY: [(0, 3, False), (1, 4, True)][:n]}}
            yield [told, {"meta_info": {"completion_tokens": 0}}] if isinstance(obj, list) else told


def test_answers_tell_runs_and_requests_name_their_cache() -> None:
    class Own(Manager):
        pass

    report_weights(Own)

    async def answers(obj: Any) -> list[Any]:
        return [answer async for answer in Own().generate_request(obj, request=None)]

    whole = {
        "id": "x",
        "completion_tokens": 2,
        "weight_versions": [(3, 1), (4, 1)],
        "stale_kv": [(False, 1), (True, 1)],
    }
    nothing: dict[str, Any] = {"completion_tokens": 0, "weight_versions": [], "stale_kv": []}
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


def test_requests_that_score_their_prompts_do_not_wait_for_the_queue() -> None:
    class Queue:
        def __init__(self) -> None:
            self.waiting_queue: list[Any] = []

        def _add_request_to_queue(self, request: Any, is_retracted: bool = False) -> None:
            if request.name != "refused":
                self.waiting_queue.append(request)

    score_first(Queue)
    queue, prompt = Queue(), [0] * 5
    for name, start in (("a", 5), ("b", -1), ("score", 2), ("refused", 0), ("c", 5)):
        queue._add_request_to_queue(SimpleNamespace(name=name, logprob_start_len=start, origin_input_ids=prompt))
    assert [request.name for request in queue.waiting_queue] == ["score", "a", "b", "c"]
