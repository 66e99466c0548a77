"""Workflows of users in a thread of their own: what blocks there stops neither requests nor, for long, other groups."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
from test_rollouts import sample
from waiting import LIMIT

from areal_tasks.engines.client import GenerateRequest, InferenceClient
from areal_tasks.rollout.worker.apart import Blocked, IsolatedWorkflow, LeasedClient
from areal_tasks.workflows import Prompt, Sample, WorkflowContext


@dataclass
class Client:
    """Answers in its own event loop, and says so."""

    threads: set[str] = field(default_factory=set)
    version: int = 3

    async def generate(self, requests: Any) -> Any:
        self.threads.add(threading.current_thread().name)
        return list(requests)

    async def stream(self, request: Any) -> Any:
        for piece in (request.floor, 2, 3):
            self.threads.add(threading.current_thread().name)
            yield piece


@dataclass
class Does:
    """A workflow that does `what` for a group."""

    what: Callable[[int, Any], Coroutine[Any, Any, None]]
    begun: Counter[int] = field(default_factory=Counter)

    async def run(self, prompt: Prompt, context: WorkflowContext) -> list[Sample]:
        self.begun[prompt.group_id] += 1
        await self.what(prompt.group_id, context.client)
        return [sample(prompt.group_id, 0)]


def run(workflow: Does, groups: int, blocked_seconds: float = LIMIT, client: Client | None = None) -> list[Any]:
    """What comes of each of so many groups."""

    async def all_of_them() -> list[Any]:
        apart = IsolatedWorkflow(workflow, blocked_seconds)
        shared = cast(InferenceClient, LeasedClient(cast(InferenceClient, client or Client()), 7))
        context = WorkflowContext(shared, seed=0, group_size=1, max_new_tokens=2, temperature=1.0, max_length=8)
        prompts = [Prompt(group, group, 0, "p", "a", [1]) for group in range(groups)]
        try:
            return await asyncio.gather(*(apart.run(p, context) for p in prompts), return_exceptions=True)
        finally:
            apart.close()

    return asyncio.run(all_of_them())


def test_requests_are_made_in_the_loop_of_the_client() -> None:
    client, mine = Client(), set[str]()

    async def what(group: int, shared: Any) -> None:
        mine.add(threading.current_thread().name)
        request = GenerateRequest([group], 1)
        assert await shared.generate([request]) == [replace(request, floor=7)] and shared.version == 3
        assert [piece async for piece in shared.stream(request)] == [7, 2, 3]

    assert [found[0].prompt.group_id for found in run(Does(what), 3, client=client)] == [0, 1, 2]
    assert client.threads == {"MainThread"} and mine == {"workflows"}


def test_a_group_that_blocks_costs_itself_and_the_others_begin_again() -> None:
    """The one to blame is found also where a task of its own blocks."""
    for_ever, blocked = threading.Event(), list[threading.Thread]()

    async def block() -> None:
        for_ever.wait()

    async def what(group: int, client: Any) -> None:
        if group == 1:
            blocked.append(threading.current_thread())
            await asyncio.gather(block())
        elif threading.current_thread() in blocked:
            await asyncio.Event().wait()  # until it begins again, in another thread

    workflow = Does(what)
    found = run(workflow, 4, blocked_seconds=1.0)
    for_ever.set()
    assert isinstance(found[1], Blocked) and "workflow.blocked_seconds" in str(found[1])
    assert [found[i][0].prompt.group_id for i in (0, 2, 3)] == [0, 2, 3] and workflow.begun[1] == 1


def test_a_call_that_blocks_for_a_moment_costs_nobody_anything() -> None:
    async def what(group: int, client: Any) -> None:
        threading.Event().wait(0.1)  # stands in for a call that takes its time

    workflow = Does(what)
    assert all(isinstance(found, list) for found in run(workflow, 3)) and set(workflow.begun.values()) == {1}


@pytest.mark.parametrize("error", [SystemExit(3), KeyError("x"), asyncio.CancelledError(), KeyboardInterrupt()])
def test_what_a_workflow_raises_is_its_own(error: BaseException) -> None:
    async def what(group: int, client: Any) -> None:
        if group == 0:
            if isinstance(error, SystemExit):
                sys.exit(3)
            raise error

    workflow = Does(what)

    async def both() -> tuple[BaseException, Any]:
        apart = IsolatedWorkflow(workflow, LIMIT)
        context = WorkflowContext(cast(Any, Client()), 0, 1, 2, 1.0, 8)
        raised: BaseException | None = None
        try:
            await apart.run(Prompt(0, 0, 0, "p", "a", [1]), context)
        except BaseException as found:
            raised = found
        assert raised is not None
        return raised, await apart.run(Prompt(1, 1, 0, "p", "a", [1]), context)

    raised, after = asyncio.run(both())
    assert type(raised) is type(error) and after[0].prompt.group_id == 1


def test_a_group_that_is_given_up_is_cancelled_in_its_thread() -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def what(group: int, client: Any) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def work() -> None:
        apart = IsolatedWorkflow(Does(what), LIMIT)
        context = WorkflowContext(cast(Any, Client()), 0, 1, 2, 1.0, 8)
        group = asyncio.ensure_future(apart.run(Prompt(0, 0, 0, "p", "a", [1]), context))
        assert await asyncio.to_thread(begun.wait, LIMIT)
        group.cancel()
        assert await asyncio.to_thread(cancelled.wait, LIMIT)

    asyncio.run(work())
