"""Runs that an earlier version recorded: their keys come out again, and they are resumed, forked, replayed, audited."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from recorded_runs import recipes, unpack
from replays import kept, replay
from stage_driver import digests, drive, store_in

from areal_tasks.engines.session import Engines
from areal_tasks.stages.loop import Loop
from areal_tasks.store.fork import Origin, parent_values
from areal_tasks.store.history import diff
from areal_tasks.store.history.audit import audit
from areal_tasks.store.history.diff import diff_runs
from areal_tasks.store.keys import semantic_values
from areal_tasks.store.opening import read_stored_run
from areal_tasks.store.query import run_sql
from areal_tasks.store.runs import Run, load_run
from schemas.recipe.fields import is_semantic, leaves
from schemas.recipe.load import parse_recipe
from schemas.recipe.recipe import Recipe

#: The runs, and the stages of each that this version asks for otherwise than the version that recorded it.
CHANGED: dict[str, set[str]] = {
    "grpo": set(),
    "kl": {"advantage", "train", "publish", "scalars"},  # KL in the reward: of proximal logprobs, and measured by train
    "sft": {"batch", "train", "publish"},  # answers are encoded as they continue prompts: here, to the same tokens
}
NAMES = tuple(CHANGED)
#: The stages that use the runs' own verifier. Which code made their results is not known: they are made again.
BY_UNKNOWN_CODE = ("verify", "evaluate")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recorded runs. Not to be altered."""
    folder = tmp_path_factory.mktemp("recorded")
    unpack(folder)
    return folder


@pytest.fixture(scope="module")
def resumed(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recorded runs, each brought to its end by this version."""
    folder = tmp_path_factory.mktemp("resumed")
    shutil.copytree(unpacked / "store", folder / "store")
    for name, recipe in recipes().items():
        drive(folder, name, recipe)
    return folder


def today(folder: Path, name: str) -> Recipe:
    return read_stored_run(store_in(folder), name).recipe_to_continue(recipes()[name])[0]


def standing(folder: Path, name: str) -> dict[str, str]:
    """The keys of what this version finds of the next iteration, by stage."""
    run, recipe = load_run(store_in(folder), name), today(folder, name)
    with Engines(run, recipe, folder / "logs") as engines:
        engines.code = {}  # as then: keys had no digests of users' code
        return {stage: built.manifest.key for stage, built in Loop(run, recipe, engines).standing()[1].items()}


def recorded(folder: Path, name: str, iteration: int) -> dict[str, str]:
    """The keys that were recorded for an iteration, by stage."""
    found = (folder / "store" / name / f"iteration={iteration:06d}").glob("stage=*/*.json")
    return {path.parent.name.removeprefix("stage="): path.stem for path in found}


def unchanged(keys: dict[str, str], name: str) -> dict[str, str]:
    return {stage: key for stage, key in keys.items() if stage not in CHANGED[name]}


@pytest.mark.parametrize("name", NAMES)
def test_the_keys_of_an_interrupted_iteration_come_out_again(unpacked: Path, name: str) -> None:
    once = {stage: key for stage, key in recorded(unpacked, name, 0).items() if stage in ("initialise", "prompts")}
    assert standing(unpacked, name) == unchanged(once | recorded(unpacked, name, 1), name)


@pytest.mark.parametrize("name", NAMES)
def test_the_keys_of_a_whole_iteration_come_out_again(unpacked: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(unpacked / "store", tmp_path / "store")
    (tmp_path / "store" / name / "iteration=000000" / "commit.json").unlink()
    assert standing(tmp_path, name) == unchanged(recorded(tmp_path, name, 0), name)


def test_what_is_kept_of_a_run_that_divides_by_the_populations_deviation(unpacked: Path) -> None:
    recipe, kept_values = read_stored_run(store_in(unpacked), "grpo").recipe_to_continue(recipes()["grpo"])
    former = {"algorithm.std_unbiased": False, "algorithm.max_log_ratio": 0.0}
    assert kept_values.items() >= former.items()
    assert semantic_values(recipe).items() >= former.items() and recipe != recipes()["grpo"]


@pytest.mark.parametrize("name", NAMES)
def test_it_is_resumed_with_the_values_it_was_begun_with(resumed: Path, unpacked: Path, name: str) -> None:
    store, before = store_in(resumed), load_run(store_in(unpacked), name)
    run = load_run(store, name)
    assert run.head().iteration == 2 and len(run.segments) == 1  # type: ignore[union-attr]
    assert run.recipe_at(2) == before.recipe_at(2)
    made = {ref.key for ref in run.commit(1).stages}
    open_then = unchanged(recorded(unpacked, name, 1), name)
    assert {stage for stage, key in open_then.items() if key not in made} == open_then.keys() & set(BY_UNKNOWN_CODE)
    assert run.commit(1).state["replayed"]["difference"] < 1e-3, "trained again as it was trained then, to rounding"
    assert audit(store, name).defects == ()


@pytest.mark.parametrize("name", NAMES)
def test_it_is_forked_with_the_values_it_was_begun_with(resumed: Path, name: str) -> None:
    """Nothing is changed, so that the child is its parent, iteration by iteration."""
    parent = load_run(store_in(resumed), name)
    recipe = parse_recipe(parent_values(parent, 2), name)
    child = drive(resumed, f"{name}-fork", recipe, origin=Origin(name, 2))
    assert digests(resumed, child.name) == digests(resumed, name)
    assert audit(store_in(resumed), child.name).defects == ()


def built(run: Run) -> set[str]:
    """The stages that a run has made itself."""
    head = run.head()
    assert head is not None
    refs = [ref for k in range(head.iteration + 1) for ref in run.commit(k).stages]
    return {ref.stage for ref in refs if ref.path.startswith(f"{run.name}/")}


@pytest.mark.parametrize("start", ["verify", "advantage"])
def test_it_is_replayed_as_it_was_made(unpacked: Path, tmp_path: Path, start: str) -> None:
    """Nothing is changed, so that only the first stage is built, with the recorded result."""
    shutil.copytree(unpacked / "store", tmp_path / "store")
    child = replay(tmp_path, "again", kept(start, "grpo"))
    assert built(child) == {start}
    assert digests(tmp_path, "again") == digests(tmp_path, "grpo")
    assert diff_runs(store_in(tmp_path), "grpo", "again").same


def test_a_replay_asks_for_the_proximal_logprobs_that_were_not_recorded(unpacked: Path, tmp_path: Path) -> None:
    shutil.copytree(unpacked / "store", tmp_path / "store")
    assert built(replay(tmp_path, "again", kept("verify", "kl"))) == {"verify", "proximal", *CHANGED["kl"]}


def test_a_resumed_run_measures_its_kl_from_then_on(resumed: Path) -> None:
    query = "SELECT iteration, avg(kl) AS kl FROM train_steps GROUP BY 1 ORDER BY 1"
    first, *later = [row["kl"] for row in run_sql(store_in(resumed), "kl", query).to_pylist()]
    assert first == 0 and len(later) == 2 and all(kl > 0 for kl in later)


def test_a_replay_that_trains_nothing_takes_the_recorded_proximal_logprobs(resumed: Path) -> None:
    child = replay(resumed, "again", kept("advantage", "kl", until="advantage"))
    refs = [ref for k in range(3) for ref in child.commit(k).stages if ref.stage == "proximal"]
    assert [ref.path.split("/")[0] for ref in refs] == ["again", "kl", "kl"]


@pytest.mark.parametrize("name", NAMES)
def test_every_semantic_field_has_a_value_in_a_recorded_recipe(unpacked: Path, name: str) -> None:
    """A field that was added later says what was computed before it existed (`before`)."""
    values = dict(diff.leaves(load_run(store_in(unpacked), name).recipe_at(0)))
    assert {path for path, _, info in leaves(recipes()[name]) if is_semantic(info)} <= values.keys()
