"""A paused flow run begins no stage until it is resumed; its services keep running and keep their memory.

No groups begin ahead of the running stage either, also while a suspended or cancelled flow run has yet to end. A worker
ends a cancelled one; without a worker it ends itself.

Prefect's engine honours suspensions but not pauses: it sets the states of task runs in this process, where no server
can refuse them. So a thread polls the state of the flow run, with the client that Prefect's engine has for it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any, ClassVar, Final
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL

from areal_tasks.engines.watchdog import Heartbeat, Watchdog
from flows.background import RepeatedWork
from flows.cli.processes import FLOW_RUN

RESUME_SECONDS: Final = 0.1


class Pauses(RepeatedWork):
    """Use as a context around the loop, and call `wait_while_paused` before each stage.

    `on_stopping` is called in the polling thread: True if no groups may begin ahead of the running stage.
    """

    seconds: ClassVar = 2.0
    what: ClassVar = "pauses of the flow run"
    close_seconds: ClassVar = 0.0  # a server that hangs must not delay the end: no answer matters any more

    def __init__(self, log: Any, watchdog: Watchdog) -> None:
        super().__init__(log)
        self.watchdog = watchdog
        self.on_stopping: Callable[[bool], object] = lambda stops: None
        self.flow_run = flow_run.get_id() if PREFECT_API_URL.value() else None
        self._client = get_client(sync_client=True) if self.flow_run else None
        self._paused, self._stopping = False, False

    def wait_while_paused(self) -> None:
        """Wait while the flow run is paused. The heartbeat is always new, so that the watchdog never warns."""
        if self._paused:
            says, limit = "the flow run is paused", "the pause's own timeout"
            with self.watchdog.waiting("to be resumed", lambda: {"a person": Heartbeat(object(), says)}, limit=limit):
                while self._paused:
                    time.sleep(RESUME_SECONDS)

    def end(self) -> None:
        """Nothing: no stage follows."""

    def repeat(self) -> None:
        """Poll the state. While the server does not answer, the flow run can be neither paused nor resumed."""
        if self._client is None or (state := self._client.read_flow_run(UUID(self.flow_run)).state) is None:
            return
        if self._over.is_set():  # the answer took long: the loop has ended, and perhaps another start has begun
            return
        paused = state.is_paused() and state.name != "Suspended"  # a suspension ends the process instead
        stops = state.is_paused() or state.is_cancelling()
        if stops != self._stopping:
            self.on_stopping(stops)
            if state.is_cancelling() and FLOW_RUN not in os.environ:
                self.log.warning("this flow run is cancelled, and no worker ends it: it ends itself")
                os.kill(os.getpid(), signal.SIGTERM)  # SIGINT is ignored in a shell's background
        if paused and not self._paused:
            self.log.info("paused: no stage begins until this flow run is resumed; its services keep running")
        elif self._paused and not paused:
            self.log.info("the flow run is resumed")
        self._paused, self._stopping = paused, stops
