"""Weights and checkpoints that are written while the run goes on: the same bits, found by later commits, never lost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stage_driver import digests, drive, start_driver, store_in, tiny_sft

from areal_tasks.engines.session import Engines
from areal_tasks.store.audit import audit
from areal_tasks.store.files import read_weights
from areal_tasks.store.runs import Run, load_run
from areal_tasks.store.weights import find_weights, list_weights
from schemas.recipe.recipe import Recipe

OFTEN = {"recover_within_seconds": 1e-6}


def recipe(iterations: int = 6, **trainer: Any) -> Recipe:
    return tiny_sft(trainer={**OFTEN, **trainer}, schedule={"iterations": iterations})


def stored(run: Run) -> dict[int, str]:
    """The content digest of every version that the store has."""
    refs = [find_weights(run, str(v.version)) for v in list_weights(run) if v.state == "written"]
    return {ref.version: read_weights(run.store, ref).digest for ref in refs}


def tables(folder: Path, name: str) -> list[list[tuple[str, str]]]:
    return [[pair for pair in iteration if pair[0] in ("batch", "train")] for iteration in digests(folder, name)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    drive(folder, "whole", recipe())
    return folder


@pytest.fixture(scope="module")
def waited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The same run, where every version is waited for."""
    folder = tmp_path_factory.mktemp("waited")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engines, "store_follows", property(lambda engines: False))
        drive(folder, "waited", recipe())
    yield folder


def test_what_is_written_meanwhile_has_the_bits_of_what_is_waited_for(whole: Path, waited: Path) -> None:
    one, other = load_run(store_in(whole), "whole"), load_run(store_in(waited), "waited")
    assert tables(whole, "whole") == tables(waited, "waited")
    assert stored(one) == stored(other) and list(stored(one)) == list(range(7))


def test_a_version_is_named_by_a_later_commit_and_the_last_is_waited_for(whole: Path) -> None:
    run = load_run(store_in(whole), "whole")
    commits = [run.commit(k) for k in range(6)]
    assert [c.weights.written for c in commits] == [False] * 5 + [True]
    assert [ref.version for c in commits for ref in c.stored] == [1, 2, 3, 4, 5]
    assert all(ref.version <= c.iteration + 1 for c in commits for ref in c.stored)
    assert [c.schema_version for c in commits] == [3 if c.stored else 2 for c in commits]
    checkpoints = [c.checkpoint.version if c.checkpoint else 0 for c in commits]
    assert checkpoints == sorted(checkpoints) and checkpoints[-1] == 6 and checkpoints[0] == 0
    assert audit(run.store, "whole").sound


@pytest.mark.parametrize("attempt", range(2))
def test_killed_at_random_writes_it_ends_with_the_same_bits(tmp_path: Path, whole: Path, attempt: int) -> None:
    instants: list[int] = []
    for _ in range(3):
        instants.append(random.randint(3, 60))
        process = start_driver(tmp_path, "r", recipe(), instants[-1])
        process.join(60)
        if process.exitcode == 0:
            break
    run = drive(tmp_path, "r", recipe())
    assert digests(tmp_path, "r") == digests(whole, "whole"), f"killed at the writes {instants}"
    mine, theirs = stored(run), stored(load_run(store_in(whole), "whole"))
    assert mine.items() <= theirs.items() and {0, 6} <= mine.keys(), f"killed at the writes {instants}"
    assert audit(run.store, "r").sound
    print(instants, sorted(mine))
