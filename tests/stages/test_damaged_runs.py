"""A run whose files are damaged, or whose disk is full, goes on to the same end, or says which file it is."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from small_disk import small_disk
from stage_driver import Digests, digests, drive, finished, store_in, tiny

from areal_tasks.store.runs import load_run
from schemas.errors import UserError

Damage = Callable[[bytes], bytes]
FIRST = 2  # iterations of the run that is damaged


def flipped(data: bytes) -> bytes:
    at = random.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << random.randrange(8))]) + data[at + 1 :]


DAMAGES: tuple[Damage, ...] = (lambda data: data[: len(data) // 2], lambda data: b"", flipped)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose store holds the first iterations of the run `r`."""
    folder = tmp_path_factory.mktemp("begun")
    finished(folder, "r", tiny(schedule={"iterations": FIRST}))
    return folder


@pytest.fixture(scope="module")
def expected(begun: Path, tmp_path_factory: pytest.TempPathFactory) -> Digests:
    folder = copied(begun, tmp_path_factory.mktemp("whole"))
    drive(folder, "r", tiny())
    return digests(folder, "r")


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder / "store", to / "store", dirs_exist_ok=True)
    return to


#: What a new start needs, and what it does without. `*` stands for keys and attempts.
NEEDED = [
    *("run.json", "segments/0.json", "iteration=000001/commit.json"),
    *("iteration=000000/stage=prompts/*.json", "iteration=000000/stage=initialise/attempt=*/*.parquet"),
    *("iteration=000001/stage=rollout/attempt=*/*.parquet", "iteration=000001/stage=advantage/*.json"),
    *("iteration=000001/stage=train/attempt=*/train_samples-00000.parquet", "iteration=000000/commit.json"),
    *("weights/version=000000/attempt=*/model.safetensors", "weights/version=000002/attempt=*/model.safetensors"),
    "weights/version=000002/attempt=*.json",
]
GONE = random.sample(NEEDED, 4)
DISPENSABLE = [
    *("iteration=000000/stage=verify/attempt=*/*.parquet", "weights/version=000001/attempt=*/model.safetensors"),
    *("services/owner=1/trainer-0.json", "iteration=000000/stage=evaluate/*.json"),
]


@pytest.mark.parametrize("pattern", NEEDED)
def test_a_damaged_file_that_is_needed_is_named(begun: Path, tmp_path: Path, pattern: str) -> None:
    folder = copied(begun, tmp_path)
    victim = next((folder / "store" / "r").glob(pattern))
    victim.write_bytes(random.choice(DAMAGES)(victim.read_bytes()))
    with pytest.raises(UserError) as error:
        drive(folder, "r", tiny())
    assert str(victim) in str(error.value), error.value
    assert committed(folder) == FIRST


@pytest.mark.parametrize("which", range(4))
def test_a_needed_file_that_is_gone_is_named(begun: Path, tmp_path: Path, which: int) -> None:
    folder = copied(begun, tmp_path)
    victim = next((folder / "store" / "r").glob(GONE[which]))
    victim.unlink()
    if victim.name == "commit.json" and victim.parent.name == "iteration=000001":
        drive(folder, "r", tiny())  # the last commit is what makes an iteration: without it, it is made again
        return
    with pytest.raises(UserError) as error:
        drive(folder, "r", tiny())
    assert str(victim) in str(error.value), error.value


def test_a_damaged_file_that_is_not_needed_changes_nothing(begun: Path, tmp_path: Path, expected: Digests) -> None:
    folder = copied(begun, tmp_path)
    for pattern in DISPENSABLE:
        victim = next((folder / "store" / "r").glob(pattern))
        victim.write_bytes(random.choice(DAMAGES)(victim.read_bytes()))
    drive(folder, "r", tiny())
    assert digests(folder, "r") == expected


def committed(folder: Path) -> int:
    """Iterations that lie there, whether they can be read or not."""
    return len(list((folder / "store" / "r").glob("iteration=*/commit.json")))


# ── a disk that is full ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system for a store."""
    with small_disk(tmp_path / "store", 4 << 20) as place:
        yield place


@pytest.mark.parametrize("often", [False, True], ids=["weights", "checkpoints"])
def test_a_run_whose_disk_fills_up_goes_on_once_there_is_room(tmp_path: Path, disk: Path, often: bool) -> None:
    recipe = tiny(trainer={"recover_within_seconds": 1e-6 if often else 3600.0})
    other = tmp_path / "other"
    drive(other, "r", recipe)
    drive(tmp_path, "r", tiny(schedule={"iterations": 1}, trainer=recipe.trainer.model_dump()))  # type: ignore[union-attr]
    free = shutil.disk_usage(disk).free
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(free - random.randrange(4096, 65536)))
    with pytest.raises(UserError, match=rf"{tmp_path}/store/r/\S+ cannot be used: the disk is full: free some space"):
        drive(tmp_path, "r", recipe)
    ballast.unlink()
    drive(tmp_path, "r", recipe)
    head = load_run(store_in(tmp_path), "r").head()
    assert head is not None and head.iteration == 2
    assert digests(tmp_path, "r")[2] == digests(other, "r")[2]
