"""Folders in memory: what a killed process leaves goes, what a living one holds stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from areal_tasks.engines.handover import PREFIX, YOUNG_SECONDS, memory_folder

HOLDS = """
import sys, time
from pathlib import Path
from areal_tasks.engines.handover import memory_folder
with memory_folder(Path(sys.argv[1])) as folder:
    (folder / "weights").write_bytes(b"1")
    print(folder, flush=True)
    time.sleep(3600)
"""


def grow_old(folder: Path) -> None:
    long_ago = folder.stat().st_mtime - 2 * YOUNG_SECONDS
    os.utime(folder, (long_ago, long_ago))


def test_what_a_killed_process_left_goes_when_the_next_is_made_and_no_sooner(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        grow_old(left)
        with memory_folder(tmp_path):
            assert (left / "weights").exists()
        process.kill()
    with memory_folder(tmp_path) as mine:
        assert not left.exists() and mine.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_just_being_made_stays(tmp_path: Path) -> None:
    young = tmp_path / f"{PREFIX}young"
    young.mkdir()
    with memory_folder(tmp_path):
        assert young.exists()
    grow_old(young)
    with memory_folder(tmp_path):
        assert not young.exists()


def test_what_is_no_such_folder_is_left_alone(tmp_path: Path) -> None:
    file, other = tmp_path / f"{PREFIX}file", tmp_path / "other"
    file.write_text("")
    other.mkdir()
    grow_old(file)
    grow_old(other)
    with memory_folder(tmp_path) as mine:
        (mine / "weights").write_text("")
    assert file.exists() and other.exists() and not mine.exists()
