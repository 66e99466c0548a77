"""prompts: the data set's rows as token ids, put into the store once a run."""

from __future__ import annotations

from areal_tasks.data.datasets import load_rows, splits
from areal_tasks.data.tokenising import render_prompts
from areal_tasks.stages.context import Context
from areal_tasks.stages.stage import Inputs, Kind, Output, Stage, columns
from schemas.recipe.recipe import Recipe, RlhfRecipe, SftRecipe

NEEDS_TOKENIZER = columns("initial_weights", "sha256")


def prompts(recipe: Recipe) -> Stage:
    """`prompts` (the training split) and, where something is evaluated, `eval_prompts` (the held-out split)."""
    return Stage(
        name="prompts",
        kind=Kind.PURE,
        version=1,
        run=run,
        reads=NEEDS_TOKENIZER,
        writes=tuple(splits(recipe)),
        fields=("data", "model.max_length", *_lengths(recipe)),
        once=True,
    )


def new_tokens(recipe: Recipe, table: str) -> int | None:
    """Room a prompt must leave for its completion, in tokens; None: as much as its own answer takes."""
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
    recipe, tokenizer = context.recipe, context.engines.tokenizer
    tables = {}
    for table, split in splits(recipe).items():
        rows = load_rows(recipe.data, split)
        if table == "eval_prompts" and not isinstance(recipe, SftRecipe) and recipe.evaluation.limit:
            rows = rows[: recipe.evaluation.limit]
        tables[table] = render_prompts(rows, recipe.data, tokenizer, recipe.model.max_length, new_tokens(recipe, table))
    return Output(tables, {f"{name}_rows": float(len(table)) for name, table in tables.items()})
