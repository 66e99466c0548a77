"""proximal: log-probabilities of the generated tokens under the policy that the iteration begins with, by the trainer.

They stand beside the server's own, with which the tokens were sampled: the two differ in rounding (DESIGN §5).
"""

from __future__ import annotations

from areal_tasks.engines.trainer.commands import Logprobs
from areal_tasks.engines.trainer.rows import COLUMNS
from areal_tasks.stages.context import Context
from areal_tasks.stages.progress import reported
from areal_tasks.stages.stage import Inputs, Kind, Output, Stage, columns
from schemas.recipe.recipe import RlhfRecipe


def proximal(recipe: RlhfRecipe) -> Stage:
    """Per token `prox_logprobs`. Reads what a forward pass needs."""
    return Stage(
        name="proximal",
        kind=Kind.INFERENCE,
        version=1,
        run=run,
        reads=columns("rollout", *COLUMNS["rollout"]),
        writes=("proximal",),
        fields=("rollout.temperature", "model", "trainer.layout", "trainer.micro_batch_tokens", "trainer.backend"),
        carries=("policy",),
        after=(
            "reference",  # the same trainer: who restores it must not be disturbed
            *(("evaluate",) if recipe.inference.release_memory else ()),  # one at a time on the GPU
        ),
    )


def run(context: Context, inputs: Inputs, prefix: str) -> Output:
    trainer = context.engines.trainer_at(context.iteration)
    command = Logprobs(
        owner=context.run.owner,
        version=context.iteration,
        which="policy",
        table=inputs.ref("rollout"),
        prefix=prefix,
    )
    with reported(f"proximal {context.iteration}", "samples", trainer.work):
        return Output(trainer.logprobs(command).tables)
