"""Shows long waits of a run while they last: on a page of the Prefect UI and in `arealflow runs`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, ClassVar, Final

from areal_tasks.engines.watchdog import Waited, Watchdog
from areal_tasks.store.backend import StoreError
from areal_tasks.store.runs import Run
from areal_tasks.store.waits import waits_record, write_waits
from flows.artifacts import Artifacts
from flows.background import HURRIED_SECONDS, RepeatedWork
from flows.observe import artifact_key
from flows.pages import waits_page
from schemas.manifest import Wait, WaitsRecord

#: Shorter waits are not shown: most stages of a small run are done by then, and records in the store are permanent.
SHOWN_SECONDS: Final = 20.0
#: Interval between reports of an unchanged wait: at first and at most; it doubles each time.
FIRST_SECONDS: Final = 30.0
LONGEST_SECONDS: Final = 300.0


class Waits(RepeatedWork):
    """Use as a context around the loop. `clock` returns seconds, like the watchdog's."""

    seconds: ClassVar = 5.0
    what: ClassVar = "waits on their page and in the store"
    close_seconds: ClassVar = HURRIED_SECONDS

    def __init__(
        self, run: Run, watchdog: Watchdog, artifacts: Artifacts, log: Any, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(log)
        self.run, self.watchdog, self.artifacts, self.clock = run, watchdog, artifacts, clock
        self._shown: list[tuple[str, str]] | None = []  # None: the last record could not be stored
        self._pause, self._due = FIRST_SECONDS, 0.0
        self._records = 0

    def __enter__(self) -> Waits:
        if self.run.owner > 1:  # an earlier start may have been killed while it waited
            self._show(waits_record((), 0.0))
        return super().__enter__()

    def repeat(self) -> None:
        self.report(self.watchdog.waits(SHOWN_SECONDS))

    def end(self) -> None:
        self.report(())

    def report(self, waits: Sequence[Waited]) -> None:
        """Show and store these waits, unless they are unchanged and the next report of them is not due."""
        named = [(wait.at, wait.what) for wait in waits]
        again = named == self._shown
        if again and (not named or self.clock() < self._due):
            return
        self._pause = min(LONGEST_SECONDS, 2 * self._pause) if again else FIRST_SECONDS
        record = waits_record([_wait(wait) for wait in waits], self._pause)
        self._show(record)
        try:
            write_waits(self.run, self._records + 1, record)
        except StoreError:  # the page shows that the run waits for the store; stored with the next poll
            self._shown = None
        else:
            self._shown, self._due = named, self.clock() + self._pause
            self._records += 1

    def _show(self, record: WaitsRecord) -> None:
        page = waits_page(self.run.name, record, SHOWN_SECONDS)
        key, about = artifact_key(self.run.name, "waits"), f"What {self.run.label} waits for, and since when"
        self.artifacts.offer("what the run waits for", partial(self.artifacts.show, "markdown", page, key, about))


def _wait(found: Waited) -> Wait:
    since = datetime.now(UTC) - timedelta(seconds=found.seconds)
    text = since.isoformat(timespec="seconds")
    return Wait(at=found.at, what=found.what, since=text, limit=found.limit, says=found.says)
