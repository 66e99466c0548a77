"""The recipe as a Prefect flow's parameter: a form that can be shown, filled and sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import is_valid_schema, validate

from schemas.recipe.load import RECIPES, list_recipes, load_recipe


def form(kind: type) -> dict[str, Any]:
    """What Prefect's server keeps of a flow `def flow(recipe: kind, run: str = "")`, and its UI draws."""

    def flow(recipe: Any, run: str = "") -> None: ...

    flow.__annotations__["recipe"] = kind
    return parameter_schema(flow).model_dump_for_openapi()


def fields(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, section in schema["definitions"].items():
        for field, properties in section["properties"].items():
            yield f"{name}.{field}", properties


@pytest.mark.parametrize("kind", RECIPES.values())
def test_every_field_can_be_drawn(kind: type) -> None:
    schema = form(kind)
    is_valid_schema(schema)
    for field, properties in fields(schema):
        assert properties.get("description") or "$ref" in properties, field  # a section brings its own
        assert {"type", "$ref", "allOf", "anyOf", "enum", "const"} & set(properties), field
        choices = [choice for choice in properties.get("anyOf", []) if choice != {"type": "null"}]
        assert len(choices) <= 1, f"{field} is a union that the form cannot draw"


@pytest.mark.parametrize("kind", RECIPES.values())
def test_defaults_bounds_and_choices_are_in_the_form(kind: type) -> None:
    drawn = dict(fields(form(kind)))
    assert drawn["Model.max_length"]["default"] == 1024
    assert drawn["Model.dtype"]["enum"] == ["float32", "bfloat16"]
    assert drawn["Model.max_length"]["minimum"] == 8


@pytest.mark.parametrize("name", list_recipes())
def test_every_shipped_recipe_fills_its_form(name: str) -> None:
    recipe = load_recipe(name)
    validate({"recipe": recipe.model_dump(mode="json")}, form(type(recipe)), raise_on_error=True, ignore_required=False)
