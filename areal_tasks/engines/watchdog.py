"""Names what a silent run waits for, since when, and ends a service that makes no progress for too long.

A wait is registered with a function that polls the services concerned. A poll gives a heartbeat for each: a value that
changes whenever the service makes progress, however long its work takes. A service whose heartbeat does not change, or
that gives none, is named in the log after `launcher.warn_seconds`, then at intervals that double; after
`launcher.hang_seconds` it is ended. Its caller sees that like any other exit: the supervisor restarts it, at most
`launcher.restarts` times in a row. A restarted service is watched again: it may hang again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from areal_tasks.store.under_way import LEDGER, Ledger
from schemas.recipe.sections import Launcher

log = logging.getLogger(__name__)

LOOKS: Final = 4  # within the first warning interval
LONGEST_PAUSE: Final = 15.0  # seconds between two looks
HERE: Final = "this process"  # where something is waited for that no service is at
STORE_LIMIT: Final = "S3: 30 s for an answer, some attempts; a disk: none"


@dataclass(frozen=True)
class Heartbeat:
    """What a poll of a service found: a value that changes with its progress (None: no answer), and its own words.

    `limit`: what ends the wait for it; empty: if it hangs, it is ended.
    """

    progress: object
    says: str
    limit: str = ""


@dataclass(frozen=True)
class Waited:
    """What the run waits for: who is at it, for how many seconds, what ends the wait, and what was said of it last."""

    at: str
    what: str
    seconds: float
    limit: str
    says: str = ""


Poll = Callable[[], Mapping[str, Heartbeat]]


@dataclass
class _Silence:
    """A service that is waited for: its last new heartbeat, since when, and after how many seconds to complain.

    `limit` is as in `Heartbeat`.
    """

    progress: object
    since: float
    complain_after: float
    limit: str
    says: str = ""


@dataclass(eq=False)
class _Wait:
    """Something that the run waits for. `limit`: what ends the wait; empty: the end of a service that hangs."""

    what: str
    look: Poll
    limit: str
    since: float
    silences: dict[str, _Silence] = field(default_factory=dict)


class Watchdog:
    """One thread that looks after everything a run waits for.

    `end` ends the service of that name, for that reason; it is called again while nothing has taken its place.
    `clock` gives seconds, as that of the ledger does.
    """

    def __init__(
        self,
        settings: Launcher,
        end: Callable[[str, str], None],
        ledger: Ledger = LEDGER,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.end = end
        self.clock = clock
        self.pause = min(LONGEST_PAUSE, min(settings.warn_seconds, settings.hang_seconds) / LOOKS)
        self._ledger = ledger
        self._complained: dict[int, float] = {}  # store operation -> seconds after which the next complaint is due
        self._waits: dict[int, _Wait] = {}
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def close(self) -> None:
        """Poll no more. Does not wait for a look that is under way."""
        self._closed.set()

    @contextmanager
    def waiting(self, what: str, look: Poll = dict, *, limit: str = "") -> Iterator[None]:
        """While inside, the run waits for `what`, which the services that `look` tells of are at.

        `look` is called in a thread of its own. It leaves out services that have nothing to do. They are ended when
        they hang, unless something else ends the wait: `limit` names it, here or in their heartbeats.
        """
        wait = _Wait(what, look, limit, self.clock())
        self._waits[id(wait)] = wait
        try:
            yield
        finally:
            del self._waits[id(wait)]

    def waits(self, seconds: float) -> list[Waited]:
        """What has been waited for at least so long, the longest first. May be called from any thread.

        What this process itself is at is named only where no service and no store is waited for.
        """
        now, waits = self.clock(), list(self._waits.values())
        hung = f"no progress for {self.settings.hang_seconds:g} s (launcher.hang_seconds)"
        found = [
            *(Waited("the store", one.what, now - one.since, STORE_LIMIT) for one in self._ledger.under_way()),
            *(
                Waited(name, wait.what, now - wait.since, silence.limit or hung, silence.says)
                for wait in waits
                for name, silence in list(wait.silences.items())
            ),
        ]
        here = [Waited(HERE, wait.what, now - wait.since, wait.limit or "none") for wait in waits]
        lasting = [w for w in found if w.seconds >= seconds] or [w for w in here if w.seconds >= seconds]
        return sorted(lasting, key=lambda wait: -wait.seconds)

    def _run(self) -> None:
        while not self._closed.wait(self.pause):
            self.look()

    def look(self) -> None:
        """Poll at everything that is waited for, and act on what is found."""
        now = self.clock()
        self._look_at_store()
        for wait in list(self._waits.values()):
            if now - wait.since >= self.pause:
                self._look_at(wait)

    def _look_at(self, wait: _Wait) -> None:
        try:
            heartbeats = wait.look()
        except Exception:  # a look must never end the watch over everything else
            if not self._closed.is_set():
                log.exception("could not look at what is at %s", wait.what)
            return
        for name in wait.silences.keys() - heartbeats.keys():
            del wait.silences[name]
        for name, heartbeat in heartbeats.items():
            self._judge(wait, name, heartbeat)

    def _judge(self, wait: _Wait, name: str, heartbeat: Heartbeat) -> None:
        now, known = self.clock(), wait.silences.get(name)
        if known is None:  # one that gives no heartbeat may have given none since the wait began
            since = wait.since if heartbeat.progress is None else now
            limit = heartbeat.limit or wait.limit
            known = wait.silences[name] = _Silence(heartbeat.progress, since, self.settings.warn_seconds, limit)
        elif heartbeat.progress is not None and heartbeat.progress != known.progress:
            known.progress, known.since, known.complain_after = heartbeat.progress, now, self.settings.warn_seconds
        known.says = heartbeat.says
        self._act(wait, name, heartbeat, known, now - known.since)

    def _act(self, wait: _Wait, name: str, heartbeat: Heartbeat, known: _Silence, silent: float) -> None:
        mortal = not known.limit and self.settings.type != "inline"
        found = f"{wait.what}: no progress since {_clock(silent)} ({silent:.0f} s); {heartbeat.says}"
        if mortal and silent >= self.settings.hang_seconds:
            known.since, known.complain_after = self.clock(), self.settings.warn_seconds  # of whatever comes next
            self.end(name, f"hangs at {found}")
        elif silent >= known.complain_after:
            known.complain_after = 2 * max(known.complain_after, silent)
            threat = f". After {self.settings.hang_seconds:g} s (launcher.hang_seconds) it is started again"
            log.warning("waiting for %s, %s%s", name, found, threat * mortal)

    def _look_at_store(self) -> None:
        """The store has no heartbeat but its answers: each operation stands for itself."""
        asked, now = self._ledger.under_way(), self.clock()
        for number in self._complained.keys() - {one.number for one in asked}:
            del self._complained[number]
        for one in asked:
            after, waited = self._complained.get(one.number, self.settings.warn_seconds), now - one.since
            if waited >= after:
                self._complained[one.number] = 2 * max(after, waited)
                log.warning("waiting for the store, %s: no answer since %s (%.0f s)", one.what, _clock(waited), waited)


def _clock(seconds_ago: float) -> str:
    """The time of day then, for people."""
    return (datetime.now() - timedelta(seconds=seconds_ago)).strftime("%H:%M:%S")
