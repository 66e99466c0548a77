"""Workflows, which produce samples. `load_workflow` loads the workflow that a recipe names."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, cast

from areal_tasks.user_code import find_object
from areal_tasks.workflows.protocol import Prompt, Sample, Workflow, WorkflowContext, check_values, samples_to_table
from areal_tasks.workflows.single_turn import SingleTurn
from schemas.errors import UserError


def load_workflow(name: str, arguments: Mapping[str, Any]) -> Workflow:
    """`single_turn`, or the class or function `package.module:object` called with `arguments`.

    UserError if there is none, or it does not accept `arguments`.
    """
    if name == "single_turn":
        if arguments:
            raise UserError("workflow.arguments: `single_turn` takes none; remove them or name your own workflow")
        return SingleTurn()
    if ":" not in name:
        raise UserError(f"workflow.name: {name} is neither `single_turn` nor `package.module:object`")
    factory = find_object(name, "workflow.name")
    try:
        workflow = factory(**arguments)
    except TypeError as error:
        raise UserError(f"workflow.arguments: {name} does not accept them: {error}") from error
    if not callable(getattr(workflow, "run", None)):
        raise UserError(f"workflow.name: {name} makes a {type(workflow).__name__}, which has no `run` method")
    if next(iter(inspect.signature(workflow.run).parameters), "") == "prompts":
        raise UserError(
            f"workflow.name: the `run` of {name} takes several prompts. It makes one group now: "
            "`async def run(self, prompt, context) -> list[Sample]`; the samples of one prompt "
            "(docs/guides/workflow.md)"
        )
    return cast(Workflow, workflow)


__all__ = [
    "Prompt",
    "Sample",
    "SingleTurn",
    "Workflow",
    "WorkflowContext",
    "check_values",
    "load_workflow",
    "samples_to_table",
]
