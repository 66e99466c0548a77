"""Weights and checkpoints that the trainer writes beside its other work: the bits of then, one at a time, no loss."""

from __future__ import annotations

import errno
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from trainer_builders import World, demonstrations

from areal_tasks.engines.trainer import writer
from areal_tasks.engines.trainer.commands import Load, Settle, Settled, Train, Write
from areal_tasks.engines.trainer.drafts import CheckpointDraft, WeightsDraft
from areal_tasks.engines.trainer.memory import host_room
from areal_tasks.engines.trainer.service import Trainer
from areal_tasks.store.backend import StoreError, Unavailable
from areal_tasks.store.local import LocalBackend
from schemas.manifest import FileRef

KINDS = ["weights", "checkpoint"]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The store takes no file of weights or checkpoints until this is set."""
    opened, put = threading.Event(), LocalBackend.put_file

    def slow(self: LocalBackend, path: str, source: Path) -> None:
        opened.wait(30)
        put(self, path, source)

    monkeypatch.setattr(LocalBackend, "put_file", slow)
    yield opened
    opened.set()


def train(world: World, trainer: Trainer) -> None:
    version = trainer.fence.version or 0
    command: Train = world.train_command(version, {"batch": demonstrations([9, 4, 13, 6], 2, seed=version)})
    trainer.train(command)


def write(world: World, trainer: Trainer, kind: str, attempt: str, beside: bool = True) -> tuple[FileRef, ...]:
    version = trainer.fence.version or 0
    ask: Callable[[Write], object] = trainer.publish if kind == "weights" else trainer.checkpoint
    answer = ask(Write(owner=1, version=version, prefix=world.folder(kind, version, attempt), beside=beside))
    return getattr(answer, "files")  # noqa: B009


def settle(world: World, trainer: Trainer, kind: str, version: int, attempt: str, wait: bool = True) -> Settled:
    prefix = world.folder(kind, version, attempt)
    return trainer.settle(Settle(owner=1, version=version, prefix=prefix, wait=wait))


def bytes_of(files: tuple[FileRef, ...]) -> list[tuple[str, str]]:
    """Names and digests; DCP's index names its folder and its save, which differ."""
    return sorted((Path(f.path).name, f.sha256) for f in files if not f.path.endswith(".metadata"))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_what_was_held_when_it_was_asked_for(world: World, gate: threading.Event, kind: str) -> None:
    trainer = world.trainer()
    train(world, trainer)
    assert write(world, trainer, kind, "beside") == ()
    train(world, trainer)  # the store has not taken a byte yet
    assert settle(world, trainer, kind, 1, "beside", wait=False) == Settled(busy=True)
    gate.set()
    done = settle(world, trainer, kind, 1, "beside")
    assert settle(world, trainer, kind, 1, "beside") == done, "the answer may have been lost"
    again = world.trainer()
    train(world, again)
    assert bytes_of(done.files) == bytes_of(write(world, again, kind, "waited", beside=False)) and done.files
    assert all(file.sha256 and Path(world.store.uri(file.path)).stat().st_size == file.bytes for file in done.files)


def test_training_goes_on_from_a_checkpoint_that_was_written_meanwhile(world: World) -> None:
    trainer = world.trainer()
    train(world, trainer)
    write(world, trainer, "checkpoint", "beside")
    train(world, trainer)
    expected = bytes_of(write(world, trainer, "weights", "two", beside=False))
    checkpoint = settle(world, trainer, "checkpoint", 1, "beside")
    assert checkpoint == Settled(), "what is written next forgets it"
    write(world, trainer, "checkpoint", "again")
    train(world, trainer)
    files = settle(world, trainer, "checkpoint", 2, "again").files
    ref = world.commit("checkpoint", 2, "again", files)
    restored = world.trainer()
    restored.load(Load(owner=1, version=2, weights=world.initial, checkpoint=ref))
    assert bytes_of(write(world, restored, "weights", "restored", beside=False)) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scarce", ["none left", "none given"])
def test_without_host_memory_for_a_copy_it_is_written_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, scarce: str
) -> None:
    trainer = world.trainer()
    train(world, trainer)
    waited = write(world, trainer, kind, "waited", beside=False)

    def refused(held: object) -> None:
        raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")

    with monkeypatch.context() as patch:
        if scarce == "none left":
            patch.setattr(writer, "host_room", lambda: 0)
        else:
            patch.setattr(WeightsDraft, "hold", refused)
            patch.setattr(CheckpointDraft, "hold", refused)
        written = write(world, trainer, kind, "beside")
    assert bytes_of(written) == bytes_of(waited) and trainer.writer.task is None
    assert "is written while the run waits" in caplog.text and "more memory" in caplog.text
    assert settle(world, trainer, kind, 1, "beside").files == written
    assert write(world, trainer, kind, "again") == ()


def test_the_room_is_that_of_the_machine_or_of_the_smallest_group_above(tmp_path: Path) -> None:
    inner, own = tmp_path / "groups/job/step", tmp_path / "own"
    inner.mkdir(parents=True)
    own.write_text("0::/job/step\n")
    machine = host_room(own, tmp_path / "groups")
    for folder, most in ((inner, "max"), (inner.parent, "5000000")):
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text("3000000\n")
        (folder / "memory.stat").write_text("anon 7\nactive_file 1000\ninactive_file 100\n")
    assert host_room(own, tmp_path / "groups") == 2001100 < machine
    assert host_room(tmp_path / "nowhere", tmp_path / "groups") > 2001100


def test_only_one_copy_is_held(world: World, gate: threading.Event) -> None:
    trainer = world.trainer()
    train(world, trainer)
    write(world, trainer, "checkpoint", "one")
    assert trainer.writer.task is not None
    first = weakref.ref(trainer.writer.task.draft)
    held: list[object] = []
    with ThreadPoolExecutor(1) as other:
        second = other.submit(write, world, trainer, "checkpoint", "two")
        time.sleep(0.2)
        assert not second.done() and trainer.writer.task is not None and trainer.writer.task.draft is first()
        gate.set()
        second.result()
    held.append(settle(world, trainer, "checkpoint", 1, "two"))
    gc.collect()
    assert first() is None and trainer.writer.task is None


@pytest.mark.parametrize(
    ("error", "kind"),
    [(OSError(errno.ENOSPC, "full"), StoreError), (Unavailable("the store is away"), Unavailable)],
    ids=["disk full", "store away"],
)
def test_a_write_that_fails_is_told_and_made_again(
    world: World, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[StoreError]
) -> None:
    trainer, put, failures = world.trainer(), LocalBackend.put_file, [error]

    def fail_once(self: LocalBackend, path: str, source: Path) -> None:
        if failures:
            raise failures.pop()
        put(self, path, source)

    train(world, trainer)
    monkeypatch.setattr(LocalBackend, "put_file", fail_once)
    write(world, trainer, "weights", "beside")
    train(world, trainer)
    with pytest.raises(kind, match=r"disk is full|is away") as caught:
        settle(world, trainer, "weights", 1, "beside")
    assert type(caught.value) is kind
    files = settle(world, trainer, "weights", 1, "beside").files
    again = world.trainer()
    train(world, again)
    assert bytes_of(files) == bytes_of(write(world, again, "weights", "waited", beside=False))


def test_a_failure_that_nobody_has_asked_for_is_told_to_the_next(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = world.trainer()
    train(world, trainer)
    with monkeypatch.context() as patch:

        def full(self: LocalBackend, path: str, source: Path) -> None:
            raise OSError(errno.ENOSPC, "full", path)

        patch.setattr(LocalBackend, "put_file", full)
        write(world, trainer, "weights", "one")
        with pytest.raises(StoreError, match="disk is full"):
            write(world, trainer, "weights", "two")
    assert write(world, trainer, "weights", "three", beside=False)


def test_a_mistake_is_told_once_and_the_trainer_goes_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = world.trainer()
    train(world, trainer)
    with monkeypatch.context() as patch:
        patch.setattr(LocalBackend, "put_file", lambda *given: 1 // 0)
        write(world, trainer, "weights", "one")
        with pytest.raises(ZeroDivisionError):
            settle(world, trainer, "weights", 1, "one")
    assert settle(world, trainer, "weights", 1, "one") == Settled()
    assert write(world, trainer, "weights", "two", beside=False)
