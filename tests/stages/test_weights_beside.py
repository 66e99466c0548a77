"""Weights that servers load are verified beside the loading, and a damaged file is never passed over."""

from __future__ import annotations

from contextlib import AbstractContextManager
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


def opened(store: Store, ref: WeightsRef) -> AbstractContextManager[str]:
    return WeightsSource(store, reads_store=False).opened(ref)


def test_servers_read_the_stores_own_files(written: tuple[Store, WeightsRef], tmp_path: Path) -> None:
    store, ref = written
    with opened(store, ref) as folder:
        assert Path(folder).is_relative_to(tmp_path / "store")
        assert (Path(folder) / "a.safetensors").read_bytes() == b"a.safetensors" * 1000
    assert Path(folder).is_dir()


def test_damage_is_an_error_once_the_servers_have_loaded(written: tuple[Store, WeightsRef]) -> None:
    store, ref = written
    place = store.local(read_weights(store, ref).files[1].path)
    assert place is not None
    data = bytearray(place.read_bytes())
    data[500] ^= 1
    place.write_bytes(data)
    loaded = []
    with pytest.raises(UserError, match=r"b\.safetensors is damaged"), opened(store, ref) as folder:
        loaded.append(folder)
    assert loaded
    with pytest.raises(UserError, match="damaged"), opened(store, ref):
        raise RuntimeError("a server could not read it")  # the damage is what has to be said
