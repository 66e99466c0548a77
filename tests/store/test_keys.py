"""Keys: a changed recipe never receives another key's data, and an operational change costs nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_builders import commit_stage, manifest, recipe, table

from areal_tasks.store.backend import Store
from areal_tasks.store.keys import combine_digests, recipe_values, semantic_values, stage_key
from areal_tasks.store.opening import open_run
from schemas.recipe.load import load_recipe

FIELDS = ("model", "rollout", "reward.verifier")


def key(*overrides: str) -> str:
    return stage_key("rollout", 1, recipe_values(recipe(*overrides), FIELDS), ["aa", "bb"], 1, previous="cc")


def test_a_changed_recipe_never_gets_another_keys_data(store: Store) -> None:
    run = open_run(store, "run", recipe())
    made = manifest(store, "run", 0, "rollout", {"rollout": table("rollout")}, key())
    commit_stage(store, made)
    found = run.find_stage(0, "rollout", key())
    assert found is not None and found.manifest == made
    for override in ("rollout.temperature=0.9", "model.max_length=17", "rollout.groups=16", "rollout.stop=['=']"):
        assert run.find_stage(0, "rollout", key(override)) is None
    assert run.find_stage(1, "rollout", key()) is None and run.find_stage(0, "verify", key()) is None


@pytest.mark.parametrize("override", ["launcher.startup_seconds=99", "trainer.threads=1", "inference.servers=1"])
def test_operational_fields_enter_no_key(override: str) -> None:
    assert key(override) == key()
    assert semantic_values(recipe(override)) == semantic_values(recipe())


def test_values_are_the_semantic_leaves_below_what_is_named() -> None:
    values = recipe_values(recipe(), ("rollout.temperature", "reward"))
    assert values["rollout.temperature"] == 1.0
    assert "reward.timeout_seconds" in values and "reward.workers" not in values
    assert recipe_values(load_recipe("quickstart-sft"), ("model.scratch",))["model.scratch.layers"] == 2


@pytest.mark.parametrize("field", ["reward.workers", "launcher", "rollout.warmth", "rollout.groups.more", "name"])
def test_a_stage_cannot_name_what_enters_no_key(field: str) -> None:
    with pytest.raises(KeyError):
        recipe_values(recipe(), (field,))


parts = st.tuples(
    st.sampled_from(["rollout", "verify"]),
    st.integers(1, 3),
    st.dictionaries(st.sampled_from("abc"), st.one_of(st.integers(0, 2), st.floats(0, 1), st.text("xy", max_size=2))),
    st.lists(st.text("0f", min_size=1, max_size=2), max_size=3),
    st.integers(0, 2),
    st.one_of(st.none(), st.text("0f", min_size=1, max_size=2)),
)


@given(parts, parts)
def test_keys_are_equal_exactly_where_all_that_was_asked_for_is(one: tuple, other: tuple) -> None:  # type: ignore[type-arg]
    same = one == other and [type(v) for v in one[2].values()] == [type(other[2][k]) for k in one[2]]
    assert (stage_key(*one) == stage_key(*other)) == same


def test_the_order_of_values_does_not_matter_and_that_of_inputs_does() -> None:
    assert stage_key("s", 1, {"a": 1, "b": 2}, [], 0) == stage_key("s", 1, {"b": 2, "a": 1}, [], 0)
    assert stage_key("s", 1, {}, ["a", "b"], 0) != stage_key("s", 1, {}, ["b", "a"], 0)
    assert combine_digests({"x": "1", "y": "2"}) == combine_digests({"y": "2", "x": "1"}) != combine_digests({"x": "1"})
