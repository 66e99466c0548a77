"""train: the optimizer steps of one iteration, made by the trainer service from the committed tables."""

from __future__ import annotations

from areal_tasks.engines.trainer.commands import Train, Trained
from areal_tasks.engines.trainer.rows import read_of
from areal_tasks.stages.progress import reported
from areal_tasks.stages.stage import Context, Inputs, Kind, Output, Stage, columns, tables_of
from schemas.recipe.derived import needs_proximal
from schemas.recipe.recipe import Recipe, RlhfRecipe, SftRecipe


def train(recipe: RlhfRecipe | SftRecipe) -> Stage:
    """Per optimizer step `train_steps`, per sample `train_samples`. Carries the policy to the next version.

    With η > 0 also `scored`, which servers are compared with once they hold that version (`publish.py`).
    """
    grpo = ("rollout.temperature", "rollout.max_head_offpolicyness") if isinstance(recipe, RlhfRecipe) else ()
    return Stage(
        name="train",
        kind=Kind.TRAIN_STEP,
        version=2,  # 2: the decoupled objective where server and trainer differ by more than rounding on the CPU
        run=run,
        reads=tuple(name for table in _tables(recipe) for name in columns(table, *read_of(table, _ages(recipe)))),
        writes=("train_steps", "train_samples", *(("scored",) if _ages(recipe) else ())),
        fields=("trainer", "algorithm", "model", "schedule.iterations", *grpo),
        carries=("policy",),
        after=("evaluate",)
        if isinstance(recipe, RlhfRecipe) and recipe.inference.release_memory
        else (),  # one at a time on the GPU
    )


def _tables(recipe: RlhfRecipe | SftRecipe) -> tuple[str, ...]:
    """The tables that the objective reads; `reference` also for KL in the reward, to measure it."""
    if isinstance(recipe, SftRecipe):
        return ("batch",)
    reference = ("reference",) if recipe.algorithm.kl != "none" else ()
    return ("rollout", "advantage", *reference, *(("proximal",) if needs_proximal(recipe) else ()))


def _ages(recipe: Recipe) -> bool:
    """Whether the tokens may come from several weights versions."""
    return isinstance(recipe, RlhfRecipe) and recipe.rollout.max_head_offpolicyness > 0


def run(context: Context, inputs: Inputs, prefix: str) -> Output:
    """Train the policy from version `iteration` to the next. A retry never steps twice: the trainer knows the key."""
    # one that has made this step already, if its answer was lost, repeats that answer
    trainer = context.engines.actor.at(context.iteration, context.iteration + 1)
    command = Train(
        owner=context.run.owner,
        version=context.iteration,
        digest=inputs.key,
        kind="grpo" if isinstance(context.recipe, RlhfRecipe) else "sft",
        iteration=context.iteration,
        recipe=context.recipe.model_dump(mode="json"),
        tables={table: inputs.ref(table) for table in tables_of(inputs.reads)},
        prefix=prefix,
        same_attempt=same_attempt(context),
    )
    with reported(f"train {context.iteration}", "samples", trainer.work):
        done = trainer.run(command, Trained)
    return Output(done.tables, done.metrics)


def same_attempt(context: Context) -> bool:
    """Whether servers sampled the tokens of this iteration's version with the weights that the trainer holds.

    Not if the trainer was restored while the flow ran, and retraining did not reproduce the weights. If that happened
    as the flow started, servers got the trainer's weights, but with η > 0 samples of the start before may have waited.
    """
    previous = context.previous
    republished = previous is not None and context.weights_held != previous.weights
    return context.engines.actor.matches_servers and not (republished and _ages(context.recipe))
