"""A user's workflow, in a thread with an event loop of its own: a call that blocks there stops no request.

Requests are made in the loop of the client, which goes on. A call that blocks only delays the other workflows that
wait in that thread. One that blocks for longer than `workflow.blocked_seconds` costs its group the attempt: the thread
is left to it, and the other groups of the thread begin again in a new one.
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

LOOKS: Final = 4  # at a thread, within the time that a call may block
_GROUP: ContextVar[int] = ContextVar("group")


async def in_time(work: Awaitable[T], seconds: float, setting: str) -> T:
    """Await user code. TimeoutError, which names the setting, if it is not done after so many seconds."""
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
class Place:
    """A thread for workflows. `left` is done when it is left to the groups that it is the result of."""

    left: asyncio.Future[frozenset[int]]
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

    def culprits(self) -> frozenset[int]:
        """The group whose task runs; all groups where that is not known."""
        task = asyncio.current_task(self.thread.loop)
        group = self.owners.get(task) if task is not None else None
        return frozenset(self.groups) if group is None else frozenset({group})

    def stack(self) -> str:
        """Where the thread is."""
        frame = sys._current_frames().get(self.thread.thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame else ""


class Apart:
    """Runs `workflow` in a thread of its own; `run` belongs to one event loop, that of the client."""

    def __init__(self, workflow: Workflow, blocked_seconds: float) -> None:
        self._workflow = workflow
        self._seconds = blocked_seconds
        self._place: Place | None = None
        self._watch: asyncio.Task[None] | None = None

    async def run(self, prompt: Prompt, context: WorkflowContext) -> list[Sample]:
        """The group's samples. Raises Blocked, and what the workflow raises."""
        while True:
            place = self._here()
            group, loop = prompt.group_id, asyncio.get_running_loop()
            across = replace(context, client=_Across(context.client, loop))  # type: ignore[arg-type]
            ended = asyncio.wrap_future(place.thread.submit(self._run(prompt, across, place)))
            place.groups.add(group)
            try:
                either: list[asyncio.Future[Any]] = [ended, place.left]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            finally:
                place.groups.discard(group)
                ended.cancel()  # unless it is done
            if ended.done() and not ended.cancelled():
                return ended.result()
            if not place.left.done():
                raise asyncio.CancelledError  # the workflow has cancelled itself
            if group in place.left.result():
                raise Blocked(
                    f"it has blocked its event loop for {self._seconds:g} s (workflow.blocked_seconds): "
                    "`await asyncio.to_thread(...)` takes such a call out of the loop"
                )

    async def _run(self, prompt: Prompt, context: WorkflowContext, place: Place) -> list[Sample]:
        _GROUP.set(prompt.group_id)  # for the tasks that it makes
        if (task := asyncio.current_task()) is not None:
            place.owners[task] = prompt.group_id
        return await self._workflow.run(prompt, context)

    def _here(self) -> Place:
        if self._place is None:
            self._place = Place(asyncio.get_running_loop().create_future())
            self._watch = asyncio.ensure_future(self._look_after(self._place))
        return self._place

    async def _look_after(self, place: Place) -> None:
        """Until the thread does nothing for too long."""
        while not await self._is_blocked(place):
            await asyncio.sleep(self._seconds / LOOKS)
        culprits = place.culprits()
        log.error("a workflow blocks its event loop (groups %s), at\n%s", sorted(culprits), place.stack())
        self._place = None
        place.left.set_result(culprits)
        place.thread.end()

    async def _is_blocked(self, place: Place) -> bool:
        """Whether the thread takes no turn for too long, though there are groups in it."""
        turn = asyncio.wrap_future(place.thread.submit(_nothing()))
        for seconds in (self._seconds, self._seconds / LOOKS):  # this loop may have been late itself
            await asyncio.wait([turn], timeout=seconds)
        return bool(place.groups) and not turn.done()

    def close(self) -> None:
        """Use no thread any more. What blocks ends with the process."""
        if self._watch is not None:
            self._watch.cancel()
        if self._place is not None:
            self._place.thread.end()


async def _nothing() -> None:
    """A turn of the loop."""


class _Across:
    """The client, for workflows in another event loop than its own; what else they ask it for they get from itself."""

    def __init__(self, client: InferenceClient, home: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._home = home

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """As `InferenceClient.generate`."""
        return await self._at_home(self._client.generate(requests))

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Piece]:
        """As `InferenceClient.stream`."""
        pieces = self._client.stream(request)
        try:
            while (piece := await self._at_home(anext(pieces, None))) is not None:
                yield piece
        finally:
            await self._at_home(pieces.aclose())

    async def _at_home(self, work: Awaitable[T]) -> T:
        async def waited_for() -> T:
            return await work

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(waited_for(), self._home))
