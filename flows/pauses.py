"""A paused flow run begins no stage until it is resumed; its services keep running and keep their memory.

No groups begin ahead of the running stage either, also while a suspended or cancelled flow run has yet to end. A worker
ends a cancelled one; without a worker it ends itself.

Prefect's engine honours suspensions but not pauses: it sets the states of task runs in this process, where no server
can refuse them. So a thread polls the state of the flow run, over a connection of its own.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from typing import Any, Final
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL

from areal_tasks.engines.watchdog import Heartbeat, Watchdog
from flows.cli.processes import FLOW_RUN

POLL_SECONDS: Final = 2.0
RESUME_SECONDS: Final = 0.1
#: A flow run can be neither paused nor resumed meanwhile. RuntimeError: Prefect's client cannot connect.
_AWAY: Final = (httpx.HTTPError, ObjectNotFound, RuntimeError)


class Pauses:
    """Use as a context around the loop, and call `wait_while_paused` before each stage.

    `on_stopping` is called in the polling thread: True if no groups may begin ahead of the running stage.
    """

    def __init__(self, log: Any, watchdog: Watchdog) -> None:
        self.log = log
        self.watchdog = watchdog
        self.on_stopping: Callable[[bool], object] = lambda stops: None
        self.flow_run = flow_run.get_id() if PREFECT_API_URL.value() else None
        self._paused, self._stopping = False, False
        self._over = threading.Event()

    def __enter__(self) -> Pauses:
        if self.flow_run:
            threading.Thread(target=copy_context().run, args=(self._watch,), name="pauses", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()

    def wait_while_paused(self) -> None:
        """Wait while the flow run is paused."""
        if self._paused:
            with self.watchdog.waiting("to be resumed", _person, limit="the pause's own timeout"):
                while self._paused:
                    time.sleep(RESUME_SECONDS)

    def _watch(self) -> None:
        while not self._over.wait(POLL_SECONDS):
            with suppress(*_AWAY), get_client(sync_client=True) as client:
                self._poll(client)
                while not self._over.wait(POLL_SECONDS):
                    self._poll(client)

    def _poll(self, client: SyncPrefectClient) -> None:
        if (state := client.read_flow_run(UUID(self.flow_run)).state) is None:
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


def _person() -> dict[str, Heartbeat]:
    return {"a person": Heartbeat(object(), "the flow run is paused")}  # always new: the watchdog never warns
