"""Weights of a remote store in memory: fetched once for all that use them, verified, and removed by the last."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from areal_tasks.engines import fetching
from areal_tasks.engines.fetching import PREFIX, Fetched, in_memory, remove_unused
from areal_tasks.store.backend import Store
from areal_tasks.store.commit import new_attempt
from areal_tasks.store.objects.files import commit_weights as commit
from areal_tasks.store.objects.files import read_weights, upload
from areal_tasks.store.paths import weights_attempt
from areal_tasks.store.provenance import make_provenance, now
from schemas.errors import UserError
from schemas.manifest import FileRef, WeightsRef

USES = """
import sys
from pathlib import Path
from areal_tasks.engines import fetching
from areal_tasks.store.backend import open_store
from areal_tasks.store.objects.files import read_weights
from schemas.manifest import WeightsRef
fetching.MEMORY, store = Path(sys.argv[3]), open_store(sys.argv[1])
with fetching.in_memory(store, read_weights(store, WeightsRef.model_validate_json(sys.argv[2])).files) as f:
    print(f, flush=True)
    sys.stdin.readline()
"""


def put(store: Store, folder: Path, run: str, text: str) -> WeightsRef:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text(text * 1000)
    attempt = new_attempt()
    files = upload(store, weights_attempt(run, 0, attempt), folder)
    return commit(store, run, 0, attempt, "weights", files, make_provenance(1, now()))


@pytest.fixture
def ref(s3_store: Store, tmp_path: Path) -> WeightsRef:
    return put(s3_store, tmp_path / "model", tmp_path.name, tmp_path.name)


@pytest.fixture
def files(s3_store: Store, ref: WeightsRef) -> tuple[FileRef, ...]:
    return read_weights(s3_store, ref).files


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(fetching, "MEMORY", folder)
    return folder


@contextmanager
def using(store: Store, ref: WeightsRef, parent: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that uses the weights until it gets a line."""
    command = [sys.executable, "-c", USES, store.url, ref.model_dump_json(), str(parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def folder_of(process: subprocess.Popen[str]) -> Path:
    assert process.stdout is not None
    return Path(process.stdout.readline().strip())


def test_processes_share_one_fetch_and_the_last_removes_it(s3_store: Store, ref: WeightsRef, parent: Path) -> None:
    with using(s3_store, ref, parent) as one, using(s3_store, ref, parent) as other:
        folder = folder_of(one)
        assert folder == folder_of(other)
        before = (folder / "model.safetensors").stat()
        with in_memory(s3_store, read_weights(s3_store, ref).files) as mine:
            assert mine == folder and mine.stat().st_mode & 0o77 == 0
            assert (mine / "model.safetensors").stat() == before, "it was not fetched again"
        one.communicate("\n")
        assert folder.is_dir()
        other.communicate("\n")
        assert list(parent.iterdir()) == []


def test_what_a_killed_process_left_goes_when_others_are_fetched(
    s3_store: Store, ref: WeightsRef, parent: Path, tmp_path: Path
) -> None:
    newer = put(s3_store, tmp_path / "newer", f"{tmp_path.name}-newer", "newer")
    with using(s3_store, ref, parent) as process:
        left = folder_of(process)
        with in_memory(s3_store, read_weights(s3_store, newer).files):
            assert left.is_dir(), "a living process uses it"
        process.kill()
        process.wait()
        assert left.is_dir()
        with in_memory(s3_store, read_weights(s3_store, newer).files) as mine:
            assert not left.exists() and mine.is_dir()
    assert list(parent.iterdir()) == []


def test_what_was_fetched_in_part_is_completed(s3_store: Store, files: tuple[FileRef, ...], parent: Path) -> None:
    with in_memory(s3_store, files) as folder:
        held = (folder / "config.json").stat()
        (folder / "model.safetensors").unlink()
        (folder / ".model.safetensors.999").write_text("of a killed process")
        with in_memory(s3_store, files):
            assert (folder / "config.json").stat() == held
            assert (folder / "model.safetensors").stat().st_size == files[1].bytes
            assert not (folder / ".model.safetensors.999").exists()


def test_damaged_weights_are_refused(s3_store: Store, files: tuple[FileRef, ...], parent: Path) -> None:
    s3_store.put(files[1].path, b"x" * files[1].bytes)
    with pytest.raises(UserError, match=r"model\.safetensors is damaged"), in_memory(s3_store, files):
        pass
    assert list(parent.iterdir()) == []


def test_the_last_weights_stay_until_those_after_the_next(parent: Path, s3_store: Store, tmp_path: Path) -> None:
    fetched, folders = Fetched(), list[Path]()
    for name in "abc":
        refs = read_weights(s3_store, put(s3_store, tmp_path / name, f"{tmp_path.name}-{name}", name)).files
        folders.append(fetched.hold(in_memory(s3_store, refs)))
    assert [folder.exists() for folder in folders] == [False, True, True]
    fetched.close()
    assert list(parent.iterdir()) == []


def test_what_is_no_such_folder_is_left_alone(parent: Path) -> None:
    file, other, link = parent / f"{PREFIX}file", parent / "other", parent / f"{PREFIX}link"
    file.write_text("")
    other.mkdir()
    link.symlink_to(other)
    remove_unused()
    assert file.exists() and other.exists() and link.is_symlink()
