"""What the flow knows of every live group: who generates it, which weights it began with, where its rows are.

The book admits groups by the staleness rule, leases them to workers, and says which of them an iteration takes. It is
pure bookkeeping: no clock, no network, no store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from areal_tasks.rollout.settled import Settled
from areal_tasks.rollout.staleness import Finished, Staleness

#: A group that was in flight when so many workers died is suspected of having killed them.
SUSPECT_DEATHS = 2


@dataclass(frozen=True)
class Lease:
    """A group to generate. None of its requests may go to a server with weights below version `floor`."""

    index: int
    floor: int
    attempt: int = 0


@dataclass(frozen=True)
class Live:
    """A group that has begun and is neither consumed nor rejected.

    `version` is that of its oldest token; its floor while it runs. `worker` holds its rows in memory, or is to deliver
    them; `spooled` says that the store holds them too.
    """

    version: int
    worker: str
    finished: bool = False
    spooled: bool = False


@dataclass
class Book:
    """The groups of one start of the flow. `next` is the next iteration to take groups."""

    rule: Staleness
    next: int
    settled: Settled = field(default_factory=Settled)
    pace: int | None = None  # groups that may be live beyond what the next iteration takes; None: as the rule admits
    live: dict[int, Live] = field(default_factory=dict)
    failures: Counter[int] = field(default_factory=Counter)  # attempts of a group that failed
    deaths: Counter[int] = field(default_factory=Counter)  # workers that died while they generated a group

    def lease(self, worker: str, version: int) -> list[Lease]:
        """Groups that `worker` begins now, on servers that hold at least `version`; as many as are admitted."""
        room = self.rule.room(self.next, self._versions(), version)
        if self.pace is not None:
            room = min(room, self.rule.batch(self.next) + self.pace - len(self.live))
        begun = [Lease(index, version, self.failures[index]) for index in self._startable(worker, room)]
        self.live |= {lease.index: Live(version, worker) for lease in begun}
        return begun

    def finish(self, index: int, version: int) -> None:
        """A running group has finished; `version` is that of its oldest token."""
        self.live[index] = replace(self.live[index], version=version, finished=True)

    def spool(self, index: int) -> None:
        """The store holds the rows of a finished group: they outlive its worker."""
        self.live[index] = replace(self.live[index], spooled=True)

    def fail(self, index: int) -> int:
        """An attempt at a group has failed and the group begins again; how many have failed so far."""
        del self.live[index]
        self.failures[index] += 1
        return self.failures[index]

    def reject(self, index: int) -> None:
        """A group will not be trained on, and does not begin again."""
        self.live.pop(index, None)
        self.settled = self.settled.add([index])

    def lose(self, worker: str) -> list[int]:
        """A worker has died: what only it held begins again. Returns groups to be rejected: they kill their workers.

        A group is to blame if it was the only suspect in flight; suspects are therefore generated one at a time.
        """
        lost = {index: live for index, live in self.live.items() if live.worker == worker and not live.spooled}
        running = [index for index, live in lost.items() if not live.finished]
        suspects = [index for index in running if self.deaths[index] >= SUSPECT_DEATHS]
        for index in lost:
            del self.live[index]
        if len(suspects) == 1:
            self.deaths.clear()  # the others were neighbours
            return suspects
        self.deaths.update(running)
        return []

    def take(self) -> list[Finished] | None:
        """The groups of the next iteration, in order of their numbers; None while it must wait for groups."""
        running = [live.version for live in self.live.values() if not live.finished]
        return self.rule.take(self.next, self._finished(), running)

    def consume(self, indices: Iterable[int]) -> None:
        """The next iteration has committed these groups."""
        taken = list(indices)
        for index in taken:
            del self.live[index]
        self.settled = self.settled.add(taken)
        self.next += 1

    def _startable(self, worker: str, most: int) -> list[int]:
        """The lowest groups that are neither settled nor live; at most one suspect at a time on a worker."""
        found: list[int] = []
        suspected = self._has_suspect(worker)
        missing = (index for index in self.settled.missing() if index not in self.live)
        while len(found) < most:
            index = next(missing)
            suspect = self.deaths[index] >= SUSPECT_DEATHS
            if not (suspect and suspected):
                found.append(index)
            suspected |= suspect
        return found

    def _has_suspect(self, worker: str) -> bool:
        mine = (i for i, live in self.live.items() if live.worker == worker and not live.finished)
        return any(self.deaths[index] >= SUSPECT_DEATHS for index in mine)

    def _versions(self) -> list[int]:
        return [live.version for live in self.live.values()]

    def _finished(self) -> list[Finished]:
        return [Finished(index, live.version) for index, live in self.live.items() if live.finished]
