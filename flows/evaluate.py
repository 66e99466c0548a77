"""The flow `evaluate`: accuracy of one set of weights on the held-out split."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.ending import Reporting
from flows.execute import execute, prepare, run_name
from schemas.recipe.recipe import EvaluateRecipe


@flow(name="evaluate", flow_run_name=run_name)
def evaluate(recipe: EvaluateRecipe, run: str = "", overrides: str = "") -> dict[str, Any]:
    """Evaluation on the held-out split.

    Args:
        recipe: The whole configuration; a deployment fills it in from its file.
        run: Name of the run that holds the result. Empty: recipe name and a random one.
        overrides: Fields to change, as `section.field=value` separated by blanks, such as `model.path=run://NAME`.
    """
    with Reporting() as report:
        return report(execute(*prepare(recipe, run, overrides)))
