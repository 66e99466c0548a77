"""Log-probabilities of the generated tokens, by the trainer.

reference: under version 0, for a KL term.

proximal: under the policy that the iteration begins with. The server's log-probabilities, with which the tokens were
sampled, are kept as well: the two differ in rounding.
"""

from __future__ import annotations

from functools import partial
from typing import Final, Literal

from areal_tasks.engines.trainer.commands import Logprobs, Tables
from areal_tasks.engines.trainer.rows import COLUMNS
from areal_tasks.stages.progress import reported
from areal_tasks.stages.stage import Context, Inputs, Kind, Output, Stage, columns
from schemas.recipe.recipe import RlhfRecipe

Which = Literal["policy", "reference"]
STAGE: Final = {"policy": "proximal", "reference": "reference"}


def reference(recipe: RlhfRecipe) -> Stage:
    """Per token `ref_logprobs`."""
    return _stage(recipe, "reference")


def proximal(recipe: RlhfRecipe) -> Stage:
    """Per token `prox_logprobs`. After `reference`: both use the trainer, which may have to be restored first."""
    return _stage(recipe, "policy", carries=("policy",), after=("reference",))


def _stage(recipe: RlhfRecipe, which: Which, carries: tuple[str, ...] = (), after: tuple[str, ...] = ()) -> Stage:
    """A stage that reads the columns that a forward pass needs."""
    return Stage(
        name=STAGE[which],
        kind=Kind.INFERENCE,
        version=1,
        run=partial(logprobs, which),
        reads=columns("rollout", *COLUMNS["rollout"]),
        writes=(STAGE[which],),
        fields=("rollout.temperature", "model", "trainer.layout", "trainer.micro_batch_tokens", "trainer.backend"),
        carries=carries,
        after=(*after, *(("evaluate",) if recipe.inference.release_memory else ())),  # one at a time on the GPU
    )


def logprobs(which: Which, context: Context, inputs: Inputs, prefix: str) -> Output:
    """Have the trainer compute the log-probabilities of the iteration's tokens under one of its two models."""
    trainer = context.engines.actor.at(context.iteration)
    command = Logprobs(
        owner=context.run.owner,
        version=context.iteration,
        which=which,
        table=inputs.ref("rollout"),
        prefix=prefix,
    )
    with reported(f"{STAGE[which]} {context.iteration}", "samples", trainer.work):
        return Output(trainer.run(command, Tables).tables)
