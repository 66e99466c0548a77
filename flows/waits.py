"""Shows what a run waits for, once that lasts, until it ends: on a page of the Prefect UI and in `arealflow runs`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Final
from uuid import UUID

from areal_tasks.engines.watchdog import Waited, Watchdog
from areal_tasks.store.backend import StoreError
from areal_tasks.store.runs import Run
from areal_tasks.store.waits import tell_waits, waits_record
from flows.artifacts import HURRIED_SECONDS, Artifacts
from flows.observe import artifact_key
from flows.pages import waits_page
from schemas.manifest import Wait, WaitsRecord

#: A shorter wait is not shown: most stages of a small run are over by then, and a record in the store is for ever.
SHOWN_SECONDS: Final = 20.0
LOOK_SECONDS: Final = 5.0
#: Until what lasts is told of again, at first and at most; in between, twice as long each time.
FIRST_SECONDS: Final = 30.0
LONGEST_SECONDS: Final = 300.0


class Waits:
    """Use as a context around the loop. `clock` gives seconds, as the watchdog's does."""

    def __init__(
        self, run: Run, watchdog: Watchdog, artifacts: Artifacts, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.run, self.watchdog, self.artifacts, self.clock = run, watchdog, artifacts, clock
        self._shown: list[tuple[str, str]] | None = []  # None: what the store was to be told, it has not taken
        self._pause, self._due = FIRST_SECONDS, 0.0
        self._records = 0
        self._page: UUID | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="waits", daemon=True)

    def __enter__(self) -> Waits:
        if self.run.owner > 1:  # an earlier start may have been killed while it waited
            self._show(waits_record((), 0.0))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(HURRIED_SECONDS)

    def _work(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            self.tell(self.watchdog.waits(SHOWN_SECONDS))
        self.tell(())

    def tell(self, waits: Sequence[Waited]) -> None:
        """Show these waits unless they are shown already, and have been told of lately."""
        named = [(wait.at, wait.what) for wait in waits]
        again = named == self._shown
        if again and (not named or self.clock() < self._due):
            return
        self._pause = min(LONGEST_SECONDS, 2 * self._pause) if again else FIRST_SECONDS
        record = waits_record([_wait(one) for one in waits], self._pause)
        self._show(record)
        try:
            tell_waits(self.run, self._records + 1, record)
        except StoreError:  # it is waited for, as the page says; it is told with the next look
            self._shown = None
        else:
            self._shown, self._due = named, self.clock() + self._pause
            self._records += 1

    def _show(self, record: WaitsRecord) -> None:
        self.artifacts.offer("what the run waits for", lambda artifacts: self._write(artifacts, record))

    def _write(self, artifacts: Artifacts, record: WaitsRecord) -> None:
        page = waits_page(self.run.name, record, SHOWN_SECONDS)
        if self._page is None:
            about = f"What {self.run.label} waits for, and since when"
            self._page = artifacts.create("markdown", page, artifact_key(self.run.name, "waits"), about)
        else:
            artifacts.update(self._page, page)


def _wait(found: Waited) -> Wait:
    since = datetime.now(UTC) - timedelta(seconds=found.seconds)
    text = since.isoformat(timespec="seconds")
    return Wait(at=found.at, what=found.what, since=text, limit=found.limit, says=found.says)
