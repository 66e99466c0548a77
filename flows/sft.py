"""The flow `sft`: batch → train → publish, per iteration."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.ending import Reporting
from flows.execute import execute, prepare, run_name
from schemas.recipe.recipe import SftRecipe


@flow(name="sft", flow_run_name=run_name)
def sft(recipe: SftRecipe, run: str = "", overrides: str = "", fork: str = "") -> dict[str, Any]:
    """Supervised fine-tuning on the data set's answers.

    Args:
        recipe: The whole configuration; a deployment fills it in from its file.
        run: Name of the run. The name of an existing run resumes it. Empty: recipe name and a random one.
        overrides: Fields to change, as `section.field=value` separated by blanks, such as `trainer.lr=1e-5`.
        fork: A run and an iteration, `NAME@40`: share its history before that iteration, and continue from there.
    """
    with Reporting() as report:
        return report(execute(*prepare(recipe, run, overrides, fork)))
