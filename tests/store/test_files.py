"""Weights and checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from areal_tasks.store import paths
from areal_tasks.store.backend import Missing, Store, StoreError
from areal_tasks.store.objects.files import commit_weights, materialise, read_weights, upload, weights_ref
from areal_tasks.store.provenance import make_provenance, now
from schemas.manifest import FileRef, WeightsRef


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small model folder, with a folder in it."""
    (tmp_path / "model" / "shards").mkdir(parents=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "shards" / "model.safetensors").write_bytes(os.urandom(100_000))
    return tmp_path / "model"


def committed(store: Store, folder: Path, attempt: str = "a") -> tuple[WeightsRef, tuple[FileRef, ...]]:
    files = upload(store, paths.weights_attempt("run", 3, attempt), folder)
    provenance = make_provenance(1, now())
    return commit_weights(store, "run", 3, attempt, "weights", files, provenance), files


def test_a_folder_goes_in_and_out(store: Store, folder: Path, tmp_path: Path) -> None:
    ref, files = committed(store, folder)
    manifest = read_weights(store, ref)
    assert manifest.files == files and ref == weights_ref(store, "run/weights/version=000003/attempt=a.json")
    there = materialise(store, manifest.files, tmp_path / "out", verify=True)
    names = [path.relative_to(there) for path in sorted(there.rglob("*")) if path.is_file()]
    assert names == [Path("config.json"), Path("shards/model.safetensors")]
    assert all((there / name).read_bytes() == (folder / name).read_bytes() for name in names)
    assert (there == store.local("run/weights/version=000003/attempt=a")) == store.url.startswith("file:")


def test_a_folder_already_in_the_store_is_not_copied(local_store: Store, folder: Path) -> None:
    inside = local_store.local("run/weights/version=000003/attempt=a")
    assert inside is not None
    inside.parent.mkdir(parents=True)
    folder.rename(inside)
    before = (inside / "config.json").stat().st_ino
    ref, _ = committed(local_store, inside)
    assert (inside / "config.json").stat().st_ino == before
    assert len(read_weights(local_store, ref).files) == 2


def test_the_digest_is_of_names_and_contents_and_not_of_the_attempt(local_store: Store, folder: Path) -> None:
    first, _ = committed(local_store, folder, "a")
    again, _ = committed(local_store, folder, "b")
    (folder / "config.json").rename(folder / "settings.json")
    renamed, _ = committed(local_store, folder, "c")
    assert first.digest == again.digest != renamed.digest and first.sha256 != again.sha256


def test_what_is_fetched_already_is_not_fetched_again(s3_store: Store, folder: Path, tmp_path: Path) -> None:
    _, files = committed(s3_store, folder, "once")
    out = materialise(s3_store, files, tmp_path / "out")
    stamp = (out / "config.json").stat().st_mtime_ns
    materialise(s3_store, files, out)
    assert (out / "config.json").stat().st_mtime_ns == stamp
    (out / "config.json").write_text("")  # cut short by a crash
    materialise(s3_store, files, out)
    assert (out / "config.json").read_text() == "{}"


def test_damaged_weights_are_named(local_store: Store, folder: Path, tmp_path: Path) -> None:
    ref, files = committed(local_store, folder)
    stored = Path(local_store.uri(files[1].path))
    stored.write_bytes(b"x" * files[1].bytes)
    materialise(local_store, files, tmp_path / "out")  # sizes only
    with pytest.raises(StoreError, match=r"model\.safetensors is damaged"):
        materialise(local_store, files, tmp_path / "out", verify=True)
    stored.write_bytes(b"short")
    with pytest.raises(StoreError, match=r"model\.safetensors is damaged: its 5 bytes"):
        materialise(local_store, files, tmp_path / "out")
    stored.unlink()
    with pytest.raises(Missing, match=r"model\.safetensors"):
        materialise(local_store, files, tmp_path / "out")
    manifest = Path(local_store.uri(ref.path))
    manifest.write_bytes(manifest.read_bytes().replace(b'"version": 3', b'"version": 4'))
    with pytest.raises(StoreError, match=r"attempt=a\.json is damaged"):
        read_weights(local_store, ref)


@pytest.mark.parametrize("name", ["../../../../evil", "../evil", "./evil", "/evil", "a//b", ""])
def test_a_manifest_cannot_name_a_file_outside_its_folder(name: str) -> None:
    path = f"run/weights/version=000003/attempt=aa/{name}"
    with pytest.raises(ValueError, match="does not lie below the store's root") as failure:
        FileRef(path=path, sha256="0" * 64, bytes=1)
    assert path in str(failure.value)
    with pytest.raises(ValueError, match=r"'/etc/evil' does not lie below the store's root"):
        FileRef(path="/etc/evil", sha256="0" * 64, bytes=1)


def test_a_stored_manifest_that_does_is_named(local_store: Store, folder: Path) -> None:
    ref, _ = committed(local_store, folder)
    data = local_store.read(ref.path).replace(b"attempt=a/config.json", b"attempt=a/../evil.json")
    local_store.create("run/weights/version=000003/attempt=b.json", data)
    with pytest.raises(StoreError, match=r"attempt=b\.json"):
        weights_ref(local_store, "run/weights/version=000003/attempt=b.json")


def test_files_of_one_manifest_share_a_folder(s3_store: Store, folder: Path, tmp_path: Path) -> None:
    _, files = committed(s3_store, folder, "mixed")
    elsewhere = files[1].model_copy(update={"path": files[1].path.replace("attempt=mixed", "attempt=other")})
    with pytest.raises(StoreError, match=r"attempt=other.* does not lie below .*attempt=mixed"):
        materialise(s3_store, (files[0], elsewhere), tmp_path / "out")
    assert not list(tmp_path.glob("out/**/model.safetensors"))


def test_checkpoints_lie_apart_from_weights(local_store: Store, folder: Path) -> None:
    files = upload(local_store, paths.checkpoint_attempt("run", 3, "a"), folder)
    ref = commit_weights(local_store, "run", 3, "a", "checkpoint", files, make_provenance(1, now()))
    assert ref.path == "run/checkpoints/version=000003/attempt=a.json"
    assert read_weights(local_store, ref).kind == "checkpoint"
