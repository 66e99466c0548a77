"""No temporary folder outlives those who use it for longer than until the next start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_tasks.temporary import LOCK, OwnedFolder, sweep

#: Makes a folder, lets a child that outlives it have it if told so, says who has it, and waits to be killed.
OWNER = """
import os, subprocess, sys
from areal_tasks.temporary import OwnedFolder
folder = OwnedFolder("trainer")
open(os.path.join(folder.name, "weights"), "w").close()
child = None
if "shared" in sys.argv:
    child = subprocess.Popen(["sleep", "600"], pass_fds=[folder.lock], stdout=subprocess.DEVNULL)
print(child.pid if child else 0, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary files are, for this process and those that it starts."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yield tmp_path


def owner(*how: str) -> tuple[subprocess.Popen[str], int]:
    """A process that has a folder, and its child."""
    command = [sys.executable, "-c", OWNER, *how]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_the_folder_of_a_killed_process_is_removed_and_that_of_a_living_one_is_not(place: Path) -> None:
    killed, living = owner()[0], owner()[0]
    kill(killed)
    assert len(list(place.iterdir())) == 2
    folder = OwnedFolder("flow")
    assert len(list(place.glob("arealflow-trainer-*/weights"))) == 1, "of the living"
    kill(living)
    sweep()
    assert list(place.iterdir()) == [Path(folder.name)]
    folder.cleanup()
    assert list(place.iterdir()) == []


def test_a_service_keeps_its_folder_when_the_process_that_made_it_is_killed(place: Path) -> None:
    process, child = owner("shared")
    kill(process)
    try:
        sweep()
        assert len(list(place.iterdir())) == 1
    finally:
        os.kill(child, signal.SIGKILL)


def test_what_is_not_such_a_folder_stays(place: Path) -> None:
    (place / "arealflow-mine").mkdir()
    (place / "other").mkdir()
    (place / "other" / LOCK).touch()
    (place / "arealflow-file").touch()
    sweep()
    assert sorted(path.name for path in place.iterdir()) == ["arealflow-file", "arealflow-mine", "other"]


def test_a_folder_that_is_swept_before_it_is_locked_is_made_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, made = os.open, []

    def open_and_lose(path: Path, *how: int, **more: Any) -> int:
        found = opened(path, *how, **more)
        if not made:
            made.append(path)
            sweep()
        return found

    monkeypatch.setattr(os, "open", open_and_lose)
    with OwnedFolder("flow") as folder:
        assert Path(folder, LOCK).exists() and made[0].parent != Path(folder)
        assert [path.name for path in place.iterdir()] == [Path(folder).name]
