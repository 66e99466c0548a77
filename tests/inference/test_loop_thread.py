"""The event loop of the inference client, and the threads of a flow."""

from __future__ import annotations

import asyncio
import sys
import threading
import warnings
from collections.abc import Iterator

import pytest
from waiting import LIMIT, wait_until

from areal_tasks.engines.loop_thread import LoopThread


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    found = LoopThread()
    yield found
    found.stop()
    found.thread.join(LIMIT)
    assert not found.thread.is_alive()


async def leaves() -> None:
    sys.exit(3)


async def beside_others() -> None:
    await asyncio.gather(asyncio.sleep(0.01), leaves())  # something else under way


@pytest.mark.parametrize("work", [leaves, beside_others])
def test_a_task_that_exits_ends_its_own_call_and_no_other(thread: LoopThread, work: object) -> None:
    with pytest.raises(SystemExit) as left:
        thread.run(work(), LIMIT)  # type: ignore[operator]
    assert left.value.code == 3
    assert thread.run(asyncio.sleep(0, "still here"), LIMIT) == "still here"  # no time at all


def test_a_call_ends_when_the_loop_does() -> None:
    """As one of an evaluation whose flow is cancelled."""
    thread, began = LoopThread(), threading.Event()

    async def endless() -> None:
        began.set()
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="'inference-client' has ended"):
        thread.run(endless(), meanwhile=lambda: began.wait(LIMIT) and thread.stop())


def test_a_call_after_the_end_of_the_loop_leaves_no_coroutine() -> None:
    thread = LoopThread()
    thread.stop()
    wait_until(thread.loop.is_closed)
    with warnings.catch_warnings(), pytest.raises(RuntimeError, match="closed"):
        warnings.simplefilter("error")
        thread.run(asyncio.sleep(0))  # any coroutine: it never begins
