"""Samples of services in the store: what is read is what was written, whatever fails; who watches is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_builders import recipe

from areal_tasks.store import paths, system
from areal_tasks.store.backend import Store, StoreError, Unavailable, open_store
from areal_tasks.store.history.audit import audit
from areal_tasks.store.objects.inventory import remove
from areal_tasks.store.opening import open_run
from areal_tasks.store.query import Session
from areal_tasks.store.runs import Run
from areal_tasks.store.system import SystemLog, newest_record, read_samples, system_table, watch
from schemas.errors import UserError

TIME = datetime(2026, 1, 1)


def new_run(folder: str | Path, name: str = "run") -> Run:
    return open_run(open_store(Path(folder).as_uri()), name, recipe())


def row(number: int, **changes: Any) -> dict[str, Any]:
    waits = [("groups", 0.25), ("store", 0.5)]
    return {"time": TIME, "owner": 1, "service": "trainer", "seconds": 5.0, "running": number, "waits": waits} | changes


class Failing:
    """A store whose puts fail as listed: before (`lost`) or after (`unanswered`) they are stored."""

    def __init__(self, store: Store, faults: Iterator[str]) -> None:
        self._store, self._faults = store, faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def create(self, path: str, data: bytes) -> None:
        fault = next(self._faults, "")
        if fault != "lost":
            self._store.create(path, data)
        if fault:
            raise Unavailable("the store is away")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.sampled_from(["lost", "unanswered", ""]), max_size=12))
def test_each_row_is_read_once_whatever_puts_fail(counts: list[int], faults: list[str]) -> None:
    with TemporaryDirectory() as folder:
        run, left = new_run(folder), iter(faults)
        log = SystemLog(replace(run, store=Failing(run.store, left)))  # type: ignore[arg-type]
        for start, count in enumerate(counts):
            log.add([row(10 * start + i) for i in range(count)])
            try:
                log.write()
            except StoreError:
                continue
        for _ in faults:
            try:
                log.write()
            except StoreError:
                continue
        found = system_table(run)["running"].to_pylist()
        assert found == [10 * start + i for start, count in enumerate(counts) for i in range(count)]


def test_rows_that_cannot_be_stored_do_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "MOST_ROWS", 3)
    log = SystemLog(new_run(tmp_path))
    log.add([row(n) for n in range(5)])
    log.write()
    assert system_table(log.run)["running"].to_pylist() == [2, 3, 4]


def test_sql_has_the_samples_of_all_starts_and_none_of_earlier_versions(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    with Session(run.store, "run") as session:
        assert session.sql("SELECT * FROM system").num_rows == 0
    for owner, written in enumerate((run, open_run(run.store, "run", recipe())), 1):
        log = SystemLog(written)
        log.add([row(owner, owner=owner)])
        log.write()
    with Session(run.store, "run") as session:
        query = "SELECT running, round(seconds * waits['groups'], 2) AS waited FROM system ORDER BY 1"
        found = session.sql(query).to_pylist()
    assert found == [{"running": 1, "waited": 1.25}, {"running": 2, "waited": 1.25}]


def test_a_watcher_is_noticed_once(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    log = SystemLog(run)
    assert not log.newly_watched()
    watch(run.store, "run", 1)
    watch(run.store, "run", 1)
    assert log.newly_watched() and not log.newly_watched()
    assert run.store.exists(paths.watch("run", 1, 2)) and audit(run.store, "run").sound


def test_damage_is_noticed(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    log = SystemLog(run)
    for n in range(3):
        log.add([row(n)])
        log.write()
    assert newest_record(run, 1) == newest_record(run, 1, 2) == 3
    report = audit(run.store, "run")
    assert report.sound and report.unselected_files == 0
    (tmp_path / paths.system("run", 1, 2, "parquet")).write_bytes(b"x")
    with pytest.raises(UserError, match=r"2\.parquet is damaged"):
        read_samples(run, 1, 2)
    remove(run.store, [paths.system("run", 1, 1)])
    defects = {defect.path for defect in audit(run.store, "run").defects}
    assert defects == {paths.system("run", 1, 1), paths.system("run", 1, 2, "parquet")}
