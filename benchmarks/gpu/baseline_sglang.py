"""Raw SGLang: tokens a second under a recipe's own flags, for a run's prompts or a file's, and its reload time.

    python -m benchmarks.gpu.baseline_sglang SHAPE --model FOLDER --prompts PROMPTS.jsonl
    python -m benchmarks.gpu.baseline_sglang SHAPE --model FOLDER --run NAME --store URL

With `--run` every sample of one of its iterations is asked for again, each as a request of its own. A bare client
(aiohttp, orjson) sends `--concurrency` requests at a time, with logprobs. The first round warms up and is left out.
What is not given (prompts, requests a prompt, tokens, concurrency) is as in the recipe for that shape.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from areal_tasks.store.backend import open_store
from areal_tasks.store.query import run_sql
from benchmarks.gpu.product import committed
from benchmarks.gpu.prompts import read_prompts
from benchmarks.gpu.results import add_results_option, record
from benchmarks.gpu.settings import RECIPE, concurrency_of, recipe_of_shape, words_of
from benchmarks.gpu.sglang_load import cache_of, generate, reload_seconds, server


def prompts_of_run(store: str, run: str, iteration: int) -> list[list[int]]:
    """The prompt ids of every sample of an iteration: the tokens before the first generated one."""
    query = (
        "SELECT input_ids[: num_tokens - num_generated] AS ids FROM rollout "
        f"WHERE iteration = {iteration} ORDER BY group_id, sample_index"
    )
    return [row["ids"] for row in run_sql(open_store(store), run, query).to_pylist()]


def prompts_of_file(file: Path, model: Path, groups: int, size: int) -> list[list[int]]:
    """The first `groups` prompts, `size` times each."""
    ids: list[list[int]] = AutoTokenizer.from_pretrained(model)(read_prompts(file)[:groups])["input_ids"]
    return [prompt for prompt in ids for _ in range(size)]


def prompts_of(arguments: argparse.Namespace) -> list[list[int]]:
    """As the command line says."""
    if not arguments.run:
        return prompts_of_file(arguments.prompts, arguments.model, arguments.groups, arguments.size)
    last = committed(open_store(arguments.store), arguments.run) - 1
    return prompts_of_run(arguments.store, arguments.run, last if arguments.iteration < 0 else arguments.iteration)


def completed(arguments: argparse.Namespace) -> argparse.Namespace:
    """The command line, with the recipe's numbers where it has none."""
    recipe = recipe_of_shape(arguments.shape, arguments.overrides, arguments.recipe)
    arguments.groups = arguments.groups or recipe.rollout.groups
    arguments.size = arguments.size or recipe.rollout.group_size
    arguments.new_tokens = arguments.new_tokens or recipe.rollout.max_new_tokens
    arguments.concurrency = arguments.concurrency or concurrency_of(recipe)
    return arguments


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second and seconds of a reload."""
    started = time.perf_counter()
    flags = words_of(arguments.shape, arguments.overrides)
    with server(arguments.model, arguments.recipe, flags, arguments.log) as url:
        ready = time.perf_counter() - started
        prompts = prompts_of(arguments)
        rounds = generate(url, prompts, arguments.new_tokens, arguments.concurrency, arguments.rounds + 1)[1:]
        reloads = reload_seconds(url, arguments.model)
    rates = [r["tokens"] / r["seconds"] for r in rounds]
    return {
        "shape": arguments.shape,
        "run": arguments.run,
        "requests": len(prompts),
        "mean_prompt_tokens": round(statistics.mean(map(len, prompts)), 1),
        "new_tokens": arguments.new_tokens,
        "concurrency": arguments.concurrency,
        "tokens_per_second": round(statistics.median(rates), 1),
        "rounds": [{k: round(v, 4) for k, v in r.items()} for r in rounds],
        "reload_seconds": [round(t, 4) for t in reloads],
        "ready_seconds": round(ready, 1),
        **cache_of(arguments.log),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape")
    parser.add_argument("overrides", nargs="*", help="of the recipe, as section.field=value")
    parser.add_argument("--model", type=Path, required=True, help="the shape's folder, memory-backed")
    parser.add_argument("--recipe", default=RECIPE, help="whose inference section gives the flags")
    parser.add_argument("--prompts", type=Path, help="JSONL with a prompt a line")
    parser.add_argument("--groups", type=int, default=0, help="prompts of the file")
    parser.add_argument("--size", type=int, default=0, help="requests a prompt")
    parser.add_argument("--run", default="", help="take the prompts of this run instead")
    parser.add_argument("--store", default="", help="where the run is")
    parser.add_argument("--iteration", type=int, default=-1, help="of the run; -1: the last that is committed")
    parser.add_argument("--new-tokens", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--log", type=Path, default=Path("/tmp/gpu-bench/raw-sglang.log"))
    add_results_option(parser)
    arguments = completed(parser.parse_intermixed_args())
    record(arguments.results, "raw_sglang", **measured(arguments))


if __name__ == "__main__":
    main()
