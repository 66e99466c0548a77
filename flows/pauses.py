"""A flow run that a person has paused begins no stage until it is resumed; its services stay, and hold their memory.

Nor do groups begin ahead of the stage at work, also where the flow run is suspended or cancelled and has yet to end.

Prefect's engine heeds a suspension, not a pause: the states of task runs are made in this process, where no server says
no. So the state of the flow run is asked for again and again, in a thread and over a connection of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context
from types import TracebackType
from typing import Any, Final
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL

from areal_tasks.engines.watchdog import Heartbeat, Watchdog

LOOK_SECONDS: Final = 2.0
_AWAY: Final = (httpx.HTTPError, ObjectNotFound, RuntimeError)  # Prefect's client raises the last where nobody listens


class Pauses:
    """Use as a context around the loop, and call `hold` before each stage.

    `tell` is told, in a thread of its own, whether groups may begin ahead of the stage at work.
    """

    def __init__(self, log: Any, watchdog: Watchdog) -> None:
        self.log = log
        self.watchdog = watchdog
        self.tell: Callable[[bool], object] = lambda stops: None
        self.flow_run = flow_run.get_id() if PREFECT_API_URL.value() else None
        self._may_go, self._over = threading.Event(), threading.Event()
        self._may_go.set()
        self._told = False

    def __enter__(self) -> Pauses:
        if self.flow_run:
            threading.Thread(target=copy_context().run, args=(self._watch,), name="pauses", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()

    def hold(self) -> None:
        """Wait while the flow run is paused."""
        if self._may_go.is_set():
            return
        with self.watchdog.waiting("to be resumed", _person, limit="the pause's own timeout"):
            while not self._may_go.wait(0.5):  # not for ever: a signal that cancels is handled between
                pass

    def _watch(self) -> None:
        while not self._over.is_set():
            try:
                with get_client(sync_client=True) as client:
                    self._look(client)
            except _AWAY:  # nobody can pause a flow run while the server is away, or resume it
                self._over.wait(LOOK_SECONDS)

    def _look(self, client: SyncPrefectClient) -> None:
        while not self._over.wait(LOOK_SECONDS):
            state = client.read_flow_run(UUID(self.flow_run)).state
            held, stops = is_held(state), is_stopping(state)
            if stops != self._told:
                self.tell(stops)
                self._told = stops
            if held and self._may_go.is_set():
                self._may_go.clear()
                self.log.info("paused: no stage begins until this flow run is resumed; its services stay")
            elif not held and not self._may_go.is_set():
                self.log.info("the flow run goes on")
                self._may_go.set()


def _person() -> dict[str, Heartbeat]:
    return {
        "a person": Heartbeat(object(), "the flow run is paused")
    }  # who owes no progress: the log does not complain


def is_stopping(state: State[Any] | None) -> bool:
    """Whether no stage follows the one at work, for now or for good."""
    return state is not None and (state.is_paused() or state.is_cancelling())


def is_held(state: State[Any] | None) -> bool:
    """Whether this state is a pause, and no suspension, which ends the process instead."""
    return state is not None and state.is_paused() and state.name != "Suspended"
