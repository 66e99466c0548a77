"""Logs what a silent run waits for, and since when; ends a service that makes no progress for too long.

A wait is registered with a function that polls the services concerned. A poll returns a heartbeat per service: a value
that changes whenever the service makes progress, however long its work takes. A service whose heartbeat does not change
or is missing is named in the log after `launcher.warn_seconds`, then at doubling intervals; after
`launcher.hang_seconds` the watchdog ends it. Its caller sees that like any other exit: the supervisor restarts it, at
most `launcher.restarts` times in a row. A restarted service is watched again. An operation that the store does not
answer in `launcher.store_seconds` ends this process, as nothing else would: a disk that hangs cannot be interrupted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Final

from areal_tasks.engines.service import UNAVAILABLE
from areal_tasks.store.in_flight import LEDGER, Ledger, patiently
from schemas.recipe.launcher import Launcher

log = logging.getLogger(__name__)

POLLS: Final = 4  # within the first warning interval
LONGEST_PAUSE: Final = 15.0  # seconds between two polls
THIS_PROCESS: Final = "this process"  # named for a wait that concerns no service


@dataclass(frozen=True)
class Heartbeat:
    """The result of polling a service: a value that changes with its progress (None: no answer), and its description.

    `limit`: what ends the wait for the service; empty: the watchdog ends it if it hangs. `work_limit`: what else ends
    what such a service works on, however well it answers.
    """

    progress: object
    says: str
    limit: str = ""
    work_limit: str = ""


@dataclass(frozen=True)
class Waited:
    """A wait of the run: for which service, for what, for how long, what limits it, and the heartbeat's description."""

    at: str
    what: str
    seconds: float
    limit: str
    says: str = ""


Poll = Callable[[], Mapping[str, Heartbeat]]


@dataclass
class _Silence:
    """A service that the run waits for: its last heartbeat and progress, since when, and after how many s to warn."""

    progress: object
    since: float
    warn_after: float
    last: Heartbeat


@dataclass(eq=False)
class _Wait:
    """A registered wait. `limit`, `commands`: see `Watchdog.waiting`."""

    what: str
    poll: Poll
    limit: str
    commands: str
    since: float
    silences: dict[str, _Silence] = field(default_factory=dict)


@dataclass(eq=False)
class Watchdog:
    """Two threads that watch everything a run waits for: one the store, which the other may itself have to wait for.

    `end(name, reason)` ends a service, again until it has been replaced. `clock` returns seconds, as the ledger does.
    """

    settings: Launcher
    end: Callable[[str, str], None]
    ledger: Ledger = LEDGER
    clock: Callable[[], float] = time.monotonic
    _warned: dict[int, float] = field(default_factory=dict)  # store operation -> seconds after which to warn again
    _waits: dict[int, _Wait] = field(default_factory=dict)
    _closed: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.pause = min(LONGEST_PAUSE, min(self.settings.warn_seconds, self.settings.hang_seconds) / POLLS)
        for poll in (lambda: self.check_store(), lambda: self.poll_all()):
            threading.Thread(target=self._run, args=(poll,), name="watchdog", daemon=True).start()

    def close(self) -> None:
        """Stop polling. Does not wait for a poll in progress."""
        self._closed.set()

    @contextmanager
    def waiting(self, what: str, poll: Poll = dict, *, limit: str = "", commands: str = "") -> Iterator[None]:
        """While inside, the run waits for `what`, on which the services that `poll` reports are working.

        `poll` is called in the watchdog's thread, and omits idle services. A service that hangs is ended, unless
        something else ends the wait: `limit` names it, here or in the heartbeat. `commands`: the trainer that `what` is
        a command of.
        """
        wait = _Wait(what, poll, limit, commands, self.clock())
        self._waits[id(wait)] = wait
        try:
            yield
        finally:
            del self._waits[id(wait)]

    def registered(self, trainer: str = "") -> list[str]:
        """What the run waits for now, however briefly, the longest wait first. May be called from any thread.

        Without the commands of other trainers than `trainer`, if given.
        """
        return [one.what for one in list(self._waits.values()) if not trainer or one.commands in ("", trainer)]

    def waits(self, seconds: float) -> list[Waited]:
        """The waits of at least `seconds`, longest first; this process only if there are no others. For any thread."""
        now, waits = self.clock(), list(self._waits.values())
        hung = f"no progress for {self.settings.hang_seconds:g} s (launcher.hang_seconds)"
        hung = hung if self.settings.type != "inline" else "none for a thread (launcher.type inline)"
        store = f"{self.settings.store_seconds:g} s (launcher.store_seconds); S3: 30 s for an answer, some attempts"
        found = [Waited("the store", one.what, now - one.since, store) for one in self.ledger.in_flight()]
        for wait in waits:
            for name, silence in list(wait.silences.items()):
                last = silence.last
                limit = last.limit or "; ".join(filter(None, [hung, last.work_limit]))
                found.append(Waited(name, wait.what, now - wait.since, limit, last.says))
        own = [Waited(THIS_PROCESS, wait.what, now - wait.since, wait.limit or "none") for wait in waits]
        lasting = [w for w in found if w.seconds >= seconds] or [w for w in own if w.seconds >= seconds]
        return sorted(lasting, key=lambda wait: -wait.seconds)

    def _run(self, poll: Callable[[], None]) -> None:
        while not self._closed.wait(self.pause):
            poll()

    def poll_all(self) -> None:
        """Poll all services that the run waits for, and act on the results."""
        now = self.clock()
        for wait in list(self._waits.values()):
            if now - wait.since >= self.pause:
                self._poll(wait)

    def _poll(self, wait: _Wait) -> None:
        try:
            heartbeats = wait.poll()
        except Exception:  # a failed poll must not end the watchdog's thread
            if not self._closed.is_set():
                log.exception("could not poll the services that work on %s", wait.what)
            return
        for name in wait.silences.keys() - heartbeats.keys():
            del wait.silences[name]
        for name, heartbeat in heartbeats.items():
            self._update(wait, name, replace(heartbeat, limit=heartbeat.limit or wait.limit))

    def _update(self, wait: _Wait, name: str, heartbeat: Heartbeat) -> None:
        now, known = self.clock(), wait.silences.get(name)
        if known is None:  # a service without a heartbeat may have been silent since the wait began
            since = wait.since if heartbeat.progress is None else now
            known = wait.silences[name] = _Silence(heartbeat.progress, since, self.settings.warn_seconds, heartbeat)
        elif heartbeat.progress is not None and heartbeat.progress != known.progress:
            known.progress, known.since, known.warn_after = heartbeat.progress, now, self.settings.warn_seconds
        known.last, silent = heartbeat, now - known.since
        endable = not heartbeat.limit and self.settings.type != "inline"
        found = f"{wait.what}: no progress since {_clock(silent)} ({silent:.0f} s); {heartbeat.says}"
        if endable and silent >= self.settings.hang_seconds:
            known.since, known.warn_after = now, self.settings.warn_seconds  # for the restarted service
            self.end(name, f"hangs at {found}")
        elif silent >= known.warn_after:
            known.warn_after = 2 * max(known.warn_after, silent)
            notice = f". After {self.settings.hang_seconds:g} s (launcher.hang_seconds) at the latest it is restarted"
            log.warning("waiting for %s, %s%s", name, found, notice * endable)

    def check_store(self) -> None:
        """Warn of each store operation that lasts long; one that lasts `launcher.store_seconds` ends this process."""
        self.ledger.end_if_hangs(self.settings.store_seconds, UNAVAILABLE)
        asked, now, late = self.ledger.in_flight(), self.clock(), []
        for number in self._warned.keys() - {one.number for one in asked}:
            del self._warned[number]
        for one in asked:
            after, waited = self._warned.get(one.number, self.settings.warn_seconds), now - one.since
            if waited >= after:
                self._warned[one.number] = 2 * max(after, waited)
                late.append(f"waiting for the store, {one.what}: no answer since {_clock(waited)} ({waited:.0f} s)")
        if late:
            patiently(partial(_warn, late), "warning")


def _warn(texts: Sequence[str]) -> None:
    for text in texts:
        log.warning("%s", text)


def _clock(seconds_ago: float) -> str:
    return (datetime.now() - timedelta(seconds=seconds_ago)).strftime("%H:%M:%S")
