"""Asynchronous runs of an earlier version, with recipe fields that have other names now."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from recorded_runs import recipes_ahead, unpack
from replays import kept, replay
from stage_driver import drive, store_in, tiny
from test_recorded_runs import BY_UNKNOWN_CODE, built, recorded

from areal_tasks.engines.session import Engines
from areal_tasks.stages.generation import groups_of
from areal_tasks.stages.loop import Loop
from areal_tasks.store import spool as records
from areal_tasks.store.fork import Origin, parent_values
from areal_tasks.store.history.audit import audit
from areal_tasks.store.keys import recipe_values
from areal_tasks.store.opening import read_stored_run
from areal_tasks.store.query import run_sql
from areal_tasks.store.runs import Run, load_run
from schemas.errors import UserError
from schemas.recipe.fields import former_name, leaves
from schemas.recipe.load import parse_recipe

NAMES = ("cap", "mask")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recorded runs. Not to be altered."""
    folder = tmp_path_factory.mktemp("recorded")
    unpack(folder, "ahead")
    return folder


@pytest.fixture(scope="module")
def resumed(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recorded runs, each brought to its end by this version."""
    folder = tmp_path_factory.mktemp("resumed")
    shutil.copytree(unpacked / "store", folder / "store")
    for name, recipe in recipes_ahead().items():
        drive(folder, name, recipe)
    return folder


def groups(run: Run, k: int) -> list[int]:
    [rollout] = [ref for ref in run.commit(k).stages if ref.stage == "rollout"]
    return groups_of(run.store, run.read_stage(rollout))


@pytest.mark.parametrize("name", NAMES)
def test_its_keys_come_out_again(unpacked: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(unpacked / "store", tmp_path / "store")
    (tmp_path / "store" / name / "iteration=000000" / "commit.json").unlink()
    recipe, kept_values = read_stored_run(store_in(tmp_path), name).recipe_to_continue(recipes_ahead()[name])
    with Engines(run := load_run(store_in(tmp_path), name), recipe, tmp_path / "logs") as engines:
        engines.code = {}  # as then: keys had no digests of users' code
        keys = {stage: built.manifest.key for stage, built in Loop(run, recipe, engines).standing()[1].items()}
    assert keys == recorded(tmp_path, name, 0) and "train" in keys and not kept_values


@pytest.mark.parametrize("name", NAMES)
def test_it_is_resumed_with_what_waits_in_its_spool_and_audited(resumed: Path, unpacked: Path, name: str) -> None:
    store = store_in(resumed)
    run, waiting = load_run(store, name), {g.index for r in records.read_start(store, name, 0) for g in r.finished}
    assert len(run.segments) == 1 and set(groups(run, 2)) <= waiting, "no group is generated again"
    made = {ref.key for ref in run.commit(1).stages}
    assert {stage for stage, key in recorded(unpacked, name, 1).items() if key not in made} <= set(BY_UNKNOWN_CODE)
    assert run.commit(2).state["next_group"] == 6
    assert audit(store, name).defects == ()


@pytest.mark.parametrize("name", NAMES)
def test_it_is_forked(resumed: Path, name: str) -> None:
    parent = load_run(store_in(resumed), name)
    recipe = parse_recipe(parent_values(parent, 1), name)
    child = drive(resumed, f"{name}-fork", recipe, origin=Origin(name, 1))
    assert child.commit(2).state["next_group"] == 6 and audit(store_in(resumed), child.name).defects == ()
    changed = parse_recipe(parent_values(parent, 1) | {"algorithm": {"tis_cap": 4.0, "max_logprob_gap": 9.0}}, name)
    drive(resumed, f"{name}-changed", changed, origin=Origin(name, 1))
    assert audit(store_in(resumed), f"{name}-changed").defects == ()


@pytest.mark.parametrize("name", NAMES)
def test_it_is_replayed_as_it_was_made(unpacked: Path, tmp_path: Path, name: str) -> None:
    """What it trained is found by its keys."""
    shutil.copytree(unpacked / "store", tmp_path / "store")
    assert built(replay(tmp_path, "again", kept("advantage", name))) == {"advantage", "publish"}


def test_its_tables_and_its_recipe_are_read_under_todays_names(resumed: Path) -> None:
    store = store_in(resumed)
    query = (
        "SELECT recipe->'algorithm'->>'tis_cap' AS cap, recipe->'algorithm'->>'behaviour_cap' AS former FROM segments"
    )
    assert run_sql(store, "cap", query).to_pylist() == [{"cap": "3.0", "former": None}]
    steps = "SELECT count(*) AS n, count(logprob_gap_mean) AS measured FROM train_steps"
    [counts] = run_sql(store, "cap", steps).to_pylist()
    assert (counts["n"], counts["measured"]) == (6, 0)  # of few tokens of the trainer's own version: not measured
    shares = run_sql(store, "mask", "SELECT metrics['behaviour_clipped'] AS clipped FROM stages WHERE stage = 'train'")
    assert len([share for share in shares["clipped"].to_pylist() if share is not None]) == 3


def test_a_field_has_one_of_its_names_and_keys_have_the_former_one() -> None:
    recipe = recipes_ahead()["cap"]
    renamed = {path: former_name(info) for path, _, info in leaves(recipe) if former_name(info)}
    assert len(renamed) == 5 and "algorithm.tis_cap" in renamed
    values = recipe_values(recipe, ["algorithm"])
    assert values["algorithm.behaviour_cap"] == 3.0 and not values.keys() & renamed.keys()
    with pytest.raises(UserError, match=r"algorithm: behaviour_cap is the former name of tis_cap; give one of them"):
        tiny(algorithm={"behaviour_cap": 3.0, "tis_cap": 3.0})
