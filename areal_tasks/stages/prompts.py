"""prompts: the data set's rows as token ids, put into the store once per run."""

from __future__ import annotations

import logging

from areal_tasks.data.datasets import load_rows, splits
from areal_tasks.data.tokenising import check_in_vocabulary, render_prompts
from areal_tasks.engines.models import check_context, vocabulary_of
from areal_tasks.stages.stage import Context, Inputs, Kind, Output, Stage, columns
from schemas.manifest import StageManifest
from schemas.recipe.recipe import Recipe, RlhfRecipe, SftRecipe

log = logging.getLogger(__name__)


def prompts(recipe: Recipe) -> Stage:
    """`prompts` (the training split) and, where something is evaluated, `eval_prompts` (the held-out split)."""
    return Stage(
        name="prompts",
        kind=Kind.PURE,
        version=1,
        run=run,
        reads=columns("initial_weights", "sha256"),  # the tokenizer
        writes=tuple(splits(recipe)),
        fields=("data", "model.max_length", *_lengths(recipe)),
        once=True,
    )


def new_tokens(recipe: Recipe, table: str) -> int | None:
    """Tokens that a prompt must leave for its completion; None: the length of its own answer."""
    if isinstance(recipe, SftRecipe):
        return None
    if isinstance(recipe, RlhfRecipe) and table == "prompts":
        return recipe.rollout.max_new_tokens
    return recipe.evaluation.max_new_tokens


def _lengths(recipe: Recipe) -> tuple[str, ...]:
    if isinstance(recipe, SftRecipe):
        return ()
    evaluation = ("evaluation.max_new_tokens", "evaluation.limit") if "eval_prompts" in splits(recipe) else ()
    return evaluation + (("rollout.max_new_tokens",) if isinstance(recipe, RlhfRecipe) else ())


def run(context: Context, inputs: Inputs, prefix: str) -> Output:
    """Reads, renders and tokenises each split; metrics: rows kept and dropped."""
    recipe, tokenizer = context.recipe, context.engines.tokenizer
    folder, tables, metrics = context.engines.model_folder, {}, dict[str, float]()
    check_context(folder, recipe.model.max_length)  # again, for weights of another run
    vocabulary = vocabulary_of(folder)
    for table, split in splits(recipe).items():
        rows = load_rows(recipe.data, split)
        if table == "eval_prompts" and not isinstance(recipe, SftRecipe) and recipe.evaluation.limit:
            rows = rows[: recipe.evaluation.limit]
        tables[table] = render_prompts(rows, recipe.data, tokenizer, recipe.model.max_length, new_tokens(recipe, table))
        check_in_vocabulary(tables[table], recipe.data, tokenizer, vocabulary, answers=isinstance(recipe, SftRecipe))
        kept, dropped = len(tables[table]), len(rows) - len(tables[table])
        metrics |= {f"{table}_rows": float(kept), f"{table}_dropped": float(dropped)}
        if dropped:
            why = "leave no room within model.max_length: data.on_long_prompt drop leaves them out"
            log.warning("%d of %d rows of split %r %s", dropped, len(rows), split, why)
    return Output(tables, metrics)


def dropped_eval_prompts(prompts: StageManifest) -> dict[str, float]:
    """The number of held-out prompts left out as too long, as a metric of an evaluation; empty if not counted.

    Manifests of earlier versions hold no count.
    """
    count = prompts.metrics.get("eval_prompts_dropped")
    return {} if count is None else {"prompts_dropped": count}
