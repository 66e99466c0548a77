"""A child begins only if all that its first start loads is there; else the file is named, and nothing is left."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from replays import kept
from stage_driver import drive, store_in, tiny, tiny_sft
from store_listing import listed

from areal_tasks.store.backend import Store
from areal_tasks.store.fork import Origin, check_first_start, loaded_weights
from areal_tasks.store.history.journal import append_log
from areal_tasks.store.opening import open_run
from areal_tasks.store.retention.gc import RetentionRule, plan_removals
from areal_tasks.store.retention.gc_remove import remove_planned
from areal_tasks.store.runs import Run, load_run
from schemas.errors import UserError
from schemas.manifest import IterationCommit
from schemas.record import SCHEMA_VERSION

LAST = 3
OFTEN = {"recover_within_seconds": 1e-6}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose store holds `often`, with a checkpoint an iteration, and `rare`, without any."""
    folder = tmp_path_factory.mktemp("made")
    drive(folder, "often", tiny(trainer=OFTEN), waits=True)
    drive(folder, "rare", tiny())
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made / "store", tmp_path / "store")
    return tmp_path


#: What a fork at 2 loads. `*` stands for keys and attempts.
LOADED = [
    ("often", "weights/version=000002/attempt=*/model.safetensors"),
    ("often", "weights/version=000000/attempt=*/*.json"),
    ("often", "checkpoints/version=000002/attempt=*/*.distcp"),
    ("often", "checkpoints/version=000002/attempt=*.json"),
    ("often", "iteration=000000/stage=prompts/attempt=*/*.parquet"),
    ("often", "iteration=000000/stage=initialise/*.json"),
    ("rare", "iteration=000001/stage=train/*.json"),
    ("rare", "weights/version=000002/attempt=*.json"),
    ("rare", "iteration=000000/stage=rollout/attempt=*/*.parquet"),
    ("rare", "iteration=000001/stage=advantage/attempt=*/*.parquet"),
    ("rare", "iteration=000001/stage=train/attempt=*/train_samples-00000.parquet"),
]


@pytest.mark.parametrize("gone", [True, False], ids=["gone", "cut"])
@pytest.mark.parametrize(("name", "pattern"), LOADED)
def test_a_file_that_a_fork_would_load_is_missed_before_it_begins(
    folder: Path, name: str, pattern: str, gone: bool
) -> None:
    victim = next((folder / "store" / name).glob(pattern))
    if gone:
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[:-1])
    store = store_in(folder)
    before = listed(store, "")
    with pytest.raises(UserError, match=rf"No run derived from '{name}' can begin at iteration 2.*{victim}"):
        open_run(store, "child", load(store, name), origin=Origin(name, 2))
    assert listed(store, "") == before


def test_what_a_newer_program_wrote_asks_for_an_upgrade_not_for_a_backup(folder: Path) -> None:
    manifest = next((folder / "store/often").glob("weights/version=000000/attempt=*.json"))
    record = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(record | {"schema_version": SCHEMA_VERSION + 1}))
    with pytest.raises(UserError, match=rf"{manifest} was written by a newer arealflow.*: upgrade\.$"):
        open_run(store_in(folder), "child", tiny(trainer=OFTEN), origin=Origin("often", 2))


def load(store: Store, name: str) -> Any:
    return tiny(trainer=OFTEN) if name == "often" else tiny()


@pytest.mark.parametrize(
    ("name", "pattern", "origin"),
    [
        ("often", "iteration=000000/stage=rollout/attempt=*/*.parquet", Origin("often", 2)),  # a checkpoint spares it
        ("often", "weights/version=000001/attempt=*/model.safetensors", Origin("often", 2)),
        ("often", "checkpoints/version=000001/attempt=*/*.distcp", Origin("often", 2)),
        ("rare", "weights/version=000002/attempt=*/model.safetensors", Origin("rare", 0)),
        ("rare", "weights/version=000000/attempt=*/model.safetensors", kept("verify", "rare", until="advantage")),
    ],
)
def test_a_file_that_a_child_does_without_is_no_obstacle(folder: Path, name: str, pattern: str, origin: Origin) -> None:
    next((folder / "store" / name).glob(pattern)).unlink()
    check_first_start(load_run(store_in(folder), name), origin)


def unwritten(run: Run, k: int) -> IterationCommit:
    """The commit of an iteration whose weights were handed to the servers and not written."""
    commit = run.commit(k)
    weights = commit.weights.model_copy(update={"path": "", "attempt": "", "sha256": ""})
    return commit.model_copy(update={"weights": weights})


def test_servers_begin_with_the_newest_weights_that_were_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where versions are rarely written, those of the last commit are not in the store."""
    run = load_run(store_in(folder), "often")
    commits = {0: run.commit(0), 1: unwritten(run, 1), 2: unwritten(run, 2)}
    monkeypatch.setattr(Run, "commit", lambda self, k: commits[k])
    found = [(ref.version, "checkpoints" in ref.path) for ref in loaded_weights(run, Origin("often", LAST))]
    assert found == [(0, False), (1, False), (3, True)]
    Path(run.store.uri(commits[0].weights.path)).unlink()
    with pytest.raises(UserError, match=r"No run derived from 'often' can begin at iteration 3.*version=000001"):
        check_first_start(run, Origin("often", LAST))


def test_a_fine_tuned_model_whose_versions_are_rarely_written(tmp_path: Path) -> None:
    """No server waits for the weights, and gc leaves what a fork loads."""
    rarely = {"weights_every": 2, **OFTEN}
    run = drive(tmp_path, "sft", tiny_sft(trainer=rarely))
    append_log(run.store, "sft", "finished", {"owner": run.owner})
    assert [run.commit(k).weights.written for k in range(LAST)] == [False, True, True]
    drive(tmp_path, "child", tiny_sft(trainer=rarely), origin=Origin("sft", 1))
    rule = RetentionRule(1, 1, older_than=0.0)
    remove_planned(run.store, plan_removals(run.store, rule, "sft"), rule)
    drive(tmp_path, "again", tiny_sft(trainer=rarely), origin=Origin("sft", 1))
    with pytest.raises(UserError, match="version 2 of run 'sft' were removed by"):
        drive(tmp_path, "late", tiny_sft(trainer=rarely), origin=Origin("sft", 2))
