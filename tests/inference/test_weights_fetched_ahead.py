"""Weights that come from S3 while they are written: servers load what was written or nothing, whatever fails."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from s3_server import BUCKET, S3Server
from test_doubted_weights import Loader, running
from waiting import LIMIT, wait_until

from areal_tasks.engines import fetching, handover, server_pool
from areal_tasks.engines.session import Engines
from areal_tasks.engines.trainer.commands import Write, Written
from areal_tasks.engines.trainer_client import TrainerDown
from areal_tasks.store.backend import Store, StoreError
from areal_tasks.store.files import read_weights
from areal_tasks.store.local import file_sha256
from areal_tasks.store.s3 import S3Backend
from schemas.manifest import FileRef
from tests.store.faulty_proxy import ERROR_403, FLIPPED, Faults, faulty_proxy

NAMES = ("a.safetensors", "b.safetensors", "config.json")
Hook = Callable[[str], None]


class Slow:
    """A trainer that writes other bytes each time, one file after another, and calls `wrote` after each."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store, self.folder, self.prefix = store, folder, ""
        self.wrote: Hook = lambda _name: None
        self.tells: Callable[[FileRef], FileRef] = lambda file: file
        folder.mkdir()

    def publish(self, command: Write) -> Written:
        assert command.digests
        self.prefix = command.prefix
        return Written(files=tuple(self.tells(self._write(name)) for name in NAMES), seconds=0.1)

    def _write(self, name: str) -> FileRef:
        source, path = self.folder / name, f"{self.prefix}/{name}"
        source.write_bytes(os.urandom(100_000))
        self.store.put_file(path, source)
        self.wrote(name)
        return FileRef(path=path, sha256=file_sha256(source), bytes=100_000)

    def written(self) -> dict[str, bytes]:
        return {name: (self.folder / name).read_bytes() for name in NAMES}


class Reader(Loader):
    """Notes what it loads."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.reads: list[dict[str, bytes]] = []
        self.on_load = self.note

    def note(self) -> None:
        self.reads.append({file.name: file.read_bytes() for file in Path(self.holds).iterdir()})

    @property
    def read(self) -> dict[str, bytes]:
        """What it has loaded last."""
        return self.reads[-1]


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where fetched weights lie."""
    found = tmp_path / "memory"
    found.mkdir()
    monkeypatch.setattr(handover, "MEMORY", found)
    return found


@pytest.fixture
def faults() -> Faults:
    """What is to happen to those who fetch b.safetensors."""
    return Faults(spoils=lambda method, path: method == "GET" and "b.safetensors" in path, checksums=False)


Scene = tuple[Engines, list[Reader], Slow]


@pytest.fixture
def scene(
    s3: S3Server, faults: Faults, memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Scene]:
    """Engines whose two servers hold the weights in force of a store in S3, and their trainer."""
    monkeypatch.setattr(server_pool, "PROBE_SECONDS", (0.01, 0.01))
    with faulty_proxy(s3.endpoint, faults) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
        with running(tmp_path, url, Reader) as (engines, readers, _):
            yield engines, readers, Slow(engines.run.store, tmp_path / "slow")  # type: ignore[misc]


def write(engines: Engines, trainer: Slow, version: int = 4) -> handover.Published:
    return engines.write_weights(trainer, version)  # type: ignore[arg-type]


def hidden(memory: Path, name: str) -> list[Path]:
    """Files of that name which have come, whole, and are not verified."""
    return [file for file in memory.glob(f"*/.{name}") if file.stat().st_size == 100_000]


# ── as it should be ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_files_come_before_the_trainer_has_answered(scene: Scene, memory: Path) -> None:
    engines, readers, trainer = scene
    trainer.wrote = lambda name: _come(memory, name)
    done = write(engines, trainer)
    assert [reader.read for reader in readers] == [trainer.written()] * 2, "these files, and nothing else"
    assert engines.serving == engines.written == done.ref and engines.inference().version == 4
    assert read_weights(engines.run.store, done.ref).files == done.files
    assert not list(memory.iterdir()), "all have loaded it"


def _come(memory: Path, name: str) -> None:
    wait_until(lambda: hidden(memory, name), name)
    assert not list(memory.glob(f"*/{name}")), "nobody has said yet that this is it"


def test_servers_load_beside_the_commit(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    engines, readers, trainer = scene
    loaded, commit, old, seen = threading.Event(), handover.commit_weights, engines.serving, []

    def late(*arguments: Any) -> Any:
        assert loaded.wait(LIMIT)
        return commit(*arguments)

    def note() -> None:
        seen.append((engines.run.store.exists(f"{trainer.prefix}.json"), engines.serving))
        loaded.set()

    monkeypatch.setattr(handover, "commit_weights", late)
    readers[0].on_load = note
    done = write(engines, trainer)
    assert seen == [(False, old)] and engines.serving == done.ref


def test_a_server_that_failed_finds_the_files_later(scene: Scene, memory: Path) -> None:
    engines, readers, trainer = scene
    readers[1].fails, before = "says nothing", len(readers[1].reads)
    assert len(write(engines, trainer).load_seconds) == 1
    wait_until(lambda: len(readers[1].reads) == before + 2, "the server, which is well again")
    assert readers[1].read == trainer.written() and engines.inference().version == 4
    assert len(list(memory.iterdir())) == 1
    write(engines, trainer, 5)
    assert not list(memory.iterdir())


# ── what fails ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_file_that_was_damaged_on_its_way_is_fetched_again(scene: Scene, memory: Path, faults: Faults) -> None:
    engines, readers, trainer = scene
    faults.answer, faults.left = FLIPPED, 1
    trainer.wrote = lambda name: _come(memory, name)
    write(engines, trainer)
    assert faults.left == 0 and [reader.read for reader in readers] == [trainer.written()] * 2


def test_other_bytes_than_the_trainer_tells_of_are_no_weights(scene: Scene, memory: Path) -> None:
    engines, readers, trainer = scene
    old, other = engines.serving, "f" * 64
    trainer.tells = lambda file: file.model_copy(
        update={"sha256": other} if file.path.endswith("b.safetensors") else {}
    )
    with pytest.raises(StoreError, match=r"b\.safetensors is damaged"):
        write(engines, trainer)
    assert not list(memory.iterdir()) and engines.serving == old and not readers[0].read.keys() & set(NAMES)
    assert not engines.run.store.exists(f"{trainer.prefix}.json")


@pytest.mark.parametrize("last", NAMES)
def test_a_trainer_that_dies_leaves_nothing(scene: Scene, memory: Path, last: str) -> None:
    engines, readers, trainer = scene
    old = engines.serving

    def die(name: str) -> None:
        if name == last:
            _come(memory, name)
            raise TrainerDown("killed")

    trainer.wrote = die
    with pytest.raises(TrainerDown, match="killed"):
        write(engines, trainer)
    assert not list(memory.iterdir()) and engines.serving == old
    trainer.wrote = lambda _name: None
    write(engines, trainer)
    assert [reader.read for reader in readers] == [trainer.written()] * 2


@pytest.mark.parametrize("what", ["a file", "the listing"])
def test_what_cannot_be_fetched_ahead_is_fetched_afterwards(
    scene: Scene, faults: Faults, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engines, readers, trainer = scene
    faults.answer, faults.left, faults.store_first = ERROR_403, 1, False
    if what == "the listing":
        faults.spoils = lambda method, path: method == "GET" and "list-type=2" in path
    trainer.wrote = lambda name: _refused(faults, name)
    write(engines, trainer)
    assert [reader.read for reader in readers] == [trainer.written()] * 2
    assert ("not while they are" if what == "the listing" else "b.safetensors could not be fetched yet") in caplog.text


def _refused(faults: Faults, name: str) -> None:
    wait_until(lambda: name != "config.json" or faults.left == 0, "the refusal")


def test_what_others_put_there_is_not_loaded(scene: Scene, memory: Path) -> None:
    engines, readers, trainer = scene

    def put(name: str) -> None:
        for other in ("other.safetensors", "deeper/other.safetensors"):
            trainer.store.put(f"{trainer.prefix}/{other}", b"x" * 100_000)
        if name == "config.json":
            _come(memory, "other.safetensors")

    trainer.wrote = put
    write(engines, trainer)
    assert [reader.read for reader in readers] == [trainer.written()] * 2


def test_weights_whose_commit_fails_are_taken_back_in_s3(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    engines, readers, trainer = scene
    old = engines.serving

    def refused(*_: Any) -> None:
        raise StoreError("the bucket is full")

    assert old is not None
    with monkeypatch.context() as patch, pytest.raises(StoreError, match="the bucket is full"):
        patch.setattr(S3Backend, "create", refused)
        write(engines, trainer)
    assert [reader.version for reader in readers] == [4, 4] and engines.serving == engines.written == old
    assert engines.inference().version == old.version and [reader.version for reader in readers] == [old.version] * 2


def test_a_store_on_this_machine_is_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "Fetching", None)
    with running(tmp_path) as (engines, loaders, author):
        done = engines.write_weights(author, 4)  # type: ignore[arg-type]
        assert loaders[0].holds == engines.run.store.uri(done.ref.path.removesuffix(".json"))
