"""Recipes by name or file, overrides, and what is said about each mistake."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from schemas.errors import UserError
from schemas.recipe.load import apply_overrides, list_recipes, load_recipe, parse_recipe
from schemas.recipe.recipe import EvaluateRecipe, RlhfRecipe, SftRecipe

SHIPPED = {
    "quickstart": RlhfRecipe,
    "quickstart-sft": SftRecipe,
    "quickstart-async": RlhfRecipe,
    "gsm8k": RlhfRecipe,
    "gsm8k-async": RlhfRecipe,
    "gsm8k-cpu": RlhfRecipe,
    "sft-gsm8k": SftRecipe,
    "sft-gsm8k-cpu": SftRecipe,
    "evaluate-gsm8k": EvaluateRecipe,
    "evaluate-gsm8k-cpu": EvaluateRecipe,
    "smollm2-gsm8k-async": RlhfRecipe,
}


@pytest.mark.parametrize(("name", "kind"), SHIPPED.items())
def test_every_shipped_recipe_loads(name: str, kind: type) -> None:
    recipe = load_recipe(name)
    assert isinstance(recipe, kind)
    assert recipe.name == name
    assert parse_recipe(recipe.model_dump(mode="json")) == recipe  # as it is stored, and as Prefect hands it over


@pytest.mark.parametrize("flow", ["rlhf", "evaluate"])
def test_relative_data_is_found_next_to_the_recipe(flow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("original", "copy", "elsewhere"):
        (tmp_path / name).mkdir()
    for name in ("original", "copy"):
        (tmp_path / name / "test.jsonl").write_text("")
        recipe = load_recipe(f"{'evaluate-' * (flow == 'evaluate')}gsm8k-cpu", ["data.subset="])
        values = recipe.model_dump(mode="json") | {"flow": flow}
        values["data"]["source"] = "{split}.jsonl"
        (tmp_path / name / "mine.yaml").write_text(yaml.safe_dump(values))

    def source(here: str, recipe: str, *overrides: str) -> str:
        monkeypatch.chdir(tmp_path / here)
        return load_recipe(recipe, overrides).data.source

    assert source("copy", "mine.yaml") == source("copy", "../copy/mine.yaml") == "{split}.jsonl", "as it is recorded"
    assert source("elsewhere", "../copy/mine.yaml") == f"{tmp_path.resolve()}/copy/{{split}}.jsonl"
    with pytest.raises(UserError, match=r"is in the current folder \(.*original\) and in that of the recipe"):
        source("original", "../copy/mine.yaml")
    assert source("original", "../copy/mine.yaml", "data.source=/x/{split}.jsonl") == "/x/{split}.jsonl"
    assert source("elsewhere", "../copy/mine.yaml", "data.source=gone/{split}.jsonl") == "gone/{split}.jsonl"


def test_the_list_is_complete() -> None:
    assert set(SHIPPED) <= set(list_recipes())


#: What an asynchronous recipe may change of the synchronous one.
ASYNCHRONOUS = {"name", "rollout.max_head_offpolicyness"} | {
    f"inference.{placement}" for placement in ("threads", "gpus", "memory_fraction")
}


@pytest.mark.parametrize("name", ["quickstart", "gsm8k", "smollm2-gsm8k"])
def test_an_asynchronous_recipe_differs_in_its_staleness_and_its_placement_alone(name: str) -> None:
    both = (dict(_fields(load_recipe(n).model_dump(mode="json"))) for n in (name, f"{name}-async"))
    synchronous, asynchronous = both
    assert synchronous["rollout.max_head_offpolicyness"] == 0 < asynchronous["rollout.max_head_offpolicyness"]
    assert {field for field in synchronous if synchronous[field] != asynchronous[field]} <= ASYNCHRONOUS


def _fields(values: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _fields(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def test_the_quickstarts_parts_fit_together() -> None:
    recipe = load_recipe("quickstart")
    warm = load_recipe(recipe.model.warm_start)
    assert isinstance(warm, SftRecipe)
    assert warm.schedule.iterations * warm.algorithm.steps == 125
    assert (warm.data.source, warm.model.max_length) == (recipe.data.source, recipe.model.max_length)


def test_a_file_is_a_recipe_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nflow: sft\nmodel: {scratch: {}}\ndata: {source: 'sums://2'}\ntrainer: {lr: 1e-3}\n")
    recipe = load_recipe(path)
    assert isinstance(recipe, SftRecipe)
    assert recipe.trainer.lr == 1e-3


def test_a_checked_recipe_does_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load_recipe("quickstart").seed = 2


# ── overrides ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_overrides_are_yaml_at_dotted_keys() -> None:
    changes = ["rollout.groups=8", "trainer.lr=1e-5", "rollout.stop=[a, 'b=c']", "data.chat=false", "evaluation={}"]
    recipe = load_recipe("quickstart", changes)
    assert isinstance(recipe, RlhfRecipe)
    assert (recipe.rollout.groups, recipe.trainer.lr, recipe.rollout.stop) == (8, 1e-5, ["a", "b=c"])
    assert recipe.evaluation.every == 0


def test_overrides_make_missing_sections_and_leave_the_original() -> None:
    values: dict[str, Any] = {"a": {"b": 1}, "n": None}
    assert apply_overrides(values, ["a.c=2", "n.x.y=3"]) == {"a": {"b": 1, "c": 2}, "n": {"x": {"y": 3}}}
    assert values == {"a": {"b": 1}, "n": None}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.groups", "should look like section.field=value"),
        ("rollout..groups=1", "should look like"),
        ("=1", "should look like"),
        ("seed.x=1", "seed is a value, not a section"),
        ("rollout.groups=[1", "override 'rollout.groups=.1', line 1.* not valid YAML"),
        ("rollout.grops=1", r"rollout\.grops: unknown key .did you mean 'groups'"),
    ],
)
def test_bad_overrides(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_recipe("quickstart", ["seed=1", override])


# ── mistakes ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("quikstart", "unknown recipe 'quikstart' .did you mean 'quickstart'.*gsm8k-cpu"),
        ("zzz", "unknown recipe 'zzz'; name a YAML file or one of: .*quickstart"),
        ("nowhere/mine.yaml", "recipe file 'nowhere/mine.yaml' does not exist; recipes by name: .*quickstart"),
    ],
)
def test_unknown_recipes(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_recipe(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "should be a mapping of sections, not NoneType"),
        ("- a", "should be a mapping of sections, not list"),
        ("a: [", r"mine\.yaml, line 1, column 5: not valid YAML"),
        ("seed: 1\nseed: 2", "line 2, column 1: not valid YAML: the key 'seed' occurs twice"),
        ("name: x", "flow is missing; it should be one of rlhf, sft, evaluate"),
        ("flow: rlfh", "flow is 'rlfh' .did you mean 'rlhf'"),
        ("flow: [rlhf]", "flow is"),
        ("1: 2", "line 1, column 1: not valid YAML: a key should be text"),
        ("[a]: 2", "a key should be text"),
    ],
)
def test_files_that_are_no_recipe(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        load_recipe(tmp_path / "mine.yaml")


def test_all_problems_come_at_once_with_their_fields() -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(
            "quickstart", ["rolout.x=1", "trainer.lr=2", "rollout.top_p=0.9", "model.scratch.layer=3", "seed=a"]
        )
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("recipe 'quickstart' with rolout.x=1 trainer.lr=2 ")
    assert {line.split(":")[0].strip(" -") for line in lines[1:]} == {
        "rolout", "trainer.lr", "rollout.top_p", "model.scratch.layer", "seed",
    }  # fmt: skip
    assert "  - rolout: unknown key (did you mean 'rollout'?); known here: name, flow" in str(caught.value)
    assert "  - model.scratch.layer: unknown key (did you mean 'layers'?); known here: layers" in str(caught.value)
    assert "  - trainer.lr: should be less than or equal to 1, not 2" in str(caught.value)


def test_missing_sections_are_named() -> None:
    with pytest.raises(UserError, match=r"name: is required\n.*model: is required\n.*data: is required"):
        parse_recipe({"flow": "sft"})


@pytest.mark.parametrize("value", [".nan", ".inf"])
def test_numbers_must_be_finite(value: str) -> None:
    with pytest.raises(UserError, match=r"trainer\.lr: should be a finite number"):
        load_recipe("quickstart", [f"trainer.lr={value}"])


def test_floats_without_a_point_are_numbers_everywhere(tmp_path: Path) -> None:
    assert yaml.safe_load("1e-6") == "1e-6"  # why recipes have a loader of their own
    recipe = load_recipe("gsm8k-cpu", ["reward.verifier=my.module:judge", "reward.arguments.tolerance=1e-6"])
    assert isinstance(recipe, RlhfRecipe)
    assert recipe.reward.arguments == {"tolerance": 1e-6}


@pytest.mark.parametrize("recorded", ["tis_cap", "behaviour_cap"])
@pytest.mark.parametrize("given", ["tis_cap", "behaviour_cap"])
def test_an_override_replaces_a_renamed_field_under_either_name(recorded: str, given: str) -> None:
    """A flow's overrides are applied to a recipe that names every field; a deployment may still have the former one."""
    values = load_recipe("quickstart-async").model_dump(mode="json")
    values["algorithm"][recorded] = values["algorithm"].pop("tis_cap")
    changed = parse_recipe(apply_overrides(values, [f"algorithm.{given}=3.5"]))
    assert isinstance(changed, RlhfRecipe) and changed.algorithm.tis_cap == 3.5
