"""Weights and checkpoints: folders of large files, uploaded once and named by a manifest next to each folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from areal_tasks.store.backend import Store, StoreError, damaged
from areal_tasks.store.commit import commit_once, decode, read_record
from areal_tasks.store.keys import combine_digests
from areal_tasks.store.objects.inventory import check_sha256, check_size
from areal_tasks.store.objects.local import file_sha256
from areal_tasks.store.parallel import parallel
from areal_tasks.store.paths import attempt_folder, checkpoint, weights
from schemas.manifest import FileRef, Provenance, ShardRef, WeightsManifest, WeightsRef

_PATHS: Final = {"weights": weights, "checkpoint": checkpoint}


def upload(store: Store, prefix: str, folder: Path) -> tuple[FileRef, ...]:
    """Put every file below `folder` under `prefix` (a fresh attempt), sorted by name; hashed in parallel.

    A folder that is `store.local(prefix)` itself is not copied, only made durable.
    """
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())

    def put(name: str) -> FileRef:
        path, source = f"{prefix}/{name}", folder / name
        store.put_file(path, source)
        return FileRef(path=path, sha256=file_sha256(source), bytes=source.stat().st_size)

    return tuple(parallel(put, names))


def materialise(store: Store, files: Sequence[FileRef], into: Path, *, verify: bool = False) -> Path:
    """A local folder that holds `files`: `into`, or the store's own folder when it lies on this disk (no copy).

    Names below their common folder are kept. Files that `into` already holds in full size (with `verify`: and with the
    recorded SHA-256) are not fetched again.

    Raises UserError: a file is missing, or has another size (with `verify`: another SHA-256) than recorded.
    """
    common = common_folder(files)
    local = store.local(common)
    folder = local if local is not None else into
    parallel(lambda file: _materialise(store, file, folder / _relative(file, common), verify, local is None), files)
    return folder


def have_file(store: Store, file: FileRef | ShardRef, target: Path) -> None:
    """Have the verified file at `target`: the store's own path if that is on this disk, else it is fetched if need be.

    Raises UserError: it is missing, or has another SHA-256 than recorded.
    """
    _materialise(store, file, target, verify=True, fetch=target != store.local(file.path))


def _materialise(store: Store, file: FileRef | ShardRef, target: Path, verify: bool, fetch: bool) -> None:
    there = target.is_file() and target.stat().st_size == file.bytes
    if not fetch:
        (check_sha256 if verify else check_size)(store, file)
    elif not there or (verify and file_sha256(target) != file.sha256):
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        if all(store.fetch_file(file.path, partial) != file.sha256 for _ in range(2)):  # it may be torn in transit
            raise damaged(store, file.path, "its bytes do not have the SHA-256 that was recorded for it")
        partial.replace(target)


def digest_of(files: Sequence[FileRef]) -> str:
    """The digest over the files' digests, names included."""
    return combine_digests({_relative(file, common_folder(files)): file.sha256 for file in files})


def common_folder(files: Sequence[FileRef]) -> str:
    """The attempt's folder that holds all of `files`."""
    return attempt_folder(files[0].path)


def _relative(file: FileRef, folder: str) -> str:
    """The file's name below `folder`. StoreError if it lies elsewhere: the files of one manifest share a folder."""
    name = file.path.removeprefix(f"{folder}/")
    if name == file.path:
        raise StoreError(f"{file.path} does not lie below {folder}, as the other files of its manifest do.")
    return name


def commit_weights(
    store: Store,
    run: str,
    version: int,
    attempt: str,
    kind: str,
    files: Sequence[FileRef],
    provenance: Provenance,
) -> WeightsRef:
    """Write the manifest that makes uploaded `files` weights (or, by `kind`, a checkpoint) of this version."""
    manifest = WeightsManifest(
        run=run,
        version=version,
        attempt=attempt,
        kind=kind,
        digest=digest_of(files),
        files=tuple(files),
        provenance=provenance,
    )
    path = _PATHS[kind](run, version, attempt)
    commit_once(store, path, manifest)
    return weights_ref(store, path)


def weights_ref(store: Store, path: str) -> WeightsRef:
    """The reference to the weights or checkpoint manifest at `path`."""
    data = store.read(path)
    manifest = decode(store, path, WeightsManifest, data)
    sha256 = hashlib.sha256(data).hexdigest()
    return WeightsRef(
        version=manifest.version, attempt=manifest.attempt, path=path, sha256=sha256, digest=manifest.digest
    )


def read_weights(store: Store, ref: WeightsRef) -> WeightsManifest:
    """The manifest that `ref` names, whose bytes are verified."""
    return read_record(store, ref.path, WeightsManifest, ref.sha256)
