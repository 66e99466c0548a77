"""The records of the spool, on disk and on S3."""

from __future__ import annotations

import threading

import pytest
from waiting import LIMIT

from areal_tasks.store.backend import Store
from areal_tasks.store.commit import new_attempt
from areal_tasks.store.spool import StartClosed, append_groups, close_start, number_of_starts, open_start, read_start
from schemas.manifest import RejectedGroup, SpooledGroup

GROUP = SpooledGroup(index=7, version=2, samples=8, tokens=99)


def test_starts_are_numbered_without_gaps_whoever_comes_first(store: Store) -> None:
    numbers: list[int] = []
    barrier = threading.Barrier(8)

    def claim() -> None:
        barrier.wait(LIMIT)
        numbers.append(open_start(store, "run", 1, "made"))

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert sorted(numbers) == list(range(8))
    assert number_of_starts(store, "run") == 8


def test_records_are_read_in_order_from_any_number_on(store: Store) -> None:
    start = open_start(store, "run", 1, "made")
    append_groups(store, "run", start, 1, 1, attempt=new_attempt(), finished=(GROUP,))
    append_groups(store, "run", start, 2, 1, attempt=new_attempt(), rejected=(RejectedGroup(index=8, reason="failed"),))
    assert [record.kind for record in read_start(store, "run", start)] == ["opened", "groups", "groups"]
    assert read_start(store, "run", start)[0].made_with == "made"
    assert [record.finished for record in read_start(store, "run", start, 1)] == [(GROUP,), ()]
    assert read_start(store, "run", start, 3) == []


def test_a_closed_start_takes_no_more_records(store: Store) -> None:
    start = open_start(store, "run", 1, "made")
    append_groups(store, "run", start, 1, 1, attempt=new_attempt(), finished=(GROUP,))
    records = close_start(store, "run", start, 2, first=1)
    assert [record.kind for record in records] == ["groups", "closed"]
    with pytest.raises(StartClosed, match="ended by owner 2"):
        append_groups(store, "run", start, 2, 1, attempt=new_attempt(), finished=(GROUP,))
    assert close_start(store, "run", start, 3, first=1) == records  # it has ended: nothing is added


def test_a_worker_and_whoever_closes_its_start_never_both_win(store: Store) -> None:
    for _ in range(4):
        start, barrier, written = open_start(store, "run", 1, "made"), threading.Barrier(2), []

        def work(start: int = start, barrier: threading.Barrier = barrier, written: list[int] = written) -> None:
            barrier.wait(LIMIT)
            for n in range(1, 6):
                try:
                    append_groups(store, "run", start, n, 1, attempt=new_attempt(), finished=(GROUP,))
                except StartClosed:
                    return
                written.append(n)

        worker = threading.Thread(target=work)
        worker.start()
        barrier.wait(LIMIT)
        records = close_start(store, "run", start, 2)
        worker.join(LIMIT)
        assert [r.n for r in records if r.kind == "groups"] == written
        assert records[-1].kind == "closed"
