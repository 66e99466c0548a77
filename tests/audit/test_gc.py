"""`arealflow gc`: what it removes, what it keeps whatever is asked for, and that concurrent processes lose nothing."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from s3_server import BUCKET, S3Server
from stage_driver import Digests, digests, drive, finished, start_driver, store_in, tiny
from store_listing import listed
from waiting import rendezvous
from warm_processes import Process

from areal_tasks.store import paths
from areal_tasks.store.backend import Store, StoreError, open_store
from areal_tasks.store.fork import Origin
from areal_tasks.store.history.audit import audit
from areal_tasks.store.history.journal import append_log, log_head, read_log
from areal_tasks.store.objects.files import read_weights
from areal_tasks.store.objects.inventory import Entry, entries
from areal_tasks.store.opening import open_run
from areal_tasks.store.retention import gc
from areal_tasks.store.retention.compact import compact_all
from areal_tasks.store.retention.gc import Removal, RetentionRule, _used_by_stages, plan_removals, read_run_files
from areal_tasks.store.retention.gc_remove import interrupted_removals, plan_run_removal, remove_planned, remove_run
from areal_tasks.store.run_list import list_runs
from areal_tasks.store.runs import load_run
from areal_tasks.store.weights import find_weights, protect_weights, tag_weights
from flows.cli import main
from schemas.errors import UserError
from schemas.manifest import WeightsRef
from schemas.recipe.recipe import Recipe

ITERATIONS = 4
AT_ONCE = RetentionRule(older_than=0.0)
NEWEST = RetentionRule(keep_weights=1, keep_checkpoints=1, older_than=0.0)


def short(iterations: int = ITERATIONS) -> Recipe:
    return tiny(
        schedule={"iterations": iterations},
        rollout={"groups": 2, "group_size": 2},
        evaluation={"every": 0, "limit": 0, "max_new_tokens": 256},
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the finished run `r`: four iterations, a checkpoint after each. Not to be altered."""
    folder = tmp_path_factory.mktemp("whole")
    run = finished(folder, "r", short(), waits=True)
    append_log(run.store, "r", "finished", {"owner": 1})
    return folder


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Digests:
    """What `r` holds after one iteration more, if nothing was ever removed."""
    folder = tmp_path_factory.mktemp("longer")
    drive(folder, "r", short(ITERATIONS + 1))
    return digests(folder, "r")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole / "store", tmp_path / "store")
    return tmp_path


def versions(items: list[Removal], kind: str) -> list[int]:
    return sorted(item.version for item in items if item.version is not None and item.kind == kind)


def on_disk(store: Store, run: str, kind: str = "weights") -> list[int]:
    """The versions whose files are there."""
    paths_there = [e.path for e in entries(store, f"{run}/{kind}") if "/attempt=" in e.path and e.path.count("/") > 3]
    return sorted({int(path.split("version=")[1][:6]) for path in paths_there})


# ── what goes ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_finished_run_has_nothing_to_remove(folder: Path) -> None:
    assert plan_removals(store_in(folder), AT_ONCE) == []


def test_what_a_crash_left_behind_goes_once_the_run_has_ended(folder: Path) -> None:
    store = store_in(folder)
    for path in ("iteration=000001/stage=train/attempt=dead/x.parquet", "weights/version=000002/attempt=dead/x"):
        store.put(f"r/{path}", b"lost")
    store.put("r/iteration=000001/.commit.json.1234", b"{")
    found = plan_removals(store, AT_ONCE)
    assert sorted((item.kind, item.bytes) for item in found) == [("attempt", 4), ("attempt", 4), ("temporary", 1)]
    assert plan_removals(store, RetentionRule(older_than=3600.0)) == [], "they are too young"
    open_run(store, "r", short())  # a later start: it may be at work, but not on what is older than itself
    assert sorted(item.path for item in plan_removals(store, AT_ONCE)) == sorted(item.path for item in found)
    store.put("r/iteration=000002/stage=train/attempt=new/x.parquet", b"mine")
    assert len(plan_removals(store, AT_ONCE)) == 3, "what the last start wrote stays, while it may be at work"
    assert len(remove_planned(store, found, AT_ONCE)) == 3
    assert [line.action for line in read_log(store, "r")] == ["finished", "removed", "removed"]
    report = audit(store, "r")
    assert report.sound and report.unselected_files == 1


def test_an_attempt_that_was_committed_after_all_stays(folder: Path) -> None:
    store, run = store_in(folder), load_run(store_in(folder), "r")
    ref = next(ref for ref in run.commit(1).stages if ref.stage == "verify")
    late = run.read_stage(ref).model_copy(update={"attempt": "late", "key": "0" * 32})
    path = paths.stage_manifest("r", 1, "verify", late.key)
    store.put(f"{paths.stage_attempt('r', 1, 'verify', 'late')}/x.parquet", b"rows")
    [item] = plan_removals(store, AT_ONCE)
    store.create(path, late.encode(path))  # a writer that was taken for dead
    assert remove_planned(store, [item], AT_ONCE) == [] and audit(store, "r").sound


def test_old_versions_go_and_the_run_is_audited_and_goes_on(folder: Path, expected: Digests) -> None:
    store, root = store_in(folder), audit(store_in(folder), "r").root
    found = plan_removals(store, NEWEST)
    assert (versions(found, "weights"), versions(found, "checkpoint")) == ([1, 2, 3], [1, 2, 3])
    assert remove_planned(store, found, NEWEST) == found
    assert (on_disk(store, "r"), on_disk(store, "r", "checkpoints")) == ([0, 4], [4])
    report = audit(store, "r")
    assert report.sound and report.root == root and len(report.removed) == 6
    assert {removed.reason for removed in report.removed} == {"--keep-weights 1", "--keep-checkpoints 1"}
    assert read_log(store, "r")[-2].details["versions"] == "1 2 3"
    assert plan_removals(store, NEWEST) == []
    head = drive(folder, "r", short(ITERATIONS + 1)).head()
    assert digests(folder, "r") == expected
    assert head is not None and (head.log_records, head.log) == log_head(store, "r"), "commits name the last line"


def test_at_least_one_version_is_kept() -> None:
    with pytest.raises(UserError, match="--keep-weights 0: a run needs its newest one"):
        RetentionRule(keep_weights=0)


def test_an_interrupted_removal_of_a_compaction_is_no_damage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_in(folder)
    for _ in range(2):
        compact_all(load_run(store, "r"))
    monkeypatch.setattr(gc, "_COMPACT_SECONDS", 0.0)
    [item] = plan_removals(store, AT_ONCE)
    assert item.kind == "compaction" and len(item.files) > 2
    for path in item.files:
        Path(store.uri(path)).unlink()
        assert audit(store, "r").sound
    assert plan_removals(store, AT_ONCE) == []


# ── what stays ──────────────────────────────────────────────────────────────────────────────────────────────────────


def weights_of(store: Store, version: int) -> WeightsRef:
    return load_run(store, "r").commit(version - 1).weights


def test_tagged_and_protected_versions_stay(folder: Path) -> None:
    store = store_in(folder)
    tag_weights(store, "r", "best", weights_of(store, 2))
    protect_weights(store, "r", weights_of(store, 1))
    assert versions(plan_removals(store, NEWEST), "weights") == [3]


def test_what_a_fork_needs_stays_and_a_fork_of_what_is_gone_is_refused(folder: Path) -> None:
    store = store_in(folder)
    open_run(store, "child", short(), origin=Origin("r", 2))
    found = plan_removals(store, NEWEST)
    assert (versions(found, "weights"), versions(found, "checkpoint")) == ([1, 3], [1, 3])
    remove_planned(store, found, NEWEST)
    with pytest.raises(UserError, match=r"weights of version 3 of run 'r' were removed .*--keep-weights 1"):
        open_run(store, "late", short(), origin=Origin("r", 3))
    assert store.exists(paths.run_record("child")) and not store.exists(paths.run_record("late"))
    drive(folder, "child", short())
    assert digests(folder, "child") == digests(folder, "r") and audit(store, "child").sound


def test_all_that_a_replay_may_read_stays(folder: Path) -> None:
    store = store_in(folder)
    open_run(store, "again", short(), origin=Origin("r", 0, "replay", True, "verify", ""))
    assert plan_removals(store, NEWEST) == []


def test_what_is_tagged_through_a_fork_stays(folder: Path) -> None:
    store = store_in(folder)
    child = open_run(store, "child", short(), origin=Origin("r", 3))
    assert versions(plan_removals(store, NEWEST, "r"), "weights") == [1, 2], "the fork starts from version 3"
    protect_weights(store, "child", find_weights(child, "1"))
    assert versions(plan_removals(store, NEWEST, "r"), "weights") == [2]
    tag_weights(store, "child", "best", find_weights(child, "2"))
    assert versions(plan_removals(store, NEWEST, "r"), "weights") == []


def test_all_that_a_replay_of_a_fork_may_read_stays(folder: Path) -> None:
    store = store_in(folder)
    open_run(store, "child", short(), origin=Origin("r", 3))
    open_run(store, "again", short(), origin=Origin("child", 0, "replay", True, "verify", ""))
    assert plan_removals(store, NEWEST, "r") == [], "its history before iteration 3 is that of r"


def test_weights_that_another_run_began_with_stay(folder: Path) -> None:
    store = store_in(folder)
    drive(folder, "next", tiny(model={"path": "run://r@2", "scratch": None}, schedule={"iterations": 1}))
    assert versions(plan_removals(store, NEWEST, "r"), "weights") == [1, 3]
    for entry in entries(store, "r/references"):
        Path(store.uri(entry.path)).unlink()
    assert versions(plan_removals(store, NEWEST, "r"), "weights") == [1, 3], "its manifest names their files"
    with pytest.raises(UserError, match="next would lose"):
        plan_run_removal(store, "r", 0.0)


def test_who_comes_between_the_tombstone_and_the_removal_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, found = store_in(folder), plan_removals(store_in(folder), NEWEST)
    needed = gc.needed_weights

    def late(*arguments: object) -> set[str]:
        with pytest.raises(UserError, match="weights of version 2 of run 'r' were removed"):
            tag_weights(store, "r", "late", weights_of(store, 2))
        return needed(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(gc, "needed_weights", late)
    gone = remove_planned(store, found, NEWEST)
    assert versions(gone, "weights") == [1, 3] and 2 in on_disk(store, "r")
    report = audit(store, "r")
    assert report.sound and len(report.removed) == 5, "the tombstone of version 2 was taken back"
    assert tag_weights(store, "r", "late", weights_of(store, 2)).version == 2


def test_two_removals_at_once_leave_the_tombstones(folder: Path) -> None:
    store, found = store_in(folder), plan_removals(store_in(folder), NEWEST)
    assert remove_planned(store, found, NEWEST) == found
    assert remove_planned(store, found, NEWEST) == [], "the other one has removed them"
    report = audit(store, "r")
    assert report.sound and len(report.removed) == 6


def test_another_run_that_is_damaged_does_not_interrupt_a_removal(folder: Path) -> None:
    store = store_in(folder)
    open_run(store, "other", short())
    store.put(f"{paths.spool('other')}/1/attempt=a/rollout-00000.parquet", b"rows")
    store.put(f"{paths.spool('other')}/1/1.json", b"damaged")
    with pytest.raises(StoreError, match=f"{paths.spool('other')}/1/1.json"):
        plan_removals(store, NEWEST)
    found = plan_removals(store, NEWEST, "r")
    assert versions(found, "weights") == [1, 2, 3]
    assert remove_planned(store, found, NEWEST) == found


def test_the_files_are_looked_through_once_for_all_stages(folder: Path) -> None:
    store = store_in(folder)
    for k in range(ITERATIONS):
        store.put(f"r/iteration={k:06d}/stage=train/attempt=dead/x.parquet", b"lost")
    run = read_run_files(store, "r", time.time())
    scans = Scanned(run.by_path)
    vars(run)["by_path"] = scans
    assert not {path for path in _used_by_stages(run) if "attempt=dead" in path}
    assert scans.times == 1


class Scanned(dict[str, Entry]):
    """Files that count how often all of them are listed."""

    times = 0

    def __iter__(self) -> Iterator[str]:
        self.times += 1
        return super().__iter__()


# ── concurrency ─────────────────────────────────────────────────────────────────────────────────────────────────────


def collect(folder: Path) -> None:
    """`gc` again and again, as eagerly as can be."""
    store = store_in(folder)
    while True:
        try:
            remove_planned(store, plan_removals(store, NEWEST), NEWEST)
        except StoreError as error:
            if "does not exist" not in str(error):  # a file that its writer has just given its name
                raise
        time.sleep(0.05)  # so that other threads get on


def test_a_run_at_work_beside_gc_ends_with_the_same_bits(tmp_path: Path, expected: Digests) -> None:
    recipe = short(ITERATIONS + 1)
    collector = Process(collect, tmp_path)
    assert start_driver(tmp_path, "r", recipe, 37).wait() == -signal.SIGKILL
    assert start_driver(tmp_path, "r", recipe).wait() == 0
    assert collector.poll() is None
    collector.kill()
    collector.wait()
    store = store_in(tmp_path)
    assert digests(tmp_path, "r") == expected
    remove_planned(store, plan_removals(store, NEWEST), NEWEST)
    report = audit(store, "r")
    assert report.sound and report.removed
    assert on_disk(store, "r") == [0, ITERATIONS + 1]


def fork(folders: list[Path]) -> None:
    for folder in folders:
        rendezvous(folder, "both")
        try:
            open_run(store_in(folder), "child", short(), origin=Origin("r", 2))
            outcome = "forked"
        except UserError as error:
            outcome = "refused" if "were removed" in str(error) else str(error)
        (folder / "outcome").write_text(outcome)


def sweep(folders: list[Path]) -> None:
    for folder in folders:
        store = store_in(folder)
        found = plan_removals(store, NEWEST)
        rendezvous(folder, "both")
        remove_planned(store, found, NEWEST)


def test_a_fork_beside_gc_either_has_what_it_needs_or_is_refused(whole: Path, tmp_path: Path) -> None:
    folders = [tmp_path / str(i) for i in range(6)]
    for folder in folders:
        shutil.copytree(whole / "store", folder / "store")
    assert [process.wait() for process in [Process(fork, folders), Process(sweep, folders)]] == [0, 0]
    for folder in folders:
        check_outcome(store_in(folder), (folder / "outcome").read_text())


def check_outcome(store: Store, told: str) -> None:
    assert told in ("forked", "refused")
    if told == "forked":
        commit = load_run(store, "child").commit(1)
        assert commit.checkpoint is not None
        for ref in (commit.weights, commit.checkpoint):
            assert all(store.size(file.path) == file.bytes for file in read_weights(store, ref).files)
        assert audit(store, "child").sound
    assert audit(store, "r").sound


# ── whole runs ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_is_removed_when_nobody_needs_it(folder: Path) -> None:
    store = store_in(folder)
    open_run(store, "child", short(), origin=Origin("r", 2))
    with pytest.raises(UserError, match=r"'r' stays: child would lose what they refer to"):
        plan_run_removal(store, "r", 0.0)
    with pytest.raises(UserError, match=r"'child' stays: its last start may still be running"):
        plan_run_removal(store, "child", 3600.0)
    append_log(store, "child", "cancelled", {"owner": 1})
    remove_run(store, plan_run_removal(store, "child", 3600.0), 3600.0)
    remove_run(store, plan_run_removal(store, "r", 3600.0), 3600.0)
    assert list_runs(store) == []
    assert {e.path for e in entries(store, "r")} == {"r/tombstone.json", *(paths.log("r", n) for n in (1, 2, 3))}
    assert [line.action for line in read_log(store, "r")] == ["finished", "forked", "removed"]
    with pytest.raises(UserError, match=r"Run 'r' was removed by .*: choose another name"):
        open_run(store, "r", short())


def test_a_removal_that_was_interrupted_is_finished(folder: Path) -> None:
    store = store_in(folder)
    item = plan_run_removal(store, "r", 0.0)
    remove_run(store, Removal(item.run, item.kind, item.path, item.files[:1], item.bytes, item.why), 0.0)
    store.put("r/weights/version=000001/attempt=x/left", b"over")
    assert interrupted_removals(store) == ["r"]
    remove_run(store, plan_run_removal(store, "r", 0.0), 0.0)
    assert interrupted_removals(store) == [] and not listed(store, "r/weights")


def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["arealflow", "gc", *words])
    main.app(standalone_mode=False)
    return capsys.readouterr().out


def test_the_command_only_shows_what_it_would_do(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_in(folder)
    before = [entry.path for entry in entries(store, "r")]
    words = ("--store", store.url, "--keep-weights", "3", "--older-than", "0")
    out = call(capsys, monkeypatch, *words)
    assert "weights, 5 files" in out and "--keep-weights 3\nwould remove 5 files" in out and "--yes does it" in out
    assert [entry.path for entry in entries(store, "r")] == before and not list(folder.glob("store/.*"))
    [row] = json.loads(call(capsys, monkeypatch, *words, "--yes", "--json"))
    assert (row["kind"], row["version"], row["removed"]) == ("weights", 1, True)
    assert on_disk(store, "r") == [0, 2, 3, 4]


def test_a_run_on_s3_is_audited_and_cleared_like_one_on_disk(whole: Path, s3: S3Server) -> None:
    there = open_store(f"s3://{BUCKET}/{uuid.uuid4().hex[:8]}")
    for entry in entries(store_in(whole), "r"):
        there.put_file(entry.path, Path(store_in(whole).uri(entry.path)))
    before = audit(there, "r")
    assert before.sound and before.root == audit(store_in(whole), "r").root
    there.put("r/iteration=000001/stage=train/attempt=dead/x.parquet", b"lost")
    time.sleep(1.1)  # S3 tells times in seconds
    open_run(there, "r", short())
    append_log(there, "r", "finished", {"owner": 2})
    gone = remove_planned(there, plan_removals(there, NEWEST), NEWEST)
    assert versions(gone, "weights") == [1, 2, 3] and [item.kind for item in gone].count("attempt") == 1
    after = audit(there, "r")
    assert after.sound and after.root == before.root and len(after.removed) == 6
    shard = next(path for path in listed(there, "r") if path.endswith(".parquet"))
    there.put(shard, b"PAR1")
    assert [defect.path for defect in audit(there, "r").defects] == [shard]
