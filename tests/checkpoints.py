"""Checkpoints as a trainer writes them, on every rank, here in one go; and small weights that are published."""

from __future__ import annotations

from pathlib import Path

from areal_tasks.engines.trainer.checkpoint import Files, Saving
from areal_tasks.store.backend import Store
from areal_tasks.store.commit import new_attempt
from areal_tasks.store.objects.files import commit_weights, upload
from areal_tasks.store.paths import weights_attempt
from areal_tasks.store.provenance import make_provenance, now
from schemas.manifest import WeightsRef


def publish(store: Store, tmp_path: Path, version: int) -> WeightsRef:
    """Weights of the run `tmp_path.name`: config.json, which names run and version; also in `model-<version>`."""
    run, attempt, folder = tmp_path.name, new_attempt(), tmp_path / f"model-{version}"
    folder.mkdir()
    (folder / "config.json").write_text(f"{run} {version}")
    files = upload(store, weights_attempt(run, version, attempt), folder)
    return commit_weights(store, run, version, attempt, "weights", files, make_provenance(1, now()))


def save(saving: Saving) -> Files:
    """Write the share of each rank, then the index; returns the SHA-256 and bytes of each file."""
    written = saving.write(_stays)
    found = saving.finish(lambda: written, _stays)
    assert found is not None
    return found


def _stays(_name: str) -> None:
    """The file is where it should be."""
