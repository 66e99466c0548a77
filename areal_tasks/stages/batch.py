"""batch: the demonstrations that one SFT iteration trains on, in the data order of the run."""

from __future__ import annotations

import pyarrow as pa

from areal_tasks.data.sampler import position, row_of_group
from areal_tasks.data.tokenising import Example, sft_examples
from areal_tasks.stages.stage import Context, Inputs, Kind, Output, Stage, columns, demonstrations
from schemas.recipe.recipe import SftRecipe
from schemas.tables import SFT_BATCH


def batch(recipe: SftRecipe) -> Stage:
    """One row per demonstration: its tokens, the loss mask, and the optimizer step it belongs to."""
    return Stage(
        name="batch",
        kind=Kind.PURE,
        version=2,  # 1: an answer was encoded by itself
        run=run,
        reads=columns("prompts", "prompt_id", "prompt", "answer", "input_ids"),
        writes=("batch",),
        fields=("algorithm",),  # those of `data` have entered the key of the prompts
        source=True,
    )


def run(context: Context, inputs: Inputs, prefix: str) -> Output:
    """Takes the next demonstrations in data order, and tokenises them."""
    recipe = context.recipe
    assert isinstance(recipe, SftRecipe)
    prompts = inputs.read(context, "prompts")
    places = range(context.next_group, context.next_group + demonstrations(recipe))
    order = context.run.record.order
    rows = prompts.take([row_of_group(g, len(prompts), recipe.seed, order) for g in places])
    examples = sft_examples(rows, recipe.data, context.engines.tokenizer)
    table = batch_table(places, len(prompts), examples, recipe.algorithm.batch_size)
    return Output({"batch": table}, {"tokens": float(sum(table["num_tokens"].to_pylist()))})


def batch_table(places: range, rows: int, examples: list[Example], batch_size: int) -> pa.Table:
    """The rows of `SFT_BATCH`: the demonstration at each place of a data order over `rows` rows."""
    columns = {
        "sample_id": [str(place) for place in places],
        "prompt_id": [e.prompt_id for e in examples],
        "epoch": [position(place, rows)[0] for place in places],
        "prompt": [e.prompt for e in examples],
        "completion": [e.completion for e in examples],
        "input_ids": [e.input_ids for e in examples],
        "loss_mask": [e.loss_mask for e in examples],
        "num_tokens": [len(e.input_ids) for e in examples],
        "minibatch": [i // batch_size for i in range(len(examples))],
    }
    return pa.table(columns, schema=SFT_BATCH)
