"""Recorded recipes: what they lack is what was computed then, and a resumed run keeps what it was begun with."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from areal_tasks.store.backend import Store
from areal_tasks.store.keys import recipe_values, semantic_values
from areal_tasks.store.opening import open_run, read_stored_run
from areal_tasks.store.runs import load_run
from schemas.errors import UserError
from schemas.recipe import load
from schemas.recipe.fields import Section, section, semantic
from schemas.recipe.load import load_recipe
from schemas.recipe.recipe import RlhfRecipe
from schemas.recipe.recorded import keep_recorded, read_recorded
from schemas.recipe.reference import _row
from schemas.recipe.sections import Rollout, ScratchModel
from schemas.recipe.training import Grpo


class NewerGrpo(Grpo):
    """Later: two fields were added, and two defaults changed, one of them for the second time."""

    whitening: Literal["new", "old"] = semantic("new", before="old", description="Added.")
    bound: float = semantic(20.0, before=0.0, ge=0, description="Added.")
    clip_ratio: float = semantic(0.3, formerly=(0.2, 0.1), gt=0, lt=1, description="Changed.")


class Critic(Section):
    """Later: a section was added."""

    layers: int = semantic(2, before=0, description="Added.")
    heads: int = semantic(4, description="Has no effect without layers.")


class NewerRecipe(RlhfRecipe):
    algorithm: NewerGrpo = section(NewerGrpo, "GRPO.")
    critic: Critic = section(Critic, "Added.")


SIX = ["schedule.iterations=6"]
ADDED = {"algorithm.whitening": "old", "algorithm.bound": 0.0, "critic.layers": 0}


OLD = load_recipe("quickstart", SIX)


def recorded(*overrides: str) -> dict[str, Any]:
    """What the earlier program wrote."""
    return load.apply_overrides(OLD.model_dump(mode="json"), overrides)


@pytest.fixture
def begun(local_store: Store) -> Store:
    """A store with a run that the earlier program began."""
    open_run(local_store, "run", OLD)
    return local_store


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on the program is the later one."""
    monkeypatch.setitem(load.RECIPES, "rlhf", NewerRecipe)  # type: ignore[arg-type]


def now(*overrides: str) -> NewerRecipe:
    """The same file, read by the later program."""
    recipe = load_recipe("quickstart", [*SIX, *overrides])
    assert isinstance(recipe, NewerRecipe)
    return recipe


def test_a_recorded_recipe_lacks_nothing_that_was_added(newer: None) -> None:
    old = recorded()
    filled = read_recorded(old)
    assert (filled["algorithm"]["whitening"], filled["algorithm"]["bound"]) == ("old", 0.0)
    assert filled["critic"] == {"layers": 0}
    assert read_recorded(filled) == filled
    assert "whitening" not in old["algorithm"], "what is recorded is not altered"


@pytest.mark.parametrize("values", [{}, {"flow": "unknown", "x": 1}, {"flow": "rlhf", "algorithm": None}])
def test_whatever_is_recorded_can_be_read(newer: None, values: dict[str, Any]) -> None:
    assert read_recorded(values).items() >= values.items()


def test_an_absent_optional_section_stays_absent() -> None:
    assert read_recorded({"flow": "sft", "model": {"scratch": None}})["model"] == {"scratch": None}
    assert "model" not in read_recorded({"flow": "sft"})


def test_keys_of_what_was_recorded_stay(newer: None) -> None:
    """The added fields enter a key only where they say something else than what was computed before they existed."""
    before = recipe_values(OLD, ("algorithm",))
    kept, _ = keep_recorded(now(), recorded())
    assert recipe_values(kept, ("algorithm",)) == before
    assert recipe_values(now(), ("algorithm",)) == before | {
        "algorithm.whitening": "new",
        "algorithm.bound": 20.0,
        "algorithm.clip_ratio": 0.3,
    }
    assert recipe_values(kept, ("algorithm.bound",)) == {}, "a stage may read nothing but an added field"
    assert semantic_values(kept) == semantic_values(now()) | ADDED | {"algorithm.clip_ratio": 0.2}


def test_a_run_is_resumed_by_the_same_file(begun: Store, newer: None) -> None:
    recipe, kept = read_stored_run(begun, "run").recipe_to_continue(now())
    assert kept == ADDED | {"algorithm.clip_ratio": 0.2}
    run = open_run(begun, "run", recipe)
    assert len(run.segments) == 1 and run.recipe_at(0)["algorithm"]["whitening"] == "old"
    longer, _ = read_stored_run(begun, "run").recipe_to_continue(now("schedule.iterations=9"))
    assert open_run(begun, "run", longer).recipe_at(0) == longer.model_dump(mode="json")
    assert read_stored_run(begun, "run").recipe_to_continue(now("schedule.iterations=9"))[1] == kept, (
        "also by what it was recorded as now"
    )


def test_todays_defaults_alone_do_not_open_it(begun: Store, newer: None) -> None:
    """A caller that omits `continued` is refused: no run goes on with another recipe."""
    with pytest.raises(UserError, match=r"algorithm\.whitening is 'old' in the run and 'new' here"):
        read_stored_run(begun, "run").check(now())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.bound=5", "algorithm.bound is 0.0 in the run and 5.0 here"),
        ("algorithm.clip_ratio=0.25", "algorithm.clip_ratio is 0.2 in the run and 0.25 here"),
        ("algorithm.clip_ratio=0.1", "algorithm.clip_ratio is 0.2 in the run and 0.1 here"),
        ("rollout.groups=7", "rollout.groups is 32 in the run and 7 here"),
    ],
)
def test_a_value_other_than_the_default_is_refused(begun: Store, newer: None, override: str, message: str) -> None:
    recipe, _ = read_stored_run(begun, "run").recipe_to_continue(now(override))
    with pytest.raises(UserError, match=message):
        read_stored_run(begun, "run").check(recipe)


def test_a_value_that_was_never_a_default_is_not_kept(newer: None) -> None:
    """The run's own 0.15 was set by its recipe: that this one does not say it is a difference."""
    recipe, kept = keep_recorded(now(), recorded("algorithm.clip_ratio=0.15"))
    assert "algorithm.clip_ratio" not in kept and recipe.algorithm.clip_ratio == 0.3


def test_a_new_run_and_another_flow_take_the_recipe_as_it_is(local_store: Store, newer: None) -> None:
    assert read_stored_run(local_store, "run").recipe_to_continue(now()) == (now(), {})
    open_run(local_store, "other", load_recipe("quickstart-sft"))
    assert read_stored_run(local_store, "other").recipe_to_continue(now()) == (now(), {})


def test_a_former_default_is_no_setting_without_effect(newer: None) -> None:
    """`clip_ratio` has no effect with one minibatch: a recorded 0.2 is not refused there, another value is."""
    kept, _ = keep_recorded(now("algorithm.minibatches=1"), recorded())
    assert (kept.algorithm.minibatches, kept.algorithm.clip_ratio) == (1, 0.2)
    with pytest.raises(UserError, match=r"algorithm\.clip_ratio: has no effect"):
        now("algorithm.minibatches=1", "algorithm.clip_ratio=0.15")


def test_todays_program_records_every_field(local_store: Store) -> None:
    recipe = load_recipe("quickstart")
    open_run(local_store, "run", recipe)
    assert load_run(local_store, "run").segments[0].recipe == recipe.model_dump(mode="json")


def test_the_reference_says_what_older_runs_have() -> None:
    fields = NewerGrpo.model_fields
    assert _row("bound", fields["bound"]).endswith("| Added. In older runs: `0.0`. |")
    assert _row("clip_ratio", fields["clip_ratio"]).endswith("| Changed. In older runs: `0.2`, `0.1`. |")
    assert _row("layers", ScratchModel.model_fields["layers"]).endswith("| Transformer layers. |")
    assert "older" not in _row("groups", Rollout.model_fields["groups"])
