"""proximal: log-probabilities of the generated tokens under the policy that the iteration begins with, by the trainer.

They stand beside the server's own, with which the tokens were sampled: the two differ in rounding (DESIGN §5).
"""

from __future__ import annotations

from functools import partial

from areal_tasks.engines.trainer.rows import COLUMNS
from areal_tasks.stages.reference import logprobs
from areal_tasks.stages.stage import Kind, Stage, columns
from schemas.recipe.recipe import RlhfRecipe


def proximal(recipe: RlhfRecipe) -> Stage:
    """Per token `prox_logprobs`. Reads what a forward pass needs."""
    return Stage(
        name="proximal",
        kind=Kind.INFERENCE,
        version=1,
        run=partial(logprobs, "policy"),
        reads=columns("rollout", *COLUMNS["rollout"]),
        writes=("proximal",),
        fields=("rollout.temperature", "model", "trainer.layout", "trainer.micro_batch_tokens", "trainer.backend"),
        carries=("policy",),
        after=(
            "reference",  # the same trainer: who restores it must not be disturbed
            *(("evaluate",) if recipe.inference.release_memory else ()),  # one at a time on the GPU
        ),
    )
