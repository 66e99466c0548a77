"""A small real run, made once: two iterations, checkpoints, a log, a tag, a compaction. Tests that alter it copy it."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest
import session_folder
from stage_driver import drive, store_in, tiny

from areal_tasks.store.backend import Store
from areal_tasks.store.catalog import Catalog
from areal_tasks.store.history.journal import append_log
from areal_tasks.store.retention.compact import compact
from areal_tasks.store.runs import load_run
from areal_tasks.store.weights import tag_weights

SCHEMA_1 = Path(__file__).parents[1] / "fixtures" / "schema-1" / "run.tar.xz"


@pytest.fixture(scope="session")
def made() -> Path:
    """A folder whose store holds the finished run `small`. Not to be altered."""
    return session_folder.once("audited", make)


def make(folder: Path) -> None:
    run = drive(
        folder,
        "small",
        tiny(
            schedule={"iterations": 2},
            rollout={"groups": 2, "group_size": 2},
            evaluation={"every": 0, "limit": 0, "max_new_tokens": 256},
            trainer={"recover_within_seconds": 1e-6},
        ),
    )
    head = run.head()
    assert head is not None and head.checkpoint is not None
    append_log(run.store, "small", "started", {"owner": 1, "iterations": 0, "head": run.digest_before(0)})
    tag_weights(run.store, "small", "first", run.commit(0).weights)
    catalog = Catalog(run)
    compact(catalog, catalog.regions)
    append_log(run.store, "small", "finished", {"owner": 1, "iterations": 2, "head": run.digest_before(2)})


@pytest.fixture
def small(made: Path, tmp_path: Path) -> Store:
    """A store with a copy of the run `small`, of which there are two iterations."""
    shutil.copytree(made / "store", tmp_path / "store")
    assert load_run(store_in(tmp_path), "small").head() is not None
    return store_in(tmp_path)


@pytest.fixture
def schema_1(tmp_path: Path) -> Store:
    """A store with the run `old`, which a program of schema 1 wrote."""
    with tarfile.open(SCHEMA_1) as archive:
        archive.extractall(tmp_path / "store", filter="data")
    return store_in(tmp_path)
