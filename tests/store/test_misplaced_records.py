"""Records that are exchanged, copied over one another, renamed or removed: no reader takes one for another."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_builders import commit_stage, iteration_commit, manifest, recipe, table

from areal_tasks.store import paths
from areal_tasks.store.backend import Store, Unavailable, open_store
from areal_tasks.store.catalog import DERIVED, Catalog
from areal_tasks.store.changes import request_change, requested_changes
from areal_tasks.store.commit import find_record, new_attempt
from areal_tasks.store.fork import Origin, log_derivation
from areal_tasks.store.history.audit import audit
from areal_tasks.store.history.journal import append_log, log_head
from areal_tasks.store.objects.files import commit_weights, upload
from areal_tasks.store.objects.inventory import entries
from areal_tasks.store.opening import open_run, read_stored_run
from areal_tasks.store.provenance import make_provenance, now
from areal_tasks.store.reachable import history
from areal_tasks.store.record_tables import log_table, segments_table, spool_table, starts_table
from areal_tasks.store.retention.compact import compact
from areal_tasks.store.retention.gc import RetentionRule, plan_removals
from areal_tasks.store.run_list import list_runs
from areal_tasks.store.runs import HeadMoved, Run, load_run
from areal_tasks.store.spool import append_groups, close_start, open_start
from areal_tasks.store.system import SystemLog, system_table
from areal_tasks.store.waits import current_waits, waits_record, write_waits
from areal_tasks.store.weights import find_weights, list_weights, tag_weights
from schemas.errors import UserError
from schemas.manifest import ServiceRecord, Wait

RUNS = ("base", "child")
#: Records that nothing names and nothing follows: that one is removed, nobody can know.
UNNAMED = re.compile(
    r".*/(services|compact)/.*|base/(spool/\d|waits/owner=\d|system/owner=\d|changes)/2.json"
    "|base/iteration=000004/commit.json|child/iteration=000002/commit.json"
)
#: Those of which an audit alone knows that they were removed, for all readers and for one.
UNSEEN = re.compile(rf"{UNNAMED.pattern}|base/tags/.*")
UNSEEN_BY = {"waits": re.compile(rf"{UNSEEN.pattern}|base/owners/2.json")}


def commit(run: Run, k: int, folder: Path) -> None:
    """Iteration `k`, with a table, and weights in the store."""
    made = {name: {name: table(name, 4, iteration=k)} for name in ("verify", "scalars")}
    refs = [commit_stage(run.store, manifest(run.store, run.name, k, name, tables)) for name, tables in made.items()]
    files = upload(run.store, paths.weights_attempt(run.name, k + 1, attempt := new_attempt()), folder)
    weights = commit_weights(run.store, run.name, k + 1, attempt, "weights", files, make_provenance(run.owner, now()))
    known = {"log_records": (head := log_head(run.store, run.name)).lines, "log": head.digest}
    run.commit_iteration(iteration_commit(run, k, refs).model_copy(update={"weights": weights, **known}))


def services(run: Run) -> None:
    """Two services, what the start waits for, and two records of samples."""
    for name in ("trainer", "inference-0"):
        record = ServiceRecord(name=name, restart=0, url=f"http://{name}", host="here", pid=1, started=now())
        path = paths.service(run.name, run.owner, name, 0)
        run.store.create(path, record.encode(path))
    wait = Wait(at="trainer", what="a step", since=now(), limit="none", says="")
    for n in (1, 2):
        write_waits(run, n, waits_record([wait] * n, 1e9))
    samples = SystemLog(run)
    for n in (1, 2):
        samples.add([{"time": datetime(2026, 1, n), "owner": run.owner, "service": "trainer", "seconds": 5.0}])
        samples.write()


def made_store(folder: Path) -> Store:
    """Runs with records of all kinds: two starts, a segment each, a spool, tags, a fork, a compaction."""
    (weights := folder / "weights").mkdir()
    store = open_store((folder / "store").as_uri())
    first = open_run(store, "base", recipe("schedule.iterations=3"))
    append_log(store, "base", "started", {"owner": 1})
    for n in (0, 1):
        start = open_start(store, "base", 1, "")
        append_groups(store, "base", start, 1, 1, attempt=f"group{n}")
        close_start(store, "base", start, 1)
    services(first)
    for k in range(3):
        (weights / "model").write_text(str(k))
        commit(first, k, weights)
    compact(catalog := Catalog(first), catalog.regions)
    for n in (1, 2):
        request_change(store, "base", n, {"launcher.startup_seconds": n})
    for name, version in (("early", 0), ("late", 2)):
        tag_weights(store, "base", name, first.commit(version).weights)
    child = open_run(store, "child", recipe("schedule.iterations=5"), origin=Origin("base", 2))
    log_derivation(store, "child", Origin("base", 2), "")
    append_log(store, "child", "started", {"owner": 1})
    commit(child, 2, weights)
    again = open_run(store, "base", recipe("schedule.iterations=5"))
    append_log(store, "base", "resumed", {"owner": 2})
    services(again)
    for k in (3, 4):
        commit(again, k, weights)
    return store


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return made_store(tmp_path_factory.mktemp("whole"))


# ── what readers say ────────────────────────────────────────────────────────────────────────────────────────────────


def tables(run: Run, compacted: bool) -> list[Any]:
    """What SQL shows of the run's history, and of its records."""
    catalog = Catalog(run, compacted)
    found = [catalog.rows(name) for name in DERIVED] + [starts_table(catalog)]
    found += [rows(run) for rows in (segments_table, log_table, spool_table, system_table)]
    return [table.to_pylist() for table in found]


def listed(store: Store, run: str) -> list[Any]:
    """The line of a run in `arealflow runs`; an error if that names one."""
    lines = [line for line in list_runs(store) if line.name == run]
    if lines[0].problem:
        raise UserError(lines[0].problem)
    return lines


def found_services(store: Store, run: str) -> list[Any]:
    places = [(n, name) for n in (1, 2) for name in ("trainer", "inference-0")]
    return [find_record(store, paths.service(run, *place, 0), ServiceRecord) for place in places]


def started(store: Store, run: str) -> list[Any]:
    """What a start goes by; any number of owners is as good as another, if none is taken twice."""
    found = read_stored_run(store, run)
    return [found.record, found.segments, found.head]


READERS: dict[str, Callable[[Store, str], Any]] = {
    "sql": lambda store, run: tables(load_run(store, run), True),
    "sql, not compacted": lambda store, run: tables(load_run(store, run), False),
    "runs": listed,
    "history": lambda store, run: history(load_run(store, run)),
    "weights": lambda store, run: list_weights(load_run(store, run)),
    "newest": lambda store, run: find_weights(load_run(store, run), "newest"),
    "early": lambda store, run: find_weights(load_run(store, "base"), "early"),
    "late": lambda store, run: find_weights(load_run(store, "base"), "late"),
    "gc": lambda store, run: plan_removals(store, RetentionRule(1, 1, 0.0)),
    "start": started,
    "changes": lambda store, run: list(requested_changes(store, run)),
    "waits": lambda store, run: current_waits(load_run(store, run)),
    "services": found_services,
}


def answer(reader: Callable[[Store, str], Any], store: Store, run: str) -> str:
    """A digest of what a reader says, without what changes by itself; or its error."""
    try:
        said = repr(reader(store, run))
    except UserError as error:
        assert not isinstance(error, (Unavailable, HeadMoved)), "a flow would try again"
        return f"error: {error}"
    said = re.sub(r"store=<\S+ object at 0x\w+>|'(waiting_)?seconds': [\d.]+", "", said)
    return hashlib.sha256(said.encode()).hexdigest()


def answers(store: Store) -> dict[tuple[str, str], str]:
    return {(name, run): answer(reader, store, run) for name, reader in READERS.items() for run in RUNS}


# ── damages ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def kind(path: str) -> str:
    """What the paths of all records of one kind have in common, whatever their run, number or name."""
    return re.sub(r"[0-9a-f]*\d[0-9a-f]*|^\w+|early|late|trainer|inference", "", path)


def records(store: Store) -> list[str]:
    return [entry.path for run in RUNS for entry in entries(store, run) if entry.path.endswith(".json")]


def next_name(path: str) -> str:
    """A name that the path's last number, or its name, could have had."""
    if path.endswith("run.json"):
        return path
    numbered = re.fullmatch(r"(.*?)(\d+)(/commit)?\.json", path)
    if numbered is None or ("=" in path and "commit" not in path and "owner" not in path):
        return path.replace(".json", "0.json")
    begin, n, end = numbered.groups("")
    return f"{begin}{int(n) + 1:0{len(n)}d}{end}.json"


@st.composite
def damages(draw: st.DrawFn, names: list[str]) -> dict[str, str]:
    """Which record's bytes lie where afterwards: path -> the path that they were written for; empty: removed."""
    one = draw(st.sampled_from(names))
    other = draw(st.sampled_from([name for name in names if kind(name) == kind(one)]) | st.sampled_from(names))
    other = draw(st.sampled_from([other, other, next_name(one)]))
    return draw(
        st.sampled_from(
            [{one: ""}, {other: one}, {other: one, one: ""}, *([{one: other, other: one}] if other in names else [])]
        )
    )


def apply(store: Store, change: dict[str, str]) -> None:
    """Put the bytes of other records, or nothing, in the place of some."""
    data = {path: store.read(source) if source else None for path, source in change.items()}
    for path, new in data.items():
        store.remove(path)
        if new is not None:
            store.put(path, new)


def restore(store: Store, whole: Store, change: dict[str, str]) -> None:
    for path in change:
        store.remove(path)
        if whole.exists(path):
            store.put(path, whole.read(path))


@pytest.fixture(scope="module")
def copy(whole: Store, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A copy that a test may alter, if it restores it."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(whole.uri(""), folder / "store")
    return open_store((folder / "store").as_uri())


@pytest.fixture(scope="module")
def expected(copy: Store) -> dict[tuple[str, str], str]:
    assert all(audit(copy, run).sound for run in RUNS)
    found = answers(copy)
    assert not any(said.startswith("error") for said in found.values())
    return found


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_record_in_the_wrong_place_is_named_or_changes_nothing(
    whole: Store, copy: Store, expected: dict[tuple[str, str], str], data: st.DataObject
) -> None:
    """Every reader says what it said before, or fails and names one of the files; an audit reports one."""
    change = {path: source for path, source in data.draw(damages(records(whole))).items() if path != source}
    lost = {path for path, source in change.items() if not source}
    apply(copy, change)
    try:
        reported = {defect.path for run in RUNS for defect in audit(copy, run).defects}
        found = answers(copy)
    finally:
        restore(copy, whole, change)
    if change and not (lost == change.keys() and all(map(UNNAMED.fullmatch, lost))):
        assert reported & change.keys()
    for place, said in found.items():
        unseen = UNSEEN_BY.get(place[0], UNSEEN)
        if said != expected[place] and not (lost and all(map(unseen.fullmatch, lost))):
            assert said.startswith("error: ") and any(path in said for path in change), place
