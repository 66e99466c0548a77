"""Several rollout workers, and what becomes of groups when one of them is killed."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from near import some_store
from test_rollouts import BATCH, Scene, at, go, rollouts
from waiting import until

from areal_tasks.rollout.orders import Finished, Lease, LeaseOver, Orders, Part
from areal_tasks.rollout.settled import Settled
from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.spool import StartClosed, read_start


@pytest.fixture
def local_store(tmp_path: Path) -> Store:
    return open_store(tmp_path.as_uri())


def test_workers_share_the_groups_and_the_table_is_in_order() -> None:
    async def work() -> None:
        scene = Scene()
        found = rollouts(scene, some_store(), eta=1)
        assert await found.groups(workers=2) == [0, 1, 2, 3]
        shares = Counter(one.link.url for one in found._assigned.values())
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
        await found.have({("0", 1)})
        scene.version = 1
        assert await found.groups() == [4, 5, 6, 7]
        assert Counter(scene.begun)[4] == 1

    go(work())


def test_a_killed_worker_that_lives_on_records_nothing(local_store: Store) -> None:
    """Its start is closed as soon as the flow knows that it is gone."""

    async def work() -> None:
        found = rollouts(Scene(), local_store, eta=2, flush_seconds=0.0)
        await found.groups()
        await until(lambda: found.near().start is not None)
        zombie = found.near()
        zombie.lose()
        await until(lambda: read_start(local_store, "run", 0)[-1].kind == "closed")
        zombie.groups.apply(_lease(99))
        await until(lambda: zombie.groups.finished)
        with pytest.raises(StartClosed):
            await zombie.groups.flush()

    go(work())


def _lease(index: int) -> Orders:
    return Orders(begin=(Lease(number=10_000 + index, index=index, floor=0),))


def test_a_worker_keeps_no_more_finished_groups_in_memory_than_it_may(local_store: Store) -> None:
    async def work() -> None:
        found = rollouts(Scene(), local_store, eta=3, flush_seconds=3600.0, groups_in_memory=2)
        await found.groups()
        await until(lambda: len(found.near().groups.finished) <= 2 and found.book.ready() == 4 * BATCH)

    go(work())
    assert len(at(local_store, owner=2).recover(Settled())[0]) >= 4 * BATCH - 2


def test_what_is_said_of_a_lease_that_is_over_is_not_believed() -> None:
    async def work() -> None:
        scene = Scene(at_once=False)
        found = rollouts(scene, some_store())
        taking = asyncio.ensure_future(found.groups())
        await until(lambda: len(scene.ends) == BATCH)
        found.received(found.near().link, Finished(number=77, index=2, version=0))
        assert not found.book.live[2].finished
        for future in scene.ends.values():
            future.set_result(None)
        assert await taking == [0, 1, 2, 3]
        with pytest.raises(LeaseOver):
            await found.near().groups.write(Part(prefix="p", label="", numbers=(77,)))

    go(work())
