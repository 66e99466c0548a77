"""The event loop of the inference client, beside the threads of a flow."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator

import pytest
from waiting import LIMIT

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
