"""What the stages of an iteration cost beside generation and the optimizer steps, at the size of a GPU's iterations.

    python -m benchmarks.stages [--groups 64] [--group-size 8] [--tokens 512] [--iterations 8] [--folder /dev/shm]

The loop with its services and its store, without Prefect. The inference server is another process that answers at once
with answers made beforehand, in SGLang's shape; the model is tiny, so that its steps take seconds. Seconds are those of
the stages' manifests, less the longest answer and the optimizer steps.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from areal_tasks.engines.external import ADDRESSES
from areal_tasks.engines.session import Engines
from areal_tasks.stages.loop import Loop
from areal_tasks.store.backend import open_store
from areal_tasks.store.runs import open_run
from benchmarks.bare_loop import machine
from benchmarks.gpu.run_times import Row, iteration_rows
from benchmarks.instant import PROMPT_TOKENS, answer, instant_server
from schemas.recipe.load import parse_recipe
from schemas.recipe.recipe import Recipe

WARM = 2  # iterations left out: imports, first connections
ALPHABET = "".join(map(chr, range(0x4E00, 0x4E00 + 1000)))  # one token a character
PARTS: dict[str, Callable[[Row], float]] = {
    "answers: sent for and read": lambda row: row["generation"],
    "rollout, less that": lambda row: row["stage_rollout"] - row["generation"],
    "verify": lambda row: row["stage_verify"],
    "advantage": lambda row: row["stage_advantage"],
    "train, less its steps": lambda row: row["stage_train"] - row["steps"],
    "scalars": lambda row: row["stage_scalars"],
    "publish": lambda row: row["stage_publish"],
    "between stages, and closing": lambda row: row["wall"] - sum(v for k, v in row.items() if k.startswith("stage_")),
}


def bodies(groups: int, size: int, tokens: int) -> list[list[dict[str, Any]]]:
    """The answers to `groups` requests; every sample has tokens and log-probabilities of its own."""
    source = random.Random(0)
    made: list[list[dict[str, Any]]] = [[answer(tokens) for _ in range(size)] for _ in range(groups)]
    for one in (one for body in made for one in body):
        output = [source.randrange(4, 4 + len(ALPHABET)) for _ in range(tokens)]
        pairs = [(source.uniform(-0.1, 0.1) - math.log(len(ALPHABET)), token, None) for token in output]
        meta = {**one["meta_info"], "output_token_logprobs": pairs}
        one |= {"text": "".join(ALPHABET[token - 4] for token in output), "output_ids": output, "meta_info": meta}
    return made


@contextlib.contextmanager
def named(address: str) -> Iterator[None]:
    """The server at `address` is the run's, by the environment."""
    os.environ[ADDRESSES] = address
    try:
        yield
    finally:
        del os.environ[ADDRESSES]


def make_recipe(groups: int, size: int, tokens: int, iterations: int, folder: Path) -> Recipe:
    """GRPO of a model of one narrow layer, on prompts in `folder`."""
    source, prompts = random.Random(1), folder / "prompts.jsonl"
    rows = [{"question": "".join(source.choices(ALPHABET, k=PROMPT_TOKENS)), "answer": str(i)} for i in range(512)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scratch = {"layers": 1, "hidden": 16, "heads": 2, "intermediate": 16, "alphabet": ALPHABET}
    sections: dict[str, dict[str, Any]] = {
        "model": {"scratch": scratch, "max_length": 1024},
        "data": {"source": str(prompts)},
        "rollout": {"groups": groups, "group_size": size, "max_new_tokens": tokens},
        "reward": {"verifier": "benchmarks.gpu.coin:verify", "workers": 4},
        "algorithm": {"max_logprob_gap": 100.0},
        "trainer": {"threads": 1},
        "inference": {"engine": "sglang", "max_concurrent_requests": 256},
        "schedule": {"iterations": iterations},
    }
    return parse_recipe({"name": "stages", "flow": "rlhf", **sections})


def measure(recipe: Recipe, folder: Path) -> list[Row]:
    """A row per iteration, after the first few."""
    importlib.import_module("flows.rlhf")  # the flow's process holds Prefect, too
    store = open_store((folder / "store").as_uri())
    run = open_run(store, "stages", "rlhf", recipe)
    with Engines(run, recipe, folder / "logs") as engines:
        Loop(run, recipe, engines)()
    return iteration_rows(store, "stages")[WARM:]


def main(
    groups: Annotated[int, typer.Option(help="Requests an iteration.")] = 64,
    group_size: Annotated[int, typer.Option(help="Samples a request.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens a sample generates.")] = 512,
    iterations: Annotated[int, typer.Option(help=f"The first {WARM} are left out.")] = 8,
    folder: Annotated[Path, typer.Option(help="Where the store lies while this runs.")] = Path("/dev/shm"),
) -> None:
    print(f"{machine()}; {groups} × {group_size} samples of {PROMPT_TOKENS} + {tokens} tokens")
    server = instant_server(bodies(groups, group_size, tokens))
    with tempfile.TemporaryDirectory(dir=folder) as own, server as address, named(address):
        rows = measure(make_recipe(groups, group_size, tokens, iterations, Path(own)), Path(own))
    print(f"{'ms an iteration':34s} {'least':>8s} {'median':>8s}")
    for name, of in PARTS.items():
        found = [1000 * of(row) for row in rows]
        print(f"{name:34s} {min(found):8.1f} {statistics.median(found):8.1f}")


if __name__ == "__main__":
    typer.run(main)
