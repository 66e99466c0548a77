"""A run's flow, workers, spool and commits as one state machine: any of them is killed between any two steps.

All of it is what a run uses, but for HTTP, processes and the trainer: the group tracker, workers and their groups,
filters, the spool in a real store, what a commit says of them, and which server a request goes to. Servers get new
weights one by one, or are lost (`lagging.py`). The store fails for a while, and may have stored what it refused. The
run is held, as when it is paused, or ends in order and is resumed. Threads run what they are given at once, so that
every interleaving is one of the machine's choices.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lagging import TOKENS, LaggingServers
from near import SAYS_SO, FailingStore, Here, Near, some_store
from test_filters import judgement
from test_rollouts import at, writer

from areal_tasks.engines.client import InferenceClient
from areal_tasks.engines.server import Server
from areal_tasks.rewards.pool import VerifyResult
from areal_tasks.rewards.protocol import Row
from areal_tasks.rollout.group_tracker import GroupTracker
from areal_tasks.rollout.judging import Judge
from areal_tasks.rollout.link import Link
from areal_tasks.rollout.losses import recover
from areal_tasks.rollout.orders import Written
from areal_tasks.rollout.rollouts import Rollouts
from areal_tasks.rollout.settled import SettledGroups
from areal_tasks.rollout.spooling import NOTHING_SPOOLED, Place
from areal_tasks.rollout.staleness import Rule, Staleness
from areal_tasks.rollout.worker.groups import Groups
from areal_tasks.store.backend import Store, StoreError, Unavailable
from areal_tasks.store.shards import read_table
from areal_tasks.store.spool import StartClosed, close_start, number_of_starts, read_spool, read_start
from areal_tasks.workflows import Prompt, WorkflowContext
from schemas.recipe.filters import Filters
from schemas.recipe.sections import Rollout

ENOUGH_TURNS = 50  # of the event loop, after which nothing happens by itself any more
ENOUGH_STEPS = 1000  # for an iteration to end
FILTERS = Filters(min_success=0.5, max_rejected=10_000)


class AtOnce(ThreadPoolExecutor):
    """Runs what it is given in the thread that gives it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as error:
            done.set_exception(error)
        return done


class Held(GroupTracker):
    """Groups that begin while the run is held are those that the stage at work needs."""

    needed: Callable[[], bool] = lambda: True

    def lease(self, version: int, most: float = math.inf) -> list[int]:
        begun = super().lease(version, most)
        assert not begun or self.needed(), "groups begin although the run is held"
        return begun


async def verify(rows: Sequence[Row]) -> list[VerifyResult]:
    return [judgement(float(row.completion)) for row in rows]


@dataclass
class Commit:
    """What the last commit says, and the next iteration's rollout if that is committed already."""

    next: int = 0
    settled: SettledGroups = SettledGroups()  # noqa: RUF009 - frozen
    places: Sequence[Place] = tuple(NOTHING_SPOOLED)
    rollout: list[int] | None = None


class Run(RuleBasedStateMachine):
    """`trained`: the newest version there is. `consumed`: by group, the iteration and the attempt.

    `recorded`: by group, the attempt that a worker had recorded when it was killed, if the group must not begin again.
    `disk`: what the store holds, also while it fails. `spooled`: groups whose rows the flow knows to be there.
    """

    @initialize(
        eta=st.integers(0, 3),
        bound=st.sampled_from(["strict", "strict", "admission"]),
        batches=st.lists(st.integers(1, 3), min_size=1, max_size=8),
        workers=st.integers(1, 3),
        pace=st.none() | st.integers(0, 4),
        limits=st.fixed_dictionaries(
            {"flush_seconds": st.sampled_from([0.0, 3600.0]), "groups_in_memory": st.sampled_from([0, 1, 2, 1024])}
        ),
        capacity=st.sampled_from([1, 20]),
        servers=st.integers(2, 3),
        targeted=st.booleans(),
        seed=st.integers(0, 1 << 30),
    )
    def begin(
        self,
        eta: int,
        bound: Rule,
        batches: list[int],
        workers: int,
        pace: int | None,
        limits: dict[str, Any],
        capacity: int,
        servers: int,
        targeted: bool,
        seed: int,
    ) -> None:
        self.pace, self.seed, self.kind = pace, seed, bound
        self.limits = Rollout(group_attempts=2, max_failed_groups=10_000, **limits)
        self.batches, self.disk, self.servers = batches, some_store(), LaggingServers(servers, targeted, capacity)
        self.store = FailingStore(self.disk.url, Path(self.disk.uri("")))
        self.consumed: dict[int, tuple[int, int]] = {}
        self.recorded: dict[int, int] = {}
        self.commit, self.trained, self.zombies, self.owners = Commit(), 0, list[Near](), count(1)
        self.runner, self.errors = asyncio.Runner(), list[dict[str, Any]]()
        self.runner.get_loop().set_default_executor(AtOnce(1))
        self.runner.get_loop().set_exception_handler(
            lambda _, context: self.errors.append(context) if "exception" in context else None
        )
        self.starts = {str(worker): 0 for worker in range(workers)}
        self.do(self.start(eta), ENOUGH_TURNS)

    def do(self, work: Any, turns: int) -> None:
        """Do this, then so many turns of the event loop; the stage at work may end meanwhile."""

        async def done() -> None:
            await work
            await self.pass_time(turns)

        self.runner.run(done())

    async def pass_time(self, turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)  # a turn of the event loop
        if self.leaving:
            await self.supervise()
        if self.taking is not None and self.taking.done():
            taken, self.taking = self.taking, None
            try:
                parts = taken.result()
            except StoreError as error:
                assert str(error) == SAYS_SO
                return  # the stage is tried again
            self.took(parts)

    # ── the flow ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self, eta: int) -> None:
        """A start of the flow, from what the store has, as `Generation` does it."""
        self.etas, owner, self.leaving = [eta] * len(self.batches), next(self.owners), set[str]()
        self.store.times = 0  # else there is no start
        self.recorded.clear()  # another η may have no room for them
        self.spooled = set[int]()
        tracker = Held(self.bound(), self.commit.next, self.commit.settled, self.pace)
        if self.commit.rollout is not None:
            tracker.consume(self.commit.rollout)
        spool, again = (replace(at(self.store, owner), first=self.commit.places) for _ in range(2))
        recover(tracker, spool)
        everything, _ = at(self.store, owner).recover(tracker.settled)
        usable = {group for group, version in everything.items() if tracker.rule.deadline(version) >= tracker.next}
        assert usable >= tracker.finished.of.keys() or self.kind == "admission"
        assert again.recover(tracker.settled)[0].keys() == everything.keys() >= tracker.finished.of.keys()
        client = cast(InferenceClient, self.servers)
        self.found = Here(tracker, client, cast(Any, None), self.connect, self.limits, spool)
        self.taking: asyncio.Task[list[Written]] | None = None
        tracker.needed = lambda: not self.found.held.is_set() or self.needs_groups()
        self.trained = self.commit.next
        self.servers.publish(self.trained)
        await self.found.use_workers(set(self.starts.items()))

    def bound(self) -> Staleness:
        last, etas, batches = len(self.batches) - 1, list(self.etas), list(self.batches)
        return Staleness(lambda k: etas[min(k, last)], last, lambda k: batches[min(k, last)], self.kind)

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

    def connect(self, url: str, flow: Rollouts) -> Link:
        client = cast(InferenceClient, self.servers)
        context = WorkflowContext(client=client, seed=0, group_size=1, max_new_tokens=2, temperature=1.0, max_length=8)

        def make(tell: Any) -> Groups:
            judge = Judge(verify, "with", FILTERS)
            return Groups(self.servers, context, prompt, self.limits, writer(self.store), tell, judge)

        return Near(url, flow, make).link

    @property
    def over(self) -> bool:
        return self.commit.next == len(self.batches)

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

    def needs_groups(self) -> bool:
        """Whether a stage takes groups, and the live ones are no more than it takes."""
        tracker = self.found.tracker
        return self.taking is not None and tracker.live() <= tracker.rule.batch(tracker.next)

    def in_records(self) -> set[int]:
        """The groups whose rows the spool holds."""
        return {group.index for record in read_spool(self.disk, "run") for group in record.finished}

    @precondition(lambda self: self.may_take())
    @rule(turns=st.integers(0, 20), fails=st.sampled_from([0, 0, 1, 2]))
    def take(self, turns: int, fails: int) -> None:
        """The next iteration's rollout begins, with servers that lag behind by η at most; `fails` requests fail."""

        async def work() -> None:
            self.store.times += fails
            self.taking = asyncio.ensure_future(self.found.take(f"run/rollout/{next(self.owners)}"))
            self.taking.add_done_callback(lambda taken: taken.cancelled() or taken.exception())  # it may be given up

        self.do(work(), turns)

    def may_take(self) -> bool:
        if self.over or self.commit.rollout is not None or self.taking is not None:
            return False
        version = self.servers.version
        return version is not None and version >= self.commit.next - self.etas[self.commit.next]

    def took(self, parts: list[Written]) -> None:
        """The rollout's tables are written, and its stage is committed."""
        k, oldest = self.commit.next, 0 if self.kind == "admission" else self.commit.next - self.etas[self.commit.next]
        rows = pa.concat_tables([read_table(self.disk, part.tables["rollout"]) for part in parts]).to_pylist()
        groups = [row["group_id"] for row in rows]
        assert groups == sorted(set(groups)) and len(groups) == self.batches[k]
        for row in rows:
            attempt = self.servers.attempts[row["input_ids"][1]]
            assert row["group_id"] == attempt.group == row["input_ids"][2] and attempt.group not in self.consumed
            assert row["versions"][1:] == attempt.versions and row["version_min"] == min(attempt.versions)
            assert self.recorded.get(attempt.group, attempt.number) == attempt.number, "it was generated again"
            assert attempt.floor <= row["version_min"] and oldest <= row["version_min"] and row["version_max"] <= k
            self.consumed[attempt.group] = (k, attempt.number)
        self.commit.rollout, left = groups, self.found.live.keys() - set(groups)
        self.found.consume(groups)
        assert left <= self.found.live.keys(), "none is given up for being slow"

    @precondition(lambda self: self.commit.rollout is not None)
    @rule(turns=st.integers(0, 20))
    def train(self, turns: int) -> None:
        """The iteration is trained and committed."""

        async def work() -> None:
            try:
                settled, places = await self.found.settled()
            except StoreError:  # the commit is tried again
                return
            self.commit = Commit(self.commit.next + 1, settled, places)
            self.trained += 1

        self.do(work(), turns)

    @rule(turns=st.integers(0, 20))
    def publish(self, turns: int) -> None:
        """Servers can load the newest weights."""

        async def work() -> None:
            self.servers.publish(self.trained)
            self.found.begin()

        self.do(work(), turns)

    # ── the servers ─────────────────────────────────────────────────────────────────────────────────────────────────

    @rule(pick=st.integers(0), turns=st.integers(0, 20))
    def load(self, pick: int, turns: int) -> None:
        """One server loads the newest weights, however far it lags behind; the others do not."""

        async def work() -> None:
            self.servers.load(self.server(pick))
            self.found.begin()

        self.do(work(), turns)

    @rule(pick=st.integers(0), keeps=st.booleans(), turns=st.integers(0, 20))
    def lose_server(self, pick: int, keeps: bool, turns: int) -> None:
        async def work() -> None:
            self.servers.lose(self.server(pick), keeps)
            self.found.begin()

        self.do(work(), turns)

    @rule(pick=st.integers(0), every=st.integers(1, 3))
    def generate(self, pick: int, every: int) -> None:
        """A token of each group, or of some, by what its server holds now."""
        for attempt in self.servers.under_way()[pick % every :: every]:
            attempt.generate()

    def server(self, pick: int) -> Server:
        return self.servers.servers[pick % len(self.servers.servers)]

    # ── the workers ─────────────────────────────────────────────────────────────────────────────────────────────────

    @rule(
        pick=st.integers(0),
        rewards=st.lists(st.sampled_from([1.0, 1.0, 0.0]), min_size=1, max_size=4),
        turns=st.integers(0, 20),
    )
    def finish(self, pick: int, rewards: list[float], turns: int) -> None:
        """Groups end, a killed worker's perhaps. They are filtered out where their reward is 0."""
        attempts = self.servers.under_way()
        start = pick % max(len(attempts), 1)
        for attempt, reward in zip(attempts[start:], rewards, strict=False):
            while len(attempt.versions) < TOKENS:
                attempt.generate()
            attempt.end.set_result(reward)
        self.do(self.pass_time(0), turns)

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

    async def supervise(self) -> None:
        """As `Workers` does it."""
        for url, start in await self.found.leave([(url, self.starts[url]) for url in self.leaving]):
            assert not self.found.near(url).groups.finished, "it holds nothing"
            self.leaving.remove(url)
            del self.starts[url], start
            await self.found.use_workers(set(self.starts.items()))

    @precondition(lambda self: self.zombies)
    @rule(pick=st.integers(0), turns=st.integers(0, 20))
    def zombie_flushes(self, pick: int, turns: int) -> None:
        """What a process records that was replaced; it is told that its start was closed, if anybody knew of that."""
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

    def url(self, pick: int) -> str:
        return list(self.starts)[pick % len(self.starts)]

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

    # ── what holds ──────────────────────────────────────────────────────────────────────────────────────────────────

    @invariant()
    def the_rule_holds(self) -> None:
        if hasattr(self, "found") and (tracker := self.found.tracker).next < len(self.batches):
            assert self.kind == "admission" or tracker.rule.holds(tracker.next, Counter(self.found.live.values()))
            assert tracker.live() <= sum(self.batches[tracker.next :]), "an iteration takes each of them"

    @invariant()
    def what_is_spooled_is_not_generated_again(self) -> None:
        if hasattr(self, "found"):
            held = self.found.spool._held.keys()
            assert all(group in self.found.tracker.settled for group in self.spooled - held)
            self.spooled = set(held)

    @invariant()
    def no_callback_fails(self) -> None:
        assert not getattr(self, "errors", None)

    @invariant()
    def counts_are_those_of_the_groups(self) -> None:
        if not hasattr(self, "found"):
            return
        tracker, assigned = self.found.tracker, self.found._assigned
        for groups in (tracker.running, tracker.finished):
            assert groups.counts == Counter(groups.of.values())
        assert all(group in tracker or group in tracker.settled for group in range(tracker._lowest))
        found = Counter((one.link, one.state) for one in assigned.by_group.values())
        assert dict(assigned._counts) == dict(found)  # and no link without groups is kept
        for group, one in assigned.by_group.items():
            assert (group in tracker.finished.of) == (one.state == "held") and group in assigned.of(one.link)

    @rule(seed=st.integers(0, 1 << 30), steps=st.integers(1, 60))
    def go_on(self, seed: int, steps: int) -> None:
        """Nobody is killed for so many steps. Servers load weights in any order: some lag behind for long."""
        draw = random.Random(seed)
        ways: list[Callable[[int], object]] = [
            lambda turns: self.take(turns, draw.choice([0, 0, 0, 1])) if self.may_take() else None,
            lambda turns: self.generate(draw.randrange(3), 3),
            lambda turns: self.finish(draw.randrange(20), [1.0] * draw.randint(1, 3), turns),
            lambda turns: self.train(turns) if self.commit.rollout is not None else None,
            self.publish,
            lambda turns: self.load(draw.randrange(6), turns),
        ]
        for _ in range(steps):
            if self.over:
                break
            draw.choice(ways)(draw.randrange(ENOUGH_TURNS))
            self.the_rule_holds()

    def teardown(self) -> None:
        """Whatever has happened, the run comes to its end when nobody is killed any more: no deadlock."""
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


def prompt(group: int) -> Prompt:
    return Prompt(group, group, 0, "p", "a", [1])


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
