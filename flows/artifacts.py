"""Creates artifacts concurrently with the run, in a thread and over a connection of their own.

They load the Prefect server more than the run does, and the server may be down for a while. Neither delays or fails an
iteration: artifacts that cannot be created are counted and logged.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from contextvars import copy_context
from queue import Empty, Full, Queue
from typing import Any, Final
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.runtime import flow_run

from flows.background import CLOSE_SECONDS
from flows.ending import ASK_SECONDS, silence

#: Iterations whose artifacts may be queued; those of further iterations are dropped.
WAITING: Final = 8
REQUEST_SECONDS: Final = 30.0


class Artifacts:
    """Takes work for its thread with `offer`; only there may it call `create` and `show`."""

    def __init__(self, log: Any) -> None:
        self.log = log
        self.lost = 0
        found = flow_run.get_id()
        self.flow_run = UUID(found) if found else None
        self._queue: Queue[tuple[str, Callable[[], object]] | None] = Queue(WAITING)
        self._client: SyncPrefectClient | None = None
        self._shown: dict[str, UUID] = {}  # by key
        self._thread = threading.Thread(target=copy_context().run, args=(self._work,), name="artifacts", daemon=True)
        self._thread.start()

    def offer(self, what: str, make: Callable[[], object]) -> None:
        """Queue `make` for the artifact thread; drop it if the queue is full."""
        try:
            self._queue.put_nowait((what, make))
        except Full:
            self._lose(what, "the Prefect server is too slow for them")

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Wait for the queued work for at most `seconds`, unless the server is gone, and log how much was lost."""
        deadline, asked = time.monotonic() + seconds, False
        while self._thread.is_alive() and (left := deadline - time.monotonic()) > 0:
            with suppress(Full):  # what remains is counted below
                if not asked:
                    self._queue.put(None, timeout=min(ASK_SECONDS, left))
                    asked = True
            self._thread.join(min(ASK_SECONDS, left))
            if self._thread.is_alive() and silence.is_long:
                break
        with suppress(Empty):
            while True:
                self.lost += self._queue.get_nowait() is not None
        if self.lost or self._thread.is_alive():
            self.log.warning("artifacts of %d iterations are missing or incomplete; the run is not", max(1, self.lost))

    def create(
        self, kind: str, data: Any, key: str | None = None, description: str = "", task_run: UUID | None = None
    ) -> UUID:
        """Create an artifact of the flow run, or of one of its task runs. Raises what Prefect's client raises."""
        wanted = ArtifactCreate(
            type=kind, key=key, description=description, data=data, flow_run_id=self.flow_run, task_run_id=task_run
        )
        return self._connected().create_artifact(wanted).id

    def show(self, kind: str, data: Any, key: str, description: str) -> None:
        """Create the artifact of this key, or replace its data. Raises what Prefect's client raises."""
        if key in self._shown:
            self._connected().update_artifact(self._shown[key], ArtifactUpdate(data=data))
        else:
            self._shown[key] = self.create(kind, data, key, description)

    def _connected(self) -> SyncPrefectClient:
        assert self._client is not None, "artifacts are made in their own thread: use `offer`"
        return self._client

    def _work(self) -> None:
        with ExitStack() as stack:
            while (offered := self._queue.get()) is not None:
                what, make = offered
                try:
                    self._client = self._client or stack.enter_context(_new_client())
                    make()
                except Exception as error:  # no error here may fail an iteration
                    self._lose(what, f"{type(error).__name__}: {error}")

    def _lose(self, what: str, reason: str) -> None:
        self.lost += 1
        level = logging.WARNING if self.lost == 1 else logging.DEBUG
        self.log.log(level, "artifacts of %s could not be created (%s); the run continues without", what, reason)


def _new_client() -> SyncPrefectClient:
    """A client separate from the flow engine's."""
    return get_client(httpx_settings={"timeout": REQUEST_SECONDS}, sync_client=True)
