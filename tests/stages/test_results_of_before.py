"""With η = 0 a run's results are bitwise those of the last commit before runs could be asynchronous."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from stage_driver import store_in, tiny
from waiting import LIMIT

from areal_tasks.store.query import run_sql
from schemas.tables import LATER, VOLATILE

ROOT: Final = Path(__file__).parents[2]
BEFORE: Final = "baeebd5d25b073709f83efb6971752d9eafd5cef"
#: Fields that have been added since, with the values that stand for how it was before.
ADDED: Final = {"std_unbiased": False, "max_log_ratio": 0.0}
TABLES: Final = ("rollout", "verify", "advantage", "train_samples", "train_steps", "evaluations")
#: Columns that have been added since, and those that no two runs have alike.
IGNORED: Final = {*LATER, *VOLATILE, "clamped"}
ITERATIONS: Final = 3
#: `drive` of the code in PYTHONPATH, whose name and arguments have stayed the same.
PROGRAM: Final = """
import json, sys
from pathlib import Path
from stage_driver import drive
from schemas.recipe.load import parse_recipe
drive(Path(sys.argv[1]), "run", parse_recipe(json.loads(sys.argv[2])))
"""
#: The quickstart's recipe, with a smaller model that has learned nothing yet, and a reward that such a model gets.
QUICKSTART: Final[dict[str, Any]] = {
    "name": "quickstart", "flow": "rlhf",
    "model": {"scratch": {"layers": 2, "hidden": 64, "heads": 4, "intermediate": 128}, "max_length": 16},
    "data": {"source": "sums://4"},
    "rollout": {"groups": 32, "group_size": 8, "max_new_tokens": 4},
    "reward": {"verifier": "stage_reward:digits"},
    "algorithm": {"minibatches": 4},
    "trainer": {
        "lr": 2e-4, "lr_schedule": "linear", "lr_final": 0.1, "beta2": 0.95, "micro_batch_tokens": 4096, "threads": 1,
    },
    "inference": {"slots": 256, "groups_per_request": 32, "threads": 1},
    "evaluation": {"every": 2, "limit": 8, "max_new_tokens": 4},
    "schedule": {"iterations": ITERATIONS},
    "launcher": {"type": "inline"},
}  # fmt: skip


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The code of that commit."""
    archive = subprocess.run(
        ["git", "-C", ROOT, "archive", BEFORE, "areal_tasks", "schemas", "tests"], capture_output=True, timeout=LIMIT
    )
    if archive.returncode:
        pytest.skip(f"git has no commit {BEFORE} here: {archive.stderr.decode().strip()}")
    folder = tmp_path_factory.mktemp("before")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


def run_with(code: Path, folder: Path, recipe: Mapping[str, Any]) -> Path:
    """A run by that code, in a process of its own that has imported nothing else. Returns the run's folder."""
    folder.mkdir()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(code), str(code / "tests")])}
    program = [sys.executable, "-c", PROGRAM, str(folder), json.dumps(recipe)]
    done = subprocess.run(program, env=environment, cwd=folder, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return folder


def columns(folder: Path) -> Iterator[tuple[str, str]]:
    """(table.column, its values) of a run; as text, in which NaN is NaN and no digit is lost."""
    for table in TABLES:
        found = run_sql(store_in(folder), "run", f"SELECT * FROM {table} ORDER BY ALL")
        assert len(found)
        yield from (
            (f"{table}.{name}", repr(found[name].to_pylist())) for name in found.column_names if name not in IGNORED
        )


def weights(folder: Path) -> dict[str, str]:
    """The SHA-256 of the weights of each version."""
    files = (folder / "store" / "run" / "weights").glob("version=*/attempt=*/*.safetensors")
    return {path.parts[-3]: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def in_a_loss() -> dict[str, Any]:
    """The tests' smallest recipe, whose loss has a KL term; as that commit reads it."""
    values = tiny(schedule={"iterations": ITERATIONS}).model_dump(mode="json", exclude_unset=True)
    return {**values, "name": "tiny", "flow": "rlhf"}


@pytest.mark.slow("two runs each, by processes that import everything afresh")
@pytest.mark.parametrize("recipe", [QUICKSTART, in_a_loss()], ids=["quickstart", "kl"])
def test_a_synchronous_run_gives_what_it_gave_before(before: Path, tmp_path: Path, recipe: dict[str, Any]) -> None:
    then = run_with(before, tmp_path / "then", recipe)
    now = run_with(ROOT, tmp_path / "now", {**recipe, "algorithm": {**recipe["algorithm"], **ADDED}})
    assert len(weights(then)) == ITERATIONS + 1 and weights(now) == weights(then)
    found = dict(columns(now))
    assert [name for name, values in columns(then) if found[name] != values] == []
