"""Runs a user's workflow in a thread with an event loop of its own, so that a blocking call stops no request.

Requests are made in the client's event loop, which continues. A blocking call delays only the other groups of its
thread. If it blocks for longer than `workflow.blocked_seconds` its group's attempt fails: the thread is abandoned, and
its other groups begin again in a new one.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import traceback
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from areal_tasks.engines.client import GenerateRequest, GenerateResult, InferenceClient, Piece
from areal_tasks.engines.loop_thread import LoopThread
from areal_tasks.workflows import Prompt, Sample, Workflow, WorkflowContext

T = TypeVar("T")
log = logging.getLogger(__name__)

CHECKS: Final = 4  # of a thread, within the time that a call may block
_GROUP: ContextVar[int] = ContextVar("group")


async def in_time(work: Awaitable[T], seconds: float, setting: str) -> T:
    """Await user code. TimeoutError that names the setting if it is not done after `seconds`."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await work
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TimeoutError(f"not done after {seconds:g} s ({setting})") from error


class Blocked(Exception):
    """The workflow has blocked its event loop for too long."""


@dataclass(eq=False)
class WorkflowThread:
    """A thread for workflows. `abandoned`: done when the thread is abandoned, with the groups that block it."""

    abandoned: asyncio.Future[frozenset[int]]
    thread: LoopThread = field(default_factory=lambda: LoopThread("workflows"))
    groups: set[int] = field(default_factory=set)
    owners: WeakKeyDictionary[asyncio.Task[Any], int] = field(default_factory=WeakKeyDictionary)

    def __post_init__(self) -> None:
        self.thread.loop.set_task_factory(self._task)

    def _task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **options)
        if (group := _GROUP.get(-1)) >= 0:
            self.owners[task] = group
        return task

    def blocking(self) -> frozenset[int]:
        """The group whose task is running; all groups if that is unknown."""
        task = asyncio.current_task(self.thread.loop)
        group = self.owners.get(task) if task is not None else None
        return frozenset(self.groups) if group is None else frozenset({group})

    def stack(self) -> str:
        """The stack of the thread."""
        frame = sys._current_frames().get(self.thread.thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame else ""


class IsolatedWorkflow:
    """Runs `workflow` in a thread of its own; call `run` in the event loop of `LeasedClient`."""

    def __init__(self, workflow: Workflow, blocked_seconds: float) -> None:
        self._workflow = workflow
        self._seconds = blocked_seconds
        self._thread: WorkflowThread | None = None
        self._monitoring: asyncio.Task[None] | None = None

    async def run(self, prompt: Prompt, context: WorkflowContext) -> list[Sample]:
        """The group's samples. Raises Blocked, and what the workflow raises."""
        while True:
            thread = self._current_thread()
            group = prompt.group_id
            ended = asyncio.wrap_future(thread.thread.submit(self._run(prompt, context, thread)))
            thread.groups.add(group)
            try:
                either: list[asyncio.Future[Any]] = [ended, thread.abandoned]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            finally:
                thread.groups.discard(group)
                ended.cancel()  # unless it is done
            if ended.done() and not ended.cancelled():
                return ended.result()
            if not thread.abandoned.done():
                raise asyncio.CancelledError  # the workflow has cancelled itself
            if group in thread.abandoned.result():
                raise Blocked(
                    f"it has blocked its event loop for {self._seconds:g} s (workflow.blocked_seconds): "
                    "`await asyncio.to_thread(...)` takes such a call out of the loop"
                )

    async def _run(self, prompt: Prompt, context: WorkflowContext, thread: WorkflowThread) -> list[Sample]:
        _GROUP.set(prompt.group_id)  # inherited by the tasks that the workflow creates
        if (task := asyncio.current_task()) is not None:
            thread.owners[task] = prompt.group_id
        return await self._workflow.run(prompt, context)

    def _current_thread(self) -> WorkflowThread:
        if self._thread is None:
            self._thread = WorkflowThread(asyncio.get_running_loop().create_future())
            self._monitoring = asyncio.ensure_future(self._monitor(self._thread))
        return self._thread

    async def _monitor(self, thread: WorkflowThread) -> None:
        """Wait until the thread is blocked, and abandon it."""
        while not await self._is_blocked(thread):
            await asyncio.sleep(self._seconds / CHECKS)
        blocking = thread.blocking()
        log.error("a workflow blocks its event loop (groups %s), at\n%s", sorted(blocking), thread.stack())
        self._thread = None
        thread.abandoned.set_result(blocking)
        thread.thread.end()

    async def _is_blocked(self, thread: WorkflowThread) -> bool:
        """Whether the thread has groups and its event loop has not run for too long."""
        turn = asyncio.wrap_future(thread.thread.submit(_no_op()))
        for seconds in (self._seconds, self._seconds / CHECKS):  # this loop may have been late itself
            await asyncio.wait([turn], timeout=seconds)
        return bool(thread.groups) and not turn.done()

    def close(self) -> None:
        """End the thread. A call that blocks it ends with the process."""
        if self._monitoring is not None:
            self._monitoring.cancel()
        if self._thread is not None:
            self._thread.thread.end()


async def _no_op() -> None:
    """Done as soon as the event loop is free."""


class LeasedClient:
    """The client, for a leased group whose workflow may run in another event loop than the current one.

    Requests run in the current loop. None goes to a server with weights older than `floor`. `begins_again`: as that of
    all its requests.
    """

    def __init__(self, client: InferenceClient, floor: int, begins_again: bool = False) -> None:
        self._client = client
        self._leased: dict[str, Any] = {"floor": floor, "begins_again": begins_again}
        self._loop = asyncio.get_running_loop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """As `InferenceClient.generate`."""
        return await self.here(self._client.generate([replace(request, **self._leased) for request in requests]))

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Piece]:
        """As `InferenceClient.stream`."""
        pieces = self._client.stream(replace(request, **self._leased))
        try:
            while (piece := await self.here(anext(pieces, None))) is not None:
                yield piece
        finally:
            await self.here(pieces.aclose())

    async def here(self, work: Awaitable[T]) -> T:
        """The result of work that belongs to the loop of the client, for any loop."""

        async def awaited() -> T:
            return await work

        if asyncio.get_running_loop() is self._loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(awaited(), self._loop))
