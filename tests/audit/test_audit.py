"""`arealflow audit`: every altered bit of every file is found and named, and nothing else is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stage_driver import store_in

from areal_tasks.store import paths
from areal_tasks.store.backend import Store
from areal_tasks.store.history.audit import AuditReport, audit
from areal_tasks.store.history.journal import append_log
from areal_tasks.store.objects.inventory import entries
from areal_tasks.store.opening import read_stored_run
from areal_tasks.store.query import run_sql
from areal_tasks.store.retention.gc import RetentionRule, plan_removals
from areal_tasks.store.run_list import list_runs
from areal_tasks.store.runs import load_run
from areal_tasks.store.weights import list_weights
from schemas.errors import UserError
from schemas.manifest import LogRecord, OwnerRecord, Tag
from schemas.record import SCHEMA_VERSION


def defects(report: AuditReport) -> dict[str, str]:
    return {defect.path: defect.what for defect in report.defects}


def test_a_sound_run_has_one_root_and_no_defect(small: Store) -> None:
    seen: list[tuple[int, int]] = []
    report = audit(small, "small", lambda done, total: seen.append((done, total)))
    assert report.sound and report.iterations == 2 and len(report.root) == 64
    assert (report.unselected_files, report.old_schema) == (0, False)
    assert report.files == len(entries(small, "small")), "every file was looked at"
    assert seen[0][0] == 0 and seen[-1] == (report.bytes, report.bytes)


def test_the_root_is_that_of_the_history_and_not_of_the_log(small: Store) -> None:
    before = audit(small, "small").root
    append_log(small, "small", "exported", {"version": 1})
    assert audit(small, "small").root == before


def test_a_folder_that_is_no_iteration_is_no_obstacle(small: Store) -> None:
    before = audit(small, "small")
    small.put("small/iteration=x/notes.txt", b"mine")
    report = audit(small, "small")
    assert (report.root, report.iterations) == (before.root, 2)
    assert report.unselected_files == 1 and report.sound


def test_a_commit_that_is_altered_in_transit_is_no_defect(small: Store) -> None:
    commit, read, answers = paths.iteration_commit("small", 0), small.read, list[str]()

    def altered_at(turn: int, path: str) -> bytes:
        answers.append(path)
        data = read(path)
        return data[::-1] if path == commit and answers.count(commit) == turn else data

    for turn in (1, 2):
        answers.clear()
        small.read = partial(altered_at, turn)  # type: ignore[method-assign]
        assert audit(small, "small").sound
    assert answers.count(commit) == 1, "it is read once"


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_altered_bit_of_any_file_is_found_and_named(altered: Store, data: st.DataObject) -> None:
    file = data.draw(st.sampled_from(entries(altered, "small")))
    bit = data.draw(st.integers(0, 8 * file.bytes - 1))
    path = Path(altered.uri(file.path))
    whole = path.read_bytes()
    changed = bytearray(whole)
    changed[bit // 8] ^= 1 << bit % 8
    path.write_bytes(changed)
    try:
        assert file.path in defects(audit(altered, "small")), f"bit {bit} of {file.path}"
    finally:
        path.write_bytes(whole)


@pytest.fixture(scope="module")
def altered(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A copy that a test may alter, if it restores it."""
    folder = tmp_path_factory.mktemp("altered")
    shutil.copytree(made / "store", folder / "store")
    return store_in(folder)


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.slow("what was cut short is missing here"))])
def test_any_file_that_is_missing_or_cut_short_is_named(altered: Store, first: int) -> None:
    """Every second file is missing, the others are cut short; one at a time."""
    last = paths.log("small", 3)
    for n, file in enumerate(entries(altered, "small"), first):
        path = Path(altered.uri(file.path))
        whole = path.read_bytes()
        if n % 2:
            path.write_bytes(whole[:-1])
            assert file.path in defects(audit(altered, "small")), f"{file.path} cut short"
        elif file.path != last and not any(f"/{folder}/" in file.path for folder in ("services", "compact")):
            path.unlink()
            assert "missing" in defects(audit(altered, "small"))[file.path]
        path.write_bytes(whole)
    assert audit(altered, "small").sound


def test_a_defect_says_what_else_it_takes_with_it(small: Store) -> None:
    run = load_run(small, "small")
    ref = next(ref for ref in run.commit(0).stages if ref.stage == "rollout")
    shard = run.read_stage(ref).tables["rollout"].shards[0].path
    Path(small.uri(shard)).unlink()
    [defect] = audit(small, "small").defects
    assert (defect.path, defect.what) == (shard, "missing")
    for stage in ("verify", "advantage", "train", "scalars"):
        assert f"{stage} of iteration 0" in defect.affects
    assert "iteration 1" not in defect.affects
    assert str(defect) == f"{shard}: missing; also affected: {defect.affects}"


def reseal(store: Store, path: str, change: Callable[[str], str]) -> None:
    """Alter a record as a person who knows the format would: its seal holds afterwards."""
    from schemas.manifest import IterationCommit, Segment

    model = IterationCommit if path.endswith("commit.json") else Segment
    record = model.parse(store.read(path))
    body = json.loads(change(record.model_dump_json()))
    Path(store.uri(path)).write_bytes(model.model_validate(body).encode(path))


def test_a_commit_that_was_forged_with_a_valid_seal_breaks_the_chain(small: Store) -> None:
    path = paths.iteration_commit("small", 0)
    reseal(small, path, lambda text: text.replace('"next_group":2', '"next_group":3'))
    assert "records another digest" in defects(audit(small, "small"))[path]


def test_a_forged_last_commit_contradicts_the_log(small: Store) -> None:
    path = paths.iteration_commit("small", 1)
    reseal(small, path, lambda text: text.replace('"next_group":4', '"next_group":5'))
    assert "of the log records another digest" in defects(audit(small, "small"))[path]


def test_a_forged_recipe_changes_the_root(small: Store) -> None:
    before = audit(small, "small").root
    reseal(small, paths.segment("small", 0), lambda text: text.replace('"groups":2', '"groups":3'))
    after = audit(small, "small")
    assert after.sound and after.root != before


def test_a_run_that_is_not_there(small: Store) -> None:
    with pytest.raises(UserError, match=r"no run 'other' .* Runs there: small"):
        audit(small, "other")


# ── older schemas ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_of_schema_1_is_listed_asked_and_audited(schema_1: Store) -> None:
    [summary] = list_runs(schema_1)
    assert (summary.name, summary.iterations, summary.problem) == ("old", 2, "")
    for query in ("SELECT count(*) FROM samples", "SELECT count(*) FROM rollout", "SELECT sum(rows) > 0 FROM stages"):
        [row] = run_sql(schema_1, "old", query).to_pylist()
        assert next(iter(row.values()))
    report = audit(schema_1, "old")
    assert (report.defects, report.iterations, report.unselected_files, report.old_schema) == ((), 2, 0, True)
    assert load_run(schema_1, "old").commit(1).schema_version == 1 < SCHEMA_VERSION


@pytest.mark.parametrize("change", [{0: 1, 1: 0}, {0: 1}, {1: 0}, {0: None}], ids=["swapped", "over", "back", "gone"])
def test_commits_of_schema_1_are_bound_to_their_place(schema_1: Store, change: dict[int, int | None]) -> None:
    """No seal covers their paths, but they hold number and predecessor."""
    data = {k: schema_1.read(paths.iteration_commit("old", k)) for k in (0, 1)}
    for k, source in change.items():
        schema_1.remove(paths.iteration_commit("old", k))
        if source is not None:
            schema_1.put(paths.iteration_commit("old", k), data[source])
    [summary] = list_runs(schema_1)
    readers = (
        lambda: run_sql(schema_1, "old", "SELECT * FROM commits"),
        lambda: list_weights(load_run(schema_1, "old")),
        lambda: plan_removals(schema_1, RetentionRule(1, 1, 0.0)),
        lambda: read_stored_run(schema_1, "old"),
    )
    for read in readers:
        with pytest.raises(UserError, match=r"old/iteration=00000\d/commit\.json is (damaged: it |missing)"):
            read()
    assert summary.problem or summary.iterations == 2
    damaged = {paths.iteration_commit("old", k) for k in change}
    assert damaged & defects(audit(schema_1, "old")).keys()


@pytest.mark.parametrize("path", ["tags/first.json", "owners/1.json", "log/3.json"])
def test_no_record_of_an_earlier_schema_is_one_of_a_run_of_this_one(small: Store, path: str) -> None:
    """Its seal would cover no path."""
    model = {"tags": Tag, "owners": OwnerRecord, "log": LogRecord}[path.split("/")[0]]
    record = model.parse(small.read(path := f"small/{path}"))
    Path(small.uri(path)).write_bytes(record.model_copy(update={"schema_version": 4}).encode(path))
    assert "is of schema 4, before which its run did not exist" in defects(audit(small, "small"))[path]


def test_an_altered_shard_of_schema_1_is_found(schema_1: Store) -> None:
    shard = next(e for e in entries(schema_1, "old") if e.path.endswith(".safetensors"))
    path = Path(schema_1.uri(shard.path))
    path.write_bytes(path.read_bytes()[:-1] + b"\x00")
    assert [d.path for d in audit(schema_1, "old").defects] == [shard.path]
