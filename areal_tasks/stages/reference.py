"""reference: log-probabilities of the generated tokens under version 0, for a KL term."""

from __future__ import annotations

from areal_tasks.engines.trainer.commands import Logprobs
from areal_tasks.engines.trainer.rows import COLUMNS
from areal_tasks.stages.context import Context
from areal_tasks.stages.progress import reported
from areal_tasks.stages.stage import Inputs, Kind, Output, Stage, columns
from schemas.recipe.recipe import RlhfRecipe


def reference(recipe: RlhfRecipe) -> Stage:
    """Per token `ref_logprobs`. Reads what a forward pass needs."""
    return Stage(
        name="reference",
        kind=Kind.INFERENCE,
        version=1,
        run=run,
        reads=columns("rollout", *COLUMNS["rollout"]),
        writes=("reference",),
        fields=("rollout.temperature", "model", "trainer.layout", "trainer.micro_batch_tokens", "trainer.backend"),
        carries=("initial weights",),
        after=("evaluate",) if recipe.inference.release_memory else (),  # one at a time on the GPU
    )


def run(context: Context, inputs: Inputs, prefix: str) -> Output:
    trainer = context.engines.trainer_at(context.iteration)
    command = Logprobs(
        owner=context.run.owner,
        version=context.iteration,
        which="reference",
        table=inputs.ref("rollout"),
        prefix=prefix,
    )
    with reported(f"reference {context.iteration}", "samples", trainer.work):
        return Output(trainer.logprobs(command).tables)
