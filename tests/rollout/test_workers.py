"""Several rollout workers, and what becomes of groups when one of them is killed."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from near import some_store
from stage_driver import tiny
from test_rollouts import BATCH, Scene, at, go, rollouts, sample, writer
from waiting import LIMIT, until

from areal_tasks.rollout.group_tracker import GroupTracker
from areal_tasks.rollout.link import Link
from areal_tasks.rollout.links import Assignments
from areal_tasks.rollout.losses import Losses
from areal_tasks.rollout.orders import Finished, Lease, LeaseOver, Leaving, Orders, Part
from areal_tasks.rollout.prompts import evaluation_rollout
from areal_tasks.rollout.rejections import Rejections
from areal_tasks.rollout.settled import SettledGroups
from areal_tasks.rollout.staleness import Staleness
from areal_tasks.rollout.suspects import Suspects
from areal_tasks.store.backend import Store, StoreError, open_store
from areal_tasks.store.objects.local import LocalBackend
from areal_tasks.store.spool import StartClosed, read_start
from areal_tasks.workflows import Prompt, Sample, WorkflowContext
from schemas.recipe.sections import Rollout


@pytest.fixture
def local_store(tmp_path: Path) -> Store:
    return open_store(tmp_path.as_uri())


CREATE: Final = LocalBackend.create


def away(refused: list[str]) -> Callable[[LocalBackend, str, bytes], None]:
    """`LocalBackend.create` while the store refuses all but the records that open starts, without which none begins."""

    def create(backend: LocalBackend, path: str, content: bytes) -> None:
        if not path.endswith("/0.json"):
            refused.append(path)
            raise StoreError("refused")
        CREATE(backend, path, content)

    return create


def test_workers_share_the_groups_and_the_table_is_in_order() -> None:
    async def work() -> None:
        scene = Scene()
        found = rollouts(scene, some_store(), eta=1)
        assert await found.groups(workers=2) == [0, 1, 2, 3]
        shares = Counter(one.link.url for one in found._assigned.by_group.values())
        assert shares == {"0": BATCH, "1": BATCH}
        found.consume([0, 1, 2, 3])
        scene.version = 1
        assert await found.groups() == [4, 5, 6, 7]

    go(work())


def test_groups_that_a_killed_worker_has_spooled_are_not_lost(local_store: Store) -> None:
    async def work() -> None:
        scene = Scene()
        found = rollouts(scene, local_store, eta=2, flush_seconds=0.0)
        found.consume(await found.groups())
        await until(lambda: all(found.spool.records([group]) for group in (4, 11)))
        found.near().lose()
        await found.use_workers({("0", 1)})
        scene.version = 1
        assert await found.groups() == [4, 5, 6, 7]
        assert Counter(scene.begun)[4] == 1

    go(work())


@pytest.mark.parametrize("reported", [False, True], ids=["no record is reported", "one is"])
@pytest.mark.parametrize("known", [False, True], ids=["taken for running", "known to be finished"])
def test_what_a_worker_recorded_just_before_it_was_killed_is_not_generated_again(
    local_store: Store, known: bool, reported: bool
) -> None:
    """It created the record, and was killed before the flow received that event. Group 7 was in flight."""

    async def work() -> None:
        scene = Scene(at_once=False)
        found = rollouts(scene, local_store, eta=1, flush_seconds=3600.0)
        await found.use_workers({("0", 0)})
        await until(lambda: len(scene.ends) == 2 * BATCH)
        near = found.near()
        if reported:
            scene.ends[0].set_result(None)
            await until(lambda: 0 in found.finished)
            await near.groups.flush()
            await until(lambda: bool(found.spool.records([0])))
        lost = {7} if reported else {0, 7}
        for group in range(1, 7):
            scene.ends[group].set_result(None)
        if known:
            await until(lambda: found.tracker.ready() == 2 * BATCH - len(lost))
        near.gone = True
        await until(lambda: len(near.groups.finished) == 6)
        await near.groups.flush()
        near.lose()
        assert near.explained
        await until(lambda: found.suspects.at_once.keys() == lost)
        assert found.suspects.ends == ({7: 1} if reported else {})
        scene.at_once = True
        await found.use_workers({("0", 1)})
        taken: list[int] = []
        for scene.version in range(2):
            taken += await found.groups()
            found.consume(taken[-BATCH:])
        assert sorted(taken) == list(range(2 * BATCH))
        begun = Counter(scene.begun)
        assert {group for group in range(2 * BATCH) if begun[group] > 1} == lost

    go(work())


def test_an_iteration_waits_until_it_is_known_what_a_killed_worker_has_recorded(
    local_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is away, so that the worker's start cannot be closed. Its groups begin nowhere meanwhile."""
    monkeypatch.setattr("areal_tasks.rollout.background.RETRY_SECONDS", 0.001)
    refused = list[str]()

    async def work() -> None:
        scene = Scene()
        found = rollouts(scene, local_store, flush_seconds=3600.0)
        await found.use_workers({("0", 0), ("1", 0)})
        await until(lambda: found.tracker.ready() == BATCH)
        lost = found.near("0")
        lost.gone = True
        await lost.groups.flush()
        with monkeypatch.context() as patch:
            patch.setattr(LocalBackend, "create", away(refused))
            lost.lose()
            taking = asyncio.ensure_future(found.groups())
            await until(lambda: len(refused) > 10)
            assert not taking.done() and sorted(scene.begun) == [0, 1, 2, 3]
        assert await taking == [0, 1, 2, 3]
        assert sorted(scene.begun) == [0, 1, 2, 3]

    go(work())


def test_of_what_a_lost_worker_recorded_only_groups_that_are_needed_are_kept(local_store: Store) -> None:
    """Group 1 was settled meanwhile; the copy of group 2 is of an earlier lease, and older than the group may be."""
    tracker, spool = GroupTracker(Staleness(lambda k: 9, 9, lambda k: BATCH), 0), at(local_store)
    losses = Losses(tracker, spool, Suspects(), Rejections(Rollout()))
    for group, version in {0: 0, 1: 0, 2: 1, 3: 0}.items():
        tracker.running.add(group, version)
    lost = writer(local_store)
    start = lost.open()
    lost.write({group: (0, [sample(group, 0)]) for group in range(3)})
    losses.add(start, range(4))
    tracker.reject(1)
    losses.forget([1])
    assert asyncio.run(losses.close(start)) == [2, 3] and not losses.closing
    assert tracker.finished.of == {0: 0} and tracker.running.of == {2: 1, 3: 0}
    [record] = spool.records(range(4))
    assert [group.index for group in record.finished] == [0] and spool.places() == [(0, 1)]


def test_what_a_lost_worker_still_reports_changes_nothing(local_store: Store) -> None:
    """Its record is then found when its start is closed."""

    async def work() -> None:
        scene = Scene()
        found = rollouts(scene, local_store, eta=1, flush_seconds=3600.0)
        await found.use_workers({("0", 0)})
        await until(lambda: found.tracker.ready() == 2 * BATCH)
        near = found.near()
        await near.groups.flush()
        found.lost(near.link)  # the event is under way
        await until(lambda: not found.losses.closing)
        assert found.tracker.ready() == 2 * BATCH and all(found.spool.records([i]) for i in range(2 * BATCH))

    go(work())


def test_a_commit_while_a_start_is_closed_says_that_it_may_hold_unsettled_groups(local_store: Store) -> None:
    lost, spool = writer(local_store), at(local_store)
    start = lost.open()
    lost.write({0: (0, [sample(0, 0)])})
    found = spool.close(start)
    assert spool.places() == [(0, 0)]
    for record in found:
        spool.note(record, ())
    assert spool.places() == [(1, 0)]


def test_a_killed_worker_that_lives_on_records_nothing(local_store: Store) -> None:
    """Its start is closed as soon as the flow knows that it is gone."""

    async def work() -> None:
        found = rollouts(Scene(), local_store, eta=2, flush_seconds=0.0)
        await found.groups()
        zombie = found.near()
        zombie.lose()
        await until(lambda: read_start(local_store, "run", 0)[-1].kind == "closed")
        zombie.groups.apply(_lease(99))
        await until(lambda: zombie.groups.finished)
        with pytest.raises(StartClosed):
            await zombie.groups.flush()

    go(work())


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("eta", [0, 3])
def test_the_group_that_ends_its_worker_is_found_by_halves_and_rejected(workers: int, eta: int) -> None:
    """Other groups begin again at most once, and once for each halving, and none of their attempts fails."""
    guilty, ends = 6, Counter[int]()

    class Crashing(Scene):
        async def run(self, prompt: Prompt, context: WorkflowContext) -> list[Sample]:
            self.begun.append(prompt.group_id)
            if prompt.group_id == guilty:
                await end_worker()
            for _ in range(20):  # others are in flight meanwhile
                await asyncio.sleep(0)  # lets the other groups begin
            return [sample(prompt.group_id, self.version)]

    async def end_worker() -> None:
        link = found._assigned.by_group[guilty].link
        worker = link.url
        ends[found._assigned.running(link)] += 1
        starts = {(link.url, n + (link.url == worker)) for (_, n), link in found.links.by_start.items()}
        found.near(worker).lose()
        assert await found.explained_ends() >= set(found.links.by_start) - starts
        asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(found.use_workers(starts)))
        await asyncio.Event().wait()

    async def work() -> None:
        nonlocal found
        found = rollouts(scene, some_store(), eta=eta, group_attempts=3)
        taken: list[int] = []
        while found.tracker.settled.prefix <= guilty or len(taken) < 8 * BATCH:  # it may begin again after others
            scene.version = len(taken) // BATCH
            taken += await found.groups(workers)
            found.consume(taken[-BATCH:])
        assert len(set(taken)) == len(taken) and guilty not in taken
        assert found.rejections.counts == {"failed": 1} and not found.tracker.failures
        await found.close()

    scene, found = Crashing(), cast(Any, None)
    go(work())
    assert ends[1] == 3 and ends.total() - ends[1] <= 1 + math.ceil(math.log2(max(ends)))
    assert max(Counter(scene.begun).values()) <= ends.total()


def test_suspects_do_not_meet_other_groups_in_a_worker() -> None:
    suspects = Suspects()
    suspects.worker_ended([0, 1, 2, 3])
    assert suspects.place([0, 1, 2, 3, 4, 5], {"a": 0}, []) == ({"a": [0, 1, 2, 3]}, []), "nothing else has happened"
    suspects.worker_ended([0, 1, 2, 3])
    assert suspects.place([0, 1, 2, 3, 4, 5], {"a": 0}, []) == ({"a": [0, 1]}, [])
    assert suspects.place([2, 3, 4, 5], {"a": 2}, ["a"]) == ({}, [])
    assert suspects.place([2, 3, 4, 5], {"a": 1, "b": 1}, ["a"]) == ({}, ["b"])
    assert suspects.place([0, 1, 2, 3, 4, 5], {"a": 1, "b": 2}, []) == ({}, ["b"]), "a is left to them"
    suspects.worker_ended([0, 1])
    assert suspects.place([0, 1, 2, 3], {"a": 0, "b": 0, "c": 0}, []) == ({"a": [0], "b": [1], "c": [2, 3]}, [])
    suspects.worker_ended([0])
    for group in (0, 1, 2):
        suspects.clear(group)
    assert suspects.ends == {0: 1}
    assert suspects.place([0, 3], {"a": 0, "b": 1}, []) == ({"a": [3]}, ["b"])


class Worker:
    """A link that is given groups."""

    def give(self, leases: list[Lease]) -> None: ...


@given(st.integers(1, 5), st.integers(1, 8), st.sets(st.integers(0, 60)), st.lists(st.sets(st.integers(0, 60))))
def test_groups_are_given_in_blocks_and_a_new_block_to_the_worker_with_the_fewest(
    workers: int, size: int, first: set[int], later: list[set[int]]
) -> None:
    assigned, links = Assignments(), [cast(Link, Worker()) for _ in range(workers)]
    for groups in [first, *later]:
        new = sorted(groups - assigned.by_group.keys())
        before = {group: one.link for group, one in assigned.by_group.items()}
        shares = assigned.in_blocks(new, links, size)
        assert sorted(group for share in shares.values() for group in share) == new
        for worker, share in shares.items():
            assigned.give(worker, dict.fromkeys(share, 0), suspect=False)
        for group in new:
            if group % size and group - 1 in assigned:
                assert assigned.by_group[group].link is assigned.by_group[group - 1].link
        if len(new) == 1 and (new[0] % size == 0 or new[0] - 1 not in before):
            [worker] = shares
            held = Counter(map(id, before.values()))
            assert held[id(worker)] == min(held[id(one)] for one in links)


def _lease(index: int) -> Orders:
    return Orders(begin=(Lease(number=10_000 + index, index=index, floor=0),))


def test_a_worker_keeps_no_more_finished_groups_in_memory_than_it_may(local_store: Store) -> None:
    async def work() -> None:
        found = rollouts(Scene(), local_store, eta=3, flush_seconds=3600.0, groups_in_memory=2)
        await found.groups()
        await until(lambda: len(found.near().groups.finished) <= 2 and found.tracker.ready() == 4 * BATCH)

    go(work())
    assert len(at(local_store, owner=2).recover(SettledGroups())[0]) >= 4 * BATCH - 2


@pytest.mark.parametrize("most", [0, 1, 2])
@pytest.mark.parametrize("eta", [0, 3])
def test_a_worker_that_holds_as_many_finished_groups_as_it_may_gets_no_more(
    local_store: Store, monkeypatch: pytest.MonkeyPatch, eta: int, most: int
) -> None:
    """While the store is away. Once it is back the run goes on, and takes each group once."""
    monkeypatch.setattr("areal_tasks.rollout.background.RETRY_SECONDS", 0.001)
    refused = list[str]()

    async def work() -> None:
        scene = Scene(capacity=2)
        found = rollouts(scene, local_store, eta, flush_seconds=3600.0, groups_in_memory=most)
        monkeypatch.setattr(LocalBackend, "create", away(refused))
        await found.use_workers({("0", 0)})
        await until(lambda: len(refused) > 20)
        held = found.near().groups.finished
        assert max(most, 1) <= len(held) == len(scene.begun) < max(most, 1) + scene.capacity
        monkeypatch.setattr(LocalBackend, "create", CREATE)
        for scene.version in range(4):
            taken = await found.groups()
            assert taken == list(range(scene.version * BATCH, (scene.version + 1) * BATCH))
            found.consume(taken)
        assert max(Counter(scene.begun).values()) == 1

    go(work())


@pytest.fixture
def soon_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """An iteration waits .1 s, not ten minutes, for workers that hold as much as they may."""
    monkeypatch.setattr("areal_tasks.rollout.rollouts.CHECK_SECONDS", 0.01)
    monkeypatch.setattr("areal_tasks.rollout.links.FULL_SECONDS", 0.1)


def test_an_iteration_does_not_wait_for_ever_for_a_store_that_takes_no_groups(
    local_store: Store, monkeypatch: pytest.MonkeyPatch, soon_full: None
) -> None:
    async def work() -> None:
        found = rollouts(Scene(capacity=1), local_store, flush_seconds=3600.0, groups_in_memory=2)
        with monkeypatch.context() as patch:
            patch.setattr(LocalBackend, "create", away([]))
            with pytest.raises(StoreError, match=r"\(rollout.groups_in_memory = 2\), and could not write .*: full"):
                await found.groups()
        assert found.near().groups.unwritten == "refused"
        await found.near().flush()
        assert not found.near().groups.unwritten
        assert await found.groups() == [0, 1, 2, 3]

    go(work())


def test_it_does_not_wait_for_ever_for_a_worker_that_cannot_end_before_it_has_written(
    local_store: Store, monkeypatch: pytest.MonkeyPatch, soon_full: None
) -> None:
    """It uses too much memory, and holds fewer groups than it may."""
    monkeypatch.setattr(LocalBackend, "create", away([]))

    async def work() -> None:
        found = rollouts(Scene(capacity=1), local_store, flush_seconds=3600.0)
        await found.use_workers({("0", 0)})
        await until(lambda: bool(found.finished))
        found.near().groups.leave()
        found.received(found.near().link, Leaving())
        with pytest.raises(StoreError, match="could not write them"):
            await asyncio.wait_for(found.groups(), LIMIT)

    go(work())


def test_what_ends_the_wait_for_a_worker_is_told_with_its_groups() -> None:
    assigned, link, limits = Assignments(), cast(Link, Worker()), Rollout(group_seconds=60.0, groups_in_memory=2)
    assert (assigned.describe(link), assigned.work_limit(link, limits)) == ("groups: none", "")
    assigned.give(link, dict.fromkeys(range(4), 0), suspect=False)
    assert assigned.work_limit(link, limits) == "60 s for each attempt at a group (group_seconds)"
    for group in range(3):
        assigned.enter(group, "verifying" if group else "held")
    assert assigned.describe(link) == "groups: 1 generating, 2 verifying, 1 held"
    assert assigned.work_limit(link, limits).endswith("; reward.wall_seconds for each verdict")
    for group in range(4):
        assigned.enter(group, "held")
    assert assigned.work_limit(link, limits) == "600 s until the store takes finished groups"


def test_finished_groups_of_an_evaluation_stay_in_memory_however_many_they_are() -> None:
    async def work() -> None:
        found = rollouts(Scene(capacity=1), some_store())
        found.limits = evaluation_rollout(tiny(rollout={"groups_in_memory": 1}))
        await found.use_workers({("0", 0)})
        found.near().groups.spools = False
        assert await found.groups() == [0, 1, 2, 3]

    go(work())


def test_what_is_said_of_a_lease_that_is_over_is_not_believed() -> None:
    async def work() -> None:
        scene = Scene(at_once=False)
        found = rollouts(scene, some_store())
        taking = asyncio.ensure_future(found.groups())
        await until(lambda: len(scene.ends) == BATCH)
        found.received(found.near().link, Finished(number=77, index=2, version=0))
        assert 2 in found.tracker.running.of
        for future in scene.ends.values():
            future.set_result(None)
        assert await taking == [0, 1, 2, 3]
        with pytest.raises(LeaseOver):
            await found.near().groups.write(Part(prefix="p", label="", numbers=(77,)))

    go(work())
