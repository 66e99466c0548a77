"""The worker of `arealflow up`: Prefect's process worker, without what delays or breaks a recovery.

For other Prefect servers: `PREFECT_API_URL=… python -m flows.worker`.

Written for Prefect 3.8.8, whose own worker
- reports the death of a flow process twice: immediately, and again after the flow's hooks have run. By then the flow
  run has been restarted, and the second report would mark the new start as crashed;
- imports the flow, and torch with it, to run these hooks, concurrently with the new start;
- starts each flow run through a process that resolves the flow's dependencies. Ours are installed;
- may never end after SIGTERM or Ctrl-C (see `work`);
- gives a cancelled flow process 30 s before it is killed. Here it must be gone within 10 s;
- has flow runs send a heartbeat every 180 s: `deployments/automations/lost.yaml` counts them as lost after 100 s.
"""

from __future__ import annotations

import abc
import asyncio
import os
import signal
import socket
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import anyio
from prefect import Flow
from prefect.runner import _flow_run_executor
from prefect.runner._process_manager import ProcessManager
from prefect.runner._starter_engine import EngineCommandStarter
from prefect.workers import process
from prefect.workers.process import ProcessJobConfiguration, ProcessWorker, ProcessWorkerResult

from flows.cli.processes import POOL

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun

CANCEL_SECONDS: Final = 7.0
HEARTBEAT_SECONDS: Final = 30  # the least that Prefect allows
#: As Prefect starts flow runs whose dependencies it resolves: cancelling one ends all processes of its group, and the
#: variables of its deployment overrule the worker's.
STARTER: Final = partial(EngineCommandStarter, isolate_process_group=True, env_overrides_settings=True)


class FlowWorker(ProcessWorker, abc.ABC):  # a direct base ABC keeps Prefect from registering it for the type "process"
    """Runs flow runs of the work pool as processes of this machine."""

    async def run(
        self,
        flow_run: FlowRun,
        configuration: ProcessJobConfiguration,
        task_status: anyio.abc.TaskStatus[int] | None = None,
    ) -> ProcessWorkerResult:
        """Run the flow in a process until it ends. Always returns success: a failure has been reported already."""
        configuration._command_configured = True  # so that it is run as it is, without resolving dependencies
        ended = await super().run(flow_run, configuration, task_status)
        return ProcessWorkerResult(status_code=0, identifier=ended.identifier)


class QuickKillManager(ProcessManager):
    """Kills a flow CANCEL_SECONDS after asking it to end; the flow's services end with it."""

    async def kill(self, flow_run_id: UUID, grace_seconds: float = CANCEL_SECONDS, *, force: bool = False) -> None:
        await super().kill(flow_run_id, min(grace_seconds, CANCEL_SECONDS), force=force)


async def flow_without_hooks(flow_run: FlowRun) -> Flow[..., Any]:
    """Stands for the flow of a flow run, which has no hooks."""
    return Flow(lambda: None, name=str(flow_run.flow_id))


async def work() -> None:
    """Run the worker until SIGTERM or SIGINT, which cancels this task. A second SIGTERM does not cancel it again.

    Prefect's handlers raise KeyboardInterrupt instead, wherever the process is. Raised while anyio starts a thread, or
    by a second SIGTERM (`deployments/ray/worker.sh` sends two) while asyncio cancels all tasks for the first, it leaves
    a thread of anyio's that is never asked to end, and for which the process waits for ever.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def end() -> None:
        loop.add_signal_handler(signal.SIGTERM, lambda: None)
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, end)
    await FlowWorker(work_pool_name=POOL, name=socket.gethostname()).start()


def main() -> None:
    """Replace the parts of Prefect that the module's docstring names, and run the worker until a signal."""
    process.EngineCommandStarter = STARTER  # type: ignore[attr-defined, assignment]
    process.load_flow_from_flow_run = flow_without_hooks  # type: ignore[attr-defined, assignment]
    _flow_run_executor.ProcessManager = QuickKillManager  # type: ignore[attr-defined]
    os.environ.setdefault("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", str(HEARTBEAT_SECONDS))  # flow runs inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)  # asyncio cancels `work` by it, and `… &` has it ignored
    try:
        asyncio.run(work())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None  # after either signal the process ends as one that was interrupted


if __name__ == "__main__":
    main()
