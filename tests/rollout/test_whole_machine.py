"""The run of `whole_run.py`, disturbed: any of its processes is killed between any two steps.

Servers are lost, workers join and leave, and who was replaced lives on unseen. The store fails for a while, and may
have stored what it refused. The run is held, as when it is paused, or ends in order and is resumed.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from near import SAYS_SO, Near
from test_rollouts import at
from whole_run import ENOUGH_STEPS, UndisturbedRun

from areal_tasks.store.backend import Store, StoreError, Unavailable
from areal_tasks.store.shards import read_table
from areal_tasks.store.spool import StartClosed, close_start, number_of_starts, read_spool, read_start


class Run(UndisturbedRun):
    """Whatever goes wrong between two steps of a run, and that it comes to its end nevertheless."""

    # ── the flow ────────────────────────────────────────────────────────────────────────────────────────────────────

    @precondition(lambda self: not self.over and self.taking is None)
    @rule(eta=st.integers(1, 3), batch=st.integers(1, 3), later=st.integers(1, 3), turns=st.integers(0, 20))
    def change(self, eta: int, batch: int, later: int, turns: int) -> None:
        """Another η and batch from an iteration on that takes its groups later; η > 0 stays so, as does 0."""
        first = self.found.tracker.next + later
        for k in range(first, len(self.batches)):
            self.etas[k], self.batches[k] = min(self.etas[k], 1) * eta, batch

        async def work() -> None:
            running = set(self.found.tracker.running.of)
            self.recorded.clear()  # there may be no room for them
            self.spooled.clear()
            self.found.change_rule(self.bound(), SAYS_SO)
            assert not any(index in self.found.tracker.settled for index in running), "these begin again"

        self.do(work(), turns)

    @rule(eta=st.integers(0, 3), turns=st.integers(0, 20))
    def kill_flow(self, eta: int, turns: int) -> None:
        """Its workers live on for a while, perhaps; the next start may have another η."""
        if self.over:
            return

        async def work() -> None:
            if self.taking is not None:
                self.taking.cancel()
            for url in self.starts:
                self.leave_alone(url)
            await self.start(eta)

        self.do(work(), turns)

    @rule(eta=st.integers(0, 3), turns=st.integers(0, 20))
    def suspend(self, eta: int, turns: int) -> None:
        """The flow ends in order, and starts again: it finds what had finished, if the store took it."""
        if self.over:
            return

        async def work() -> None:
            found, written = self.found, False
            finished = found.tracker.finished.of.keys() - found.losses.closing.keys()
            if self.taking is not None:
                self.taking.cancel()
            for url in self.starts:
                self.leave_alone(url)
            with contextlib.suppress(StoreError):
                await found.close()
                written = True
            assert not written or finished <= self.in_records()
            await self.start(eta)

        self.do(work(), turns)

    @rule(turns=st.integers(0, 20))
    def pause(self, turns: int) -> None:
        """As `Generation.hold` does it, while a stage is at work perhaps."""

        async def work() -> None:
            found, written = self.found, False
            found.held.set()
            finished = found.tracker.finished.of.keys() - found.losses.closing.keys()
            with contextlib.suppress(StoreError):
                await found.flush()
                written = True
            assert not written or finished <= self.in_records() | self.consumed.keys()

        self.do(work(), turns)

    @precondition(lambda self: self.found.held.is_set())
    @rule(turns=st.integers(0, 20))
    def resume(self, turns: int) -> None:
        async def work() -> None:
            self.found.held.clear()
            self.found.begin()

        self.do(work(), turns)

    def in_records(self) -> set[int]:
        """The groups whose rows the spool holds."""
        return {group.index for record in read_spool(self.disk, "run") for group in record.finished}

    # ── the servers ─────────────────────────────────────────────────────────────────────────────────────────────────

    @rule(pick=st.integers(0), keeps=st.booleans(), turns=st.integers(0, 20))
    def lose_server(self, pick: int, keeps: bool, turns: int) -> None:
        async def work() -> None:
            self.servers.lose(self.server(pick), keeps)
            self.found.begin()

        self.do(work(), turns)

    # ── the workers ─────────────────────────────────────────────────────────────────────────────────────────────────

    @rule(pick=st.integers(0), turns=st.integers(0, 20))
    def fail(self, pick: int, turns: int) -> None:
        if attempts := self.servers.open():
            attempts[pick % len(attempts)].end.set_exception(KeyError("of the workflow"))
            self.do(self.pass_time(0), turns)

    @rule(pick=st.integers(0), turns=st.integers(0, 20))
    def flush(self, pick: int, turns: int) -> None:
        self.do(self.flushed(self.found.near(self.url(pick))), turns)

    async def flushed(self, near: Near) -> None:
        with contextlib.suppress(StoreError, StartClosed):
            await near.groups.flush()

    @rule(pick=st.integers(0), records=st.booleans(), turns=st.integers(0, 20))
    def kill_worker(self, pick: int, records: bool, turns: int) -> None:
        """Another process replaces it; the old one may live on, unseen. Its last records may be unseen, too."""
        url = self.url(pick)

        async def work() -> None:
            lost = self.leave_alone(url)
            if records:
                await self.flushed(lost)
            self.recorded |= self.recorded_by(lost)
            lost.lose()
            if url in self.leaving:  # it is not started again
                self.leaving.remove(url)
                del self.starts[url]
            await self.found.use_workers(set(self.starts.items()))

        self.do(work(), turns)

    @rule(turns=st.integers(0, 20))
    def join(self, turns: int) -> None:
        """Another worker, while the others go on."""
        if len(self.starts) < 4:
            self.starts[str(max(map(int, self.starts)) + 1)] = 0
            self.do(self.found.use_workers(set(self.starts.items())), turns)

    @rule(pick=st.integers(0), turns=st.integers(0, 20))
    def leave(self, pick: int, turns: int) -> None:
        """A worker gets no more groups, and is stopped once it holds none."""
        if len(self.starts) > len(self.leaving) + 1:
            staying = [url for url in self.starts if url not in self.leaving]
            self.leaving.add(staying[pick % len(staying)])
            self.do(self.supervise(), turns)

    @precondition(lambda self: self.zombies)
    @rule(pick=st.integers(0), turns=st.integers(0, 20))
    def zombie_flushes(self, pick: int, turns: int) -> None:
        """What a process records that was replaced; it learns that its start was closed, if any process knew that."""
        self.do(self.flushed(self.zombies[pick % len(self.zombies)]), turns)

    def leave_alone(self, url: str) -> Near:
        """The flow and the worker there lose sight of each other."""
        near = self.found.near(url)
        near.gone = True
        self.zombies.append(near)
        self.starts[url] += 1
        return near

    def recorded_by(self, near: Near) -> dict[int, int]:
        """The attempts at groups that the worker has, as far as the flow knows, which are in its records."""
        mine = {group: self.found.live[group] for group in self.found._assigned.of(near.link)}
        if near.start is None:
            return {}
        tables = [one.tables["rollout"] for one in read_start(self.disk, "run", near.start) if one.finished]
        rows = [row for table in tables for row in read_table(self.disk, table).to_pylist()]
        needed = [row for row in rows if row["version_min"] >= mine.get(row["group_id"], math.inf)]
        return {row["group_id"]: row["input_ids"][1] for row in needed}

    # ── the store ───────────────────────────────────────────────────────────────────────────────────────────────────

    @rule(
        failure=st.sampled_from([StoreError, Unavailable]),
        late=st.booleans(),
        blind=st.booleans(),
        times=st.integers(1, 12),
        turns=st.integers(0, 20),
    )
    def store_fails(self, failure: type[StoreError], late: bool, blind: bool, times: int, turns: int) -> None:
        """For some requests. What is not `Unavailable` and cannot be read is damaged: its groups begin again."""
        self.store.failure, self.store.late, self.store.times = failure, late, times
        self.store.blind = blind and failure is Unavailable
        self.do(self.pass_time(0), turns)

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def teardown(self) -> None:
        """Whatever has happened, the run comes to its end when nothing is killed any more: no deadlock."""
        if not hasattr(self, "runner"):
            return
        try:
            for more in range(ENOUGH_STEPS if self.found.held.is_set() else 0):
                if self.taking is not None:  # the stage at work ends, although the run is held
                    self.go_on(self.seed + more, 1)
            assert self.taking is None or not self.found.held.is_set()
            self.resume(0)
            self.go_on(self.seed, ENOUGH_STEPS * len(self.batches))
            self.ended()
            self.no_callback_fails()
        finally:
            self.runner.close()

    def ended(self) -> None:
        """Each group was consumed once or rejected with a reason, and nothing is left over."""
        assert self.over and len(self.consumed) == sum(self.batches) and not self.found.live
        self.store.times = 0
        self.runner.run(self.found.close())
        reasons = dict(rejections(self.disk))
        assert all(
            reason.startswith(
                ("failed: KeyError", "failed: its rollout worker ended 2 times", "min_success", f"stale: {SAYS_SO}")
            )
            for reason in reasons.values()
        )
        settled = self.commit.settled
        assert all(index in self.consumed or index in reasons for index in range(settled.prefix))
        assert settled.beyond <= self.consumed.keys() | reasons.keys()
        assert all(index in settled for index in self.consumed)
        after = replace(at(self.store, owner=next(self.owners)), first=self.commit.places)
        waiting, _ = after.recover(settled)
        assert not waiting or self.zombies  # who was replaced may have recorded what is not needed any more
        for start in range(number_of_starts(self.disk, "run")):
            close_start(self.disk, "run", start, 99)  # nothing of a zombie's can come any more


def rejections(store: Store) -> Iterator[tuple[int, str]]:
    return ((group.index, group.reason) for record in read_spool(store, "run") for group in record.rejected)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each failed group is worth a line in the log; here there are thousands. The machine's steps are the time."""
    monkeypatch.setattr("areal_tasks.rollout.background.RETRY_SECONDS", 0.0)
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


class LongerRun(Run):
    pass


Run.TestCase.settings = settings(
    max_examples=12, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
LongerRun.TestCase.settings = settings(Run.TestCase.settings, max_examples=150)
TestRun = pytest.mark.usefixtures("quiet")(Run.TestCase)
TestLongerRun = pytest.mark.slow("the same, ten times as often")(pytest.mark.usefixtures("quiet")(LongerRun.TestCase))
