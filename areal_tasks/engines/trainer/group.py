"""Several ranks that act as one trainer: each command goes to all of them, and they compare its outcomes.

Commands and outcomes are exchanged through the group's key-value store, not by collectives: a rank that failed alone
can then still report it while the others are stuck in a collective that it will never join. If the outcomes do not
agree, the whole group ends (`GroupBroken`), and the supervisor starts a new one.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar

from torch.distributed import HashStore, Store

from areal_tasks.engines.trainer.fencing import StaleCommand
from areal_tasks.store.backend import Unavailable
from schemas.errors import UserError

T = TypeVar("T")
log = logging.getLogger(__name__)

#: How long a failed rank waits for the outcomes of the others.
GRACE_SECONDS: Final = 20.0
#: Errors after which a single trainer continues, too.
SURVIVED: Final = (UserError, StaleCommand)
_FOREVER: Final = timedelta(days=20)
PACKAGE: Final = "areal_tasks/"


class GroupBroken(Exception):
    """A rank failed alone, or the ranks no longer hold the same state: none of them can continue.

    `by_user`: the cause is something that a user can change, such as too little memory on one rank.
    """

    def __init__(self, reason: str, by_user: bool = False) -> None:
        super().__init__(reason)
        self.by_user = by_user


@dataclass(frozen=True)
class Outcome:
    """The outcome of a command on one rank: the resulting state of the rank, and the error if there was one."""

    rank: int
    state: str
    error: str = ""
    harmless: bool = True  # the error affects neither the rank's state nor the collectives
    away: bool = False  # the store does not answer this rank


def disagreement(outcomes: Sequence[Outcome]) -> str | None:
    """Why ranks with these outcomes cannot continue as a group; None if they can."""
    broken = [f"rank {o.rank}: {o.error}" for o in outcomes if not o.harmless]
    if broken:
        return "; ".join(broken)
    if len({o.state for o in outcomes}) > 1:
        return "the ranks differ: " + "; ".join(f"rank {o.rank} holds {o.state} {o.error}".rstrip() for o in outcomes)
    return None


class Group:
    """This process as one of the ranks, which make the same calls in the same order; by default the only one."""

    def __init__(self, rank: int = 0, world: int = 1, store: Store | None = None, local_world: int = 0) -> None:
        self.rank = rank
        self.world = world
        self.store = store or HashStore()
        self._watched = self.store.clone()  # for other threads: a client serves one call at a time, and waits count
        self.ranks_here = local_world or world  # on this machine
        self.broken: Future[Exception] = Future()  # why the group must end; set once, and then this process ends
        self._command = 0
        self._shared = 0
        self._posted: list[str] = []  # keys of this command, and of the previous one
        self._stale: list[str] = []

    def lead(self, command: str, work: Callable[[], T], state: Callable[[], str]) -> T:
        """On rank 0: have every rank run `command`, which is `work` on this one. Returns when all have finished.

        GroupBroken: the ranks disagree: the process must end. Else what `work` raised here, or a UserError for others.
        """
        if self.world == 1:
            return work()
        self._begin()
        self._post(f"command/{self._command}", command)
        return self._agreed(work, state)

    def follow(self, run: Callable[[str], object], state: Callable[[], str]) -> None:
        """On other ranks: wait for rank 0's next command, run it, and compare outcomes. GroupBroken as in `lead`."""
        self._begin()
        self.store.wait([f"command/{self._command}"], _FOREVER)
        command = self.store.get(f"command/{self._command}").decode()
        try:
            self._agreed(lambda: run(command), state)
        except SURVIVED as error:
            log.info("rank %d: %s", self.rank, error)  # rank 0 reports it

    @property
    def first_here(self) -> int:
        """The first rank of this machine."""
        return self.rank - self.rank % self.ranks_here

    def from_first_here(self, work: Callable[[], str]) -> str:
        """Run `work` on the first rank of each machine; all ranks there return its text. Errors as in `together`."""
        if self.world == 1:
            return work()
        return self._shares(work if self.rank == self.first_here else str)[1][self.first_here]

    def together(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank; returns this rank's result once all have one. No rank waits for one that failed.

        On every rank, raises the first UserError of any (Unavailable, if that is). But a rank that had an OSError
        raises that one: it ends the group, as it ends a single trainer.
        """
        return work() if self.world == 1 else self._shares(work)[0]

    def _shares(self, work: Callable[[], T]) -> tuple[T, list[str]]:
        """The result of `work` on this rank, and those of all ranks that are texts. Errors as in `together`."""
        self._shared += 1
        prefix = f"shared/{self._command}/{self._shared}/"
        own: OSError | None = None
        try:
            result = work()
            found: dict[str, Any] = {"text": result if isinstance(result, str) else ""}
        except (UserError, OSError) as error:
            own = error if isinstance(error, OSError) else None
            found = {"error": text_of(error), "away": isinstance(error, Unavailable)}
        of_ranks = self._gathered(prefix, found)
        if own is not None:
            raise own
        for one in of_ranks:
            if "error" in one:
                raise _refusal(one["error"], one["away"])
        return result, [one["text"] for one in of_ranks]

    def _gathered(self, prefix: str, mine: dict[str, Any], timeout: timedelta = _FOREVER) -> list[dict[str, Any]]:
        """On every rank: what each has given as `mine`, in order, once all have. Rank 0 reads it for all.

        If each rank read all keys, 256 ranks would need 9 s (benchmarks/results/control-plane-2cpu.txt).
        """
        self._post(f"{prefix}{self.rank}", json.dumps(mine))
        keys, into = [f"{prefix}{rank}" for rank in range(self.world)], f"{prefix}all"
        if self.rank == 0:
            self.store.wait(keys, timeout)
            self._post(into, json.dumps([json.loads(value) for value in self.store.multi_get(keys)]))
        self.store.wait([into], timeout)
        found: list[dict[str, Any]] = json.loads(self.store.get(into))
        return found

    def failure_of(self, rank: int) -> Outcome | None:
        """The outcome that `rank` posted for the current command, if it failed. For one other thread."""
        key = f"outcome/{self._command}/{rank}"
        if not self._watched.check([key]):
            return None
        found = Outcome(**json.loads(self._watched.get(key)))
        return found if found.error else None

    def _begin(self) -> None:
        self._command += 1
        self._shared = 0
        self._stale, self._posted = self._posted, []

    def _post(self, key: str, value: str) -> None:
        self.store.set(key, value)
        self._posted.append(key)

    def _agreed(self, work: Callable[[], T], state: Callable[[], str]) -> T:
        """The result of `work`, once the outcomes of all ranks agree; otherwise raises as `lead` does."""
        error: Exception | None = None
        try:
            result = work()
        except Exception as caught:
            error = caught
        harmless = error is None or isinstance(error, SURVIVED)
        if error is not None:
            log.log(logging.INFO if harmless else logging.ERROR, "rank %d failed", self.rank, exc_info=error)
        outcomes = self._exchange(
            Outcome(self.rank, state(), text_of(error) if error else "", harmless, isinstance(error, Unavailable))
        )
        failed = [o for o in outcomes if o.error]
        if (problem := disagreement(outcomes)) is not None:
            raise GroupBroken(problem, bool(failed) and all(o.harmless for o in failed))
        if error is not None:
            raise error
        if failed:
            raise _refusal(f"rank {failed[0].rank}: {failed[0].error}", failed[0].away)
        return result

    def _exchange(self, mine: Outcome) -> list[Outcome]:
        timeout = timedelta(seconds=GRACE_SECONDS) if mine.error else _FOREVER
        try:
            found = self._gathered(f"outcome/{self._command}/", asdict(mine), timeout)
        except RuntimeError as error:  # torch's DistStoreError: this rank failed, and the others posted no outcome
            if not mine.error:  # the group's store itself failed
                raise
            raise GroupBroken(f"rank {self.rank}: {mine.error}", mine.harmless) from error
        for key in self._stale:  # all ranks have finished this command, so they have read the previous one's keys
            self.store.delete_key(key)
        return [Outcome(**one) for one in found]


def _refusal(text: str, away: bool) -> UserError:
    """The error of another rank. If the store does not answer it, the caller asks again, as with a single trainer."""
    return Unavailable(text) if away else UserError(text)


def text_of(error: Exception) -> str:
    """The error in one line: an unexpected one with its type and the line of this program that raised it."""
    if isinstance(error, (UserError, StaleCommand, GroupBroken)):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if PACKAGE in frame.filename] or frames
    where = f" ({ours[-1].filename.rpartition(PACKAGE)[2]}:{ours[-1].lineno} in {ours[-1].name})" if ours else ""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}{where}"
