"""The worker of `arealflow up`, which gives a cancelled flow process as long as it takes to end, and forks it."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prefect.runner import _starter_engine
from waiting import LIMIT, until
from warm_processes import Popen

import flows.worker


class Forked:
    """The part of anyio's `Process` that Prefect's worker uses."""

    def __init__(self, process: Popen) -> None:
        self.process = process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.poll()

    async def wait(self) -> int:
        await until(lambda: self.returncode is not None, "the end of the flow process", float("inf"))
        return self.process.wait()


async def run_forked(
    command: Sequence[str],
    *,
    task_status: Any,
    task_status_handler: Callable[[Forked], object],
    env: Mapping[str, str],
    stream_output: bool,
    start_new_session: bool = False,
    **options: Any,
) -> Forked:
    """As Prefect's `run_process`; what the process prints goes where the worker's own output goes."""
    process = Forked(Popen(command, env=env, start_new_session=start_new_session, **options))
    await until(lambda: not start_new_session or os.getsid(process.pid) == process.pid, "its session")
    task_status.started(task_status_handler(process))
    await process.wait()
    return process


if __name__ == "__main__":
    flows.worker.CANCEL_SECONDS = LIMIT  # type: ignore[misc]
    _starter_engine.run_process = run_forked  # type: ignore[assignment]
    flows.worker.main()
