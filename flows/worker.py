"""The worker of `arealflow up`: Prefect's process worker, without what delays or breaks a recovery.

Written for Prefect 3.8.8, whose own worker
- reports the death of a flow process twice: immediately, and again after the flow's hooks have run. By then an
  keeper has restarted the flow run, and the second report would mark the new start as crashed;
- runs these hooks in a process that imports the flow, and torch with it, concurrently with the new start;
- starts each flow run through a process that resolves the flow's dependencies. Ours are installed;
- gives a cancelled flow process 30 s before it is killed. Here it must be gone within 10 s.
"""

from __future__ import annotations

import abc
import asyncio
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import anyio
from prefect.runner._flow_run_executor import FlowRunExecutorContext
from prefect.runner._process_manager import ProcessManager
from prefect.runner._starter_engine import EngineCommandStarter
from prefect.utilities.processutils import setup_signal_handlers_worker
from prefect.workers.process import ProcessJobConfiguration, ProcessWorker, ProcessWorkerResult

from flows.cli.processes import POOL

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun, State

CANCEL_SECONDS: Final = 7.0


class NoHooks:
    """A hook runner for flows without hooks."""

    async def run_cancellation_hooks(self, flow_run: FlowRun, state: State[Any]) -> None:
        """Nothing to run."""

    async def run_crashed_hooks(self, flow_run: FlowRun, state: State[Any]) -> None:
        """Nothing to run."""


class FlowWorker(ProcessWorker, abc.ABC):  # a direct base ABC keeps Prefect from registering it for the type "process"
    """Runs flow runs of the work pool as processes of this machine."""

    async def run(
        self,
        flow_run: FlowRun,
        configuration: ProcessJobConfiguration,
        task_status: anyio.abc.TaskStatus[int] | None = None,
    ) -> ProcessWorkerResult:
        """Run the flow in a process until it ends. Always returns success: a failure has been reported already."""
        status = anyio.TASK_STATUS_IGNORED if task_status is None else task_status
        with _folder(configuration.working_dir) as folder:
            async with FlowRunExecutorContext() as context, anyio.create_task_group() as group:
                starter = EngineCommandStarter(
                    command=configuration.command,
                    cwd=Path(folder),
                    env=configuration.env,
                    stream_output=configuration.stream_output,
                    control_channel=context.control_channel,
                    isolate_process_group=True,
                    env_overrides_settings=True,
                )
                hurry(context.process_manager)
                executor = context.create_executor(flow_run, starter, propose_submitting=False, hook_runner=NoHooks())
                handle = await group.start(executor.submit)
                status.started(handle.pid)
        return ProcessWorkerResult(status_code=0, identifier=str(handle.pid))


def hurry(processes: ProcessManager) -> None:
    """Make the manager kill a flow CANCEL_SECONDS after asking it to end; the flow's services end with it."""
    kill = processes.kill

    async def soon(flow_run_id: UUID, grace_seconds: float = CANCEL_SECONDS, *, force: bool = False) -> None:
        await kill(flow_run_id, min(grace_seconds, CANCEL_SECONDS), force=force)

    processes.kill = soon  # type: ignore[method-assign]


def _folder(given: Path | None) -> AbstractContextManager[str | Path]:
    return nullcontext(given) if given else TemporaryDirectory(prefix="arealflow-flow-run-")


def main() -> None:
    setup_signal_handlers_worker(os.getpid(), "the worker", print)
    asyncio.run(FlowWorker(work_pool_name=POOL, name="local").start())


if __name__ == "__main__":
    main()
