"""Weights are verified before servers load them, and a damaged file is never passed over."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_tasks.engines.handover import WeightsSource
from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.commit import new_attempt
from areal_tasks.store.objects.files import commit_weights, read_weights, upload
from areal_tasks.store.paths import weights_attempt
from areal_tasks.store.provenance import make_provenance, now
from schemas.errors import UserError
from schemas.manifest import WeightsRef


@pytest.fixture
def written(tmp_path: Path) -> tuple[Store, WeightsRef]:
    store, attempt = open_store(f"file://{tmp_path}/store"), new_attempt()
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("a.safetensors", "b.safetensors"):
        (folder / name).write_bytes(name.encode() * 1000)
    files = upload(store, weights_attempt("r", 3, attempt), folder)
    return store, commit_weights(store, "r", 3, attempt, "weights", files, make_provenance(1, now()))


def test_servers_read_the_stores_own_files(written: tuple[Store, WeightsRef], tmp_path: Path) -> None:
    store, ref = written
    source = WeightsSource(store, reads_store=False)
    folder = Path(source.ready(ref))
    assert folder.is_relative_to(tmp_path / "store")
    source.fetched.close()
    assert (folder / "a.safetensors").read_bytes() == b"a.safetensors" * 1000


def test_damage_is_an_error_before_the_servers_load(written: tuple[Store, WeightsRef]) -> None:
    store, ref = written
    place = store.local(read_weights(store, ref).files[1].path)
    assert place is not None
    data = bytearray(place.read_bytes())
    data[500] ^= 1
    place.write_bytes(data)
    with pytest.raises(UserError, match=r"b\.safetensors is damaged"):
        WeightsSource(store, reads_store=False).ready(ref)
