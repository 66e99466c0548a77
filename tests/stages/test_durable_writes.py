"""Weights and checkpoints that are written while the run goes on: the same bits, found by later commits, never lost."""

from __future__ import annotations

import errno
import hashlib
import random
import re
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from s3_server import BUCKET, S3Server
from stage_driver import digests, digests_of, drive, start_driver, store_in, tiny, tiny_sft

from areal_tasks.engines import session
from areal_tasks.engines.client import InferenceClient
from areal_tasks.engines.models import run_weights
from areal_tasks.engines.session import Engines
from areal_tasks.engines.trainer import writer
from areal_tasks.engines.trainer.commands import Write
from areal_tasks.engines.trainer_client import TrainerClient
from areal_tasks.stages.build import Built
from areal_tasks.stages.loop import Job, run_directly
from areal_tasks.store.audit import audit
from areal_tasks.store.backend import Unavailable, open_store
from areal_tasks.store.commit import new_attempt
from areal_tasks.store.files import commit_weights, read_weights
from areal_tasks.store.fork import Origin
from areal_tasks.store.gc import Rule, plan
from areal_tasks.store.gc_remove import execute
from areal_tasks.store.journal import append
from areal_tasks.store.local import LocalBackend
from areal_tasks.store.paths import weights_attempt
from areal_tasks.store.provenance import make_provenance, now
from areal_tasks.store.query import run_sql
from areal_tasks.store.runs import Run, load_run
from areal_tasks.store.weights import find_weights, list_weights
from areal_tasks.store.written import newest_written, written_version
from schemas.errors import UserError
from schemas.manifest import FileRef, IterationCommit
from schemas.recipe.recipe import Recipe

OFTEN = {"recover_within_seconds": 1e-6}


def recipe(iterations: int = 6, **trainer: Any) -> Recipe:
    return tiny_sft(trainer={**OFTEN, **trainer}, schedule={"iterations": iterations})


def stored(run: Run) -> dict[int, str]:
    """The content digest of every version that the store has."""
    refs = [find_weights(run, str(v.version)) for v in list_weights(run) if v.state == "written"]
    return {ref.version: read_weights(run.store, ref).digest for ref in refs}


def tables(folder: Path, name: str) -> list[list[tuple[str, str]]]:
    return [[pair for pair in iteration if pair[0] in ("batch", "train")] for iteration in digests(folder, name)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    drive(folder, "whole", recipe())
    return folder


@pytest.fixture(scope="module")
def waited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The same run, where every version is waited for."""
    folder = tmp_path_factory.mktemp("waited")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engines, "store_follows", property(lambda engines: False))
        drive(folder, "waited", recipe())
    yield folder


def test_what_is_written_meanwhile_has_the_bits_of_what_is_waited_for(whole: Path, waited: Path) -> None:
    one, other = load_run(store_in(whole), "whole"), load_run(store_in(waited), "waited")
    assert tables(whole, "whole") == tables(waited, "waited")
    assert stored(one) == stored(other) and list(stored(one)) == list(range(7))


def test_a_version_is_named_by_a_later_commit_and_the_last_is_waited_for(whole: Path) -> None:
    run = load_run(store_in(whole), "whole")
    commits = [run.commit(k) for k in range(6)]
    assert [c.weights.written for c in commits] == [False] * 5 + [True]
    assert [ref.version for c in commits for ref in c.stored] == [1, 2, 3, 4, 5]
    assert all(ref.version <= c.iteration + 1 for c in commits for ref in c.stored)
    assert [c.schema_version for c in commits] == [3 if c.stored else 2 for c in commits]
    checkpoints = [c.checkpoint.version if c.checkpoint else 0 for c in commits]
    assert checkpoints == sorted(checkpoints) and checkpoints[-1] >= 5 and checkpoints[0] in (0, 1)
    assert audit(run.store, "whole").sound


def test_only_a_commit_that_names_such_a_version_is_closed_to_older_programs(whole: Path) -> None:
    run = load_run(store_in(whole), "whole")
    commit = next(c for c in (run.commit(k) for k in range(6)) if c.stored)
    plain = IterationCommit(**{name: value for name, value in commit if name not in ("stored", "schema_version")})
    assert b'"schema_version": 2' in plain.encode() and b'"stored"' not in plain.encode()
    assert (
        b'"schema_version": 3' in commit.encode()
        and run.store.read(run.commit_path(commit.iteration)) == commit.encode()
    )
    assert IterationCommit.parse(plain.encode()) == plain and IterationCommit.parse(commit.encode()) == commit


@pytest.mark.parametrize("attempt", range(2))
def test_killed_at_random_writes_it_ends_with_the_same_bits(tmp_path: Path, whole: Path, attempt: int) -> None:
    instants: list[int] = []
    for _ in range(3):
        instants.append(random.randint(3, 60))
        process = start_driver(tmp_path, "r", recipe(), instants[-1])
        process.join(60)
        if process.exitcode == 0:
            break
    run = drive(tmp_path, "r", recipe())
    assert digests(tmp_path, "r") == digests(whole, "whole"), f"killed at the writes {instants}"
    assert stored(run) == stored(load_run(store_in(whole), "whole")), f"killed at the writes {instants}"
    assert audit(run.store, "r").sound


def test_a_version_whose_write_failed_stops_the_run_and_is_written_by_the_next_start(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = LocalBackend.put_file

    def full(self: LocalBackend, path: str, source: Path) -> None:
        if "/weights/version=000003/" in path:
            raise OSError(errno.ENOSPC, "full", path)
        put(self, path, source)

    with monkeypatch.context() as patch:
        patch.setattr(LocalBackend, "put_file", full)
        with pytest.raises(UserError, match=r"the trainer refused /settle: .* the disk is full: free some space"):
            drive(tmp_path, "r", recipe())
    head = load_run(store_in(tmp_path), "r").head()
    assert head is not None and head.iteration in (1, 2)
    run = drive(tmp_path, "r", recipe())
    assert digests(tmp_path, "r") == digests(whole, "whole")
    assert stored(run) == stored(load_run(store_in(whole), "whole"))


def test_a_store_that_is_away_for_a_while_costs_no_version(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer is told once, and writes again by itself."""
    put, left = LocalBackend.put_file, [1]

    def away(self: LocalBackend, path: str, source: Path) -> None:
        if "/weights/version=000003/" in path and left and left.pop():
            raise Unavailable("the store is away")
        put(self, path, source)

    def patient(jobs: Sequence[Job]) -> list[Built]:
        try:
            return run_directly(jobs)
        except Unavailable:
            return run_directly(jobs)

    monkeypatch.setattr(LocalBackend, "put_file", away)
    run = drive(tmp_path, "r", recipe(), patient)
    assert not left and run.owner == 1
    assert digests(tmp_path, "r") == digests(whole, "whole")
    assert stored(run) == stored(load_run(store_in(whole), "whole"))


def test_a_trainer_that_dies_while_it_writes_loses_nothing_that_was_committed(tmp_path: Path, whole: Path) -> None:
    def mortal(jobs: Sequence[Job]) -> list[Built]:
        if jobs[0].label in ("train 2", "publish 4"):
            jobs[0].context.engines.supervisor.services["trainer"].handle.stop()
        return run_directly(jobs)

    run = drive(tmp_path, "r", recipe(), mortal)
    assert digests(tmp_path, "r") == digests(whole, "whole")
    assert stored(run) == stored(load_run(store_in(whole), "whole"))
    assert [ref.version for k in range(6) for ref in run.commit(k).stored] == [1, 2, 3, 4, 5], "none of them twice"
    assert audit(run.store, "r").sound


def test_without_memory_for_a_copy_the_run_waits_and_its_records_say_the_same(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "host_room", lambda: 0)
    run = drive(tmp_path, "r", recipe())
    assert digests(tmp_path, "r") == digests(whole, "whole")
    assert stored(run) == stored(load_run(store_in(whole), "whole"))
    assert [[ref.version for ref in run.commit(k).stored] for k in range(6)] == [[1], [2], [3], [4], [5], []]
    assert audit(run.store, "r").sound


def test_a_run_that_is_made_longer_goes_on_with_its_writes(tmp_path: Path, whole: Path) -> None:
    drive(tmp_path, "r", recipe(3))
    run = drive(tmp_path, "r", recipe(6))
    assert tables(tmp_path, "r") == tables(whole, "whole")
    assert stored(run) == stored(load_run(store_in(whole), "whole"))


def test_on_s3_the_same_is_written(tmp_path: Path, whole: Path, s3: S3Server) -> None:
    """There each rank's files go by way of a folder of their own, of which nothing is left."""
    store = open_store(f"s3://{BUCKET}/{uuid.uuid4().hex[:8]}")
    before = set(Path(tempfile.gettempdir()).glob("areal-trainer-*/*"))
    run = drive(tmp_path, "whole", recipe(), store=store)
    assert digests_of(store, "whole") == digests(whole, "whole")
    assert stored(run) == stored(load_run(store_in(whole), "whole"))
    assert audit(store, "whole").sound
    left = set(Path(tempfile.gettempdir()).glob("areal-trainer-*/*")) - before
    assert not [folder for folder in left if not re.search(r"/[0-9a-f]{16}-\d+$", str(folder))], "but what was fetched"


def test_readers_find_the_versions(whole: Path) -> None:
    store = store_in(whole)
    run = load_run(store, "whole")
    assert [(v.version, v.state) for v in list_weights(run)] == [(v, "written") for v in range(7)]
    assert all(f"whole/weights/version={v:06d}/" in run_weights(store, f"run://whole@{v}")[0].path for v in (2, 5, 6))
    rows = run_sql(store, "whole", "SELECT unnest(stored) AS path FROM commits ORDER BY iteration").to_pylist()
    assert [find_weights(run, str(v)).path for v in range(1, 6)] == [row["path"] for row in rows]


def test_the_newest_that_was_written_serves_while_a_run_is_at_work(whole: Path) -> None:
    run = load_run(store_in(whole), "whole")
    for k in range(5):
        named = [ref.version for before in range(k + 1) for ref in run.commit(before).stored]
        newest = newest_written(run, run.commit(k))
        assert (newest.version if newest else None) == (max(named) if named else None)
        for version in range(1, k + 2):
            found = written_version(run, version, run.commit(k))
            assert (found is not None) == (version in named)


def test_gc_keeps_what_commits_name_and_removes_what_a_crash_has_left(tmp_path: Path) -> None:
    drive(tmp_path, "r", recipe())
    run = load_run(store_in(tmp_path), "r")
    append(run.store, "r", "finished", {"owner": 1})
    assert plan(run.store, Rule(older_than=0.0)) == []
    kept = read_weights(run.store, find_weights(run, "3"))
    for orphan in ("attempt=feed/model.safetensors", "attempt=beef/model.safetensors"):
        run.store.put(f"r/weights/version=000003/{orphan}", b"x")
    path = "r/weights/version=000003/attempt=beef"
    files = (FileRef(path=f"{path}/model.safetensors", sha256=hashlib.sha256(b"x").hexdigest(), bytes=1),)
    commit_weights(run.store, "r", 3, "beef", "weights", files, kept.provenance)
    found = {(item.path.rsplit("=")[-1], item.why) for item in plan(run.store, Rule(older_than=0.0))}
    assert found == {("feed", "it has no manifest"), ("beef", "no commit selects it")}
    execute(run.store, plan(run.store, Rule(keep_weights=2, older_than=0.0)))
    assert [v.version for v in list_weights(run) if v.state == "written"] == [0, 5, 6]
    report = audit(run.store, "r")
    assert report.sound and [r.version for r in report.removed] == [1, 2, 3, 4]


def test_a_reference_keeps_the_version_that_another_run_began_with(tmp_path: Path) -> None:
    drive(tmp_path, "r", recipe())
    store = store_in(tmp_path)
    append(store, "r", "finished", {"owner": 1})
    files = run_weights(store, "run://r@3", "reader")
    execute(store, plan(store, Rule(keep_weights=1, older_than=0.0)))
    assert all(store.exists(file.path) for file in files)
    assert run_weights(store, "run://r", "reader") == files, "it goes on with what it began with"


def test_a_fork_begins_before_the_version_was_written(tmp_path: Path) -> None:
    drive(tmp_path, "r", recipe())
    child = drive(tmp_path, "child", recipe(), origin=Origin("r", 3))
    assert digests(tmp_path, "child") == digests(tmp_path, "r")
    assert stored(child).items() <= stored(load_run(child.store, "r")).items() and {3, 4, 5, 6} <= stored(child).keys()
    assert audit(child.store, "child").sound


def test_a_replay_names_what_the_original_has_written(tmp_path: Path) -> None:
    drive(tmp_path, "r", recipe(3))
    origin = Origin("r", 0, "replay", counterfactual=True, replay_from="train")
    longer = [(0, recipe(3, lr_final=0.5, lr_schedule="linear"))]
    child = drive(tmp_path, "child", longer[0][1], origin=origin, segments=longer)
    assert [v.state for v in list_weights(child)] == ["written"] * 4
    assert audit(child.store, "child").sound


# ── weights that servers get from the trainer ───────────────────────────────────────────────────────────────────────


def straight(engines: Engines, client: InferenceClient, trainer: TrainerClient, version: int) -> list[float]:
    """Stands for the transports between GPUs: the servers get the weights, and no record of the run tells how."""
    engines.settle(wait=True)
    attempt = new_attempt()
    command = Write(owner=engines.run.owner, version=version, prefix=weights_attempt("elsewhere", version, attempt))
    files = trainer.publish(command).files
    made = make_provenance(engines.run.owner, now())
    ref = commit_weights(engines.run.store, "elsewhere", version, attempt, "weights", files, made)
    return engines.call(client.update_weights(engines.run.store.uri(ref.path), version))


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "choose_transport", lambda *given: "tensor")
    monkeypatch.setattr(Engines, "_hand_over", straight)


def test_what_servers_get_from_the_trainer_is_evaluated_and_written_meanwhile(tmp_path: Path, direct: None) -> None:
    run = drive(tmp_path, "r", tiny(trainer=OFTEN, schedule={"iterations": 5}))
    commits = [run.commit(k) for k in range(5)]
    assert [c.weights.written for c in commits] == [False] * 4 + [True]
    assert [ref.version for c in commits for ref in c.stored] == [1, 2, 3, 4]
    [loads] = run_sql(run.store, "r", "SELECT min(len(load_seconds)) AS least FROM publish").to_pylist()
    assert loads["least"] == 1
    assert audit(run.store, "r").sound


def test_servers_that_get_weights_from_the_trainer_generate_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive(tmp_path, "through-the-store", tiny())
    handed: list[int] = []

    def counted(engines: Engines, client: InferenceClient, trainer: TrainerClient, version: int) -> list[float]:
        handed.append(version)
        return straight(engines, client, trainer, version)

    monkeypatch.setattr(session, "choose_transport", lambda *given: "tensor")
    monkeypatch.setattr(Engines, "_hand_over", counted)

    def mortal(jobs: Sequence[Job]) -> list[Built]:
        if jobs[0].label == "rollout 2":  # one that starts again loads what was written, or is about to be
            jobs[0].context.engines.supervisor.services["inference-0"].handle.stop()
        return run_directly(jobs)

    run = drive(tmp_path, "straight", tiny(), mortal)
    assert handed == list(range(1, len(digests(tmp_path, "straight")) + 1)), "once each, by the trainer that made it"
    assert audit(run.store, "straight").sound
    content = [
        [p for p in iteration if p[0] not in ("publish", "weights")] for iteration in digests(tmp_path, "straight")
    ]
    assert content == [
        [p for p in iteration if p[0] not in ("publish", "weights")]
        for iteration in digests(tmp_path, "through-the-store")
    ]


# ── several ranks ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_two_ranks_write_meanwhile_and_are_killed(tmp_path: Path) -> None:
    """Each rank its share; whoever restarts re-trains from what one of them was not in time to write."""
    two = recipe(3, backend="fsdp2", ranks=2, layout="packed")
    two = two.model_copy(update={"launcher": two.launcher.model_copy(update={"type": "local"})})
    drive(tmp_path, "whole", two)
    process = start_driver(tmp_path, "r", two, instant := random.randint(15, 30))
    process.join(120)
    run = drive(tmp_path, "r", two)
    assert digests(tmp_path, "r") == digests(tmp_path, "whole"), f"killed at the write {instant}"
    assert stored(run).items() <= stored(load_run(run.store, "whole")).items() and 3 in stored(run)
    assert audit(run.store, "r").sound and audit(run.store, "whole").sound
    checkpoint = load_run(run.store, "whole").commit(2).checkpoint
    assert checkpoint is not None and len(read_weights(run.store, checkpoint).files) == 3
