"""The worker ends when it is asked to, however it was started, and whatever it is doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from waiting import LIMIT

IGNORES_SIGINT = "trap '' INT; exec \"$@\""  # as a shell without job control starts what follows with `&`

#: A worker whose work is argv[1]. anyio hands what blocks, such as printing what a flow prints, to a thread.
WORKER = """
import asyncio, signal, sys, threading
import anyio
from flows import worker

class Work:
    def __init__(self, **options):
        self.start = globals()[sys.argv[1]]

async def starts_a_thread():
    start = threading.Thread.start
    def start_and_interrupt(thread):
        start(thread)
        signal.raise_signal(int(sys.argv[2]))
    threading.Thread.start = start_and_interrupt
    await anyio.to_thread.run_sync(int)
    await anyio.sleep_forever()

async def is_being_cancelled():
    await anyio.to_thread.run_sync(int)
    asyncio.get_running_loop().call_soon(signal.raise_signal, int(sys.argv[2]))
    try:
        await anyio.sleep_forever()
    finally:
        signal.raise_signal(int(sys.argv[2]))

worker.FlowWorker = Work
worker.main()
"""


def test_sigterm_ends_a_worker_that_was_started_in_the_background(api: str) -> None:
    command = ["sh", "-c", IGNORES_SIGINT, "sh", sys.executable, "-P", "-m", "flows.worker"]
    server = {"PREFECT_API_URL": api}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | server) as worker:
        assert worker.stdout is not None
        assert any("started!" in line for line in worker.stdout)
        worker.terminate()
        try:
            worker.wait(LIMIT)
        finally:
            worker.kill()


@pytest.mark.parametrize(
    ("work", "number"),
    [
        ("starts_a_thread", signal.SIGTERM),
        ("starts_a_thread", signal.SIGINT),
        ("is_being_cancelled", signal.SIGTERM),  # the second of two, as deployments/ray/worker.sh sends them
    ],
)
def test_a_signal_ends_a_worker_at_any_moment(work: str, number: signal.Signals) -> None:
    command = [sys.executable, "-c", WORKER, work, str(int(number))]
    assert subprocess.run(command, timeout=LIMIT, check=False).returncode == -signal.SIGINT
