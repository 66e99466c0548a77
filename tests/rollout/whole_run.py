"""A run's flow, workers, servers and spool as one state machine: what they do when nothing goes wrong, and what holds.

All of it is what a run uses, but for HTTP, processes and the trainer: the group tracker, workers and their groups,
filters, the spool in a real store, what a commit says of them, and which server a request goes to. Servers get new
weights one by one (`lagging.py`). Threads run what they are given at once, so that every interleaving is one of the
machine's choices. `test_whole_machine.py` disturbs it.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
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
from areal_tasks.store.backend import StoreError
from areal_tasks.store.shards import read_table
from areal_tasks.workflows import Prompt, WorkflowContext
from schemas.recipe.sections import Filters, Rollout

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


class UndisturbedRun(RuleBasedStateMachine):
    """The steps of a run that is not killed, held or changed, and what holds in any run.

    `trained`: the newest version there is. `consumed`: by group, the iteration and the attempt.

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
        _, stale = recover(tracker, spool, SAYS_SO)
        everything, _ = at(self.store, owner).recover(tracker.settled)
        usable = {group for group, version in everything.items() if tracker.rule.deadline(version) >= tracker.next}
        assert usable >= tracker.finished.of.keys() or self.kind == "admission"
        found = again.recover(tracker.settled)[0].keys()
        assert everything.keys() == found == tracker.finished.of.keys(), "what has no room is rejected"
        client = cast(InferenceClient, self.servers)
        self.found = Here(tracker, client, cast(Any, None), self.connect, self.limits, spool)
        for group in stale:
            self.found.rejections.add(group)
        self.taking: asyncio.Task[list[Written]] | None = None
        tracker.needed = lambda: not self.found.held.is_set() or self.needs_groups()
        self.trained = self.commit.next
        self.servers.publish(self.trained)
        await self.found.use_workers(set(self.starts.items()))

    def bound(self) -> Staleness:
        last, etas, batches = len(self.batches) - 1, list(self.etas), list(self.batches)
        return Staleness(lambda k: etas[min(k, last)], last, lambda k: batches[min(k, last)], self.kind)

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

    def needs_groups(self) -> bool:
        """Whether a stage takes groups, and the live ones are no more than it takes."""
        tracker = self.found.tracker
        return self.taking is not None and tracker.live() <= tracker.rule.batch(tracker.next)

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

    async def supervise(self) -> None:
        """As `Workers` does it."""
        for url, start in await self.found.leave([(url, self.starts[url]) for url in self.leaving]):
            assert not self.found.near(url).groups.finished, "it holds nothing"
            self.leaving.remove(url)
            del self.starts[url], start
            await self.found.use_workers(set(self.starts.items()))

    def url(self, pick: int) -> str:
        return list(self.starts)[pick % len(self.starts)]

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
        """Nothing is killed for so many steps. Servers load weights in any order: some lag behind for long."""
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


def prompt(group: int) -> Prompt:
    return Prompt(group, group, 0, "p", "a", [1])
