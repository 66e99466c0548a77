"""Whole GRPO iterations through the product, then the bare parts for the same tokens: one machine, one command.

    python -m benchmarks.gpu.iteration SHAPE [--parts run,sglang,step] [key=value …]

1. `run`: Prefect server, worker and `prefect deployment run rlhf/gpu-iteration` on random weights and prompts;
2. `sglang`: raw SGLang under the run's flags on exactly the prompts of one of its iterations, by a server that starts
   when nothing of the run is left on the GPU;
3. `step`: the plain compiled training step on sequences of the run's mean length, in each precision of `--step`;

Each part has a time limit and appends its result; `benchmarks.gpu.report` makes the table. Parts may be measured by
calls of their own, the run first (`--name` says whose prompts). `key=value` overrides fields of
benchmarks/gpu/iteration.yaml; what a shape changes in it is in benchmarks/gpu/settings.py.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from areal_tasks.store.backend import open_store
from benchmarks.gpu.product import committed, deploy_run, follow, show_failure, start_machine
from benchmarks.gpu.prompts import make_prompts
from benchmarks.gpu.raw_rounds import read_rounds
from benchmarks.gpu.results import Record, add_results_option, device_name, load, measure, record
from benchmarks.gpu.run_times import Cadence, Row, beside_raw, iteration_rows, summary, without_end
from benchmarks.gpu.settings import concurrency_of, recipe_of_shape, samples_of, step_length, words_of
from benchmarks.gpu.sglang_load import cache_of
from benchmarks.gpu.shapes import SHAPES, make_shape
from flows.cli.machine import down
from schemas.recipe.load import load_recipe
from schemas.recipe.recipe import RlhfRecipe

PARTS = ("run", "sglang", "step")
WARM = 4  # iterations that are left out: compilation, first CUDA graphs, the first write, which page-locks memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("overrides", nargs="*", help="of the recipe, as section.field=value")
    parser.add_argument("--parts", default="run,sglang,step", help=f"of {','.join(PARTS)}")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/gpu-bench"), help="models, store; memory-backed")
    parser.add_argument("--name", default="", help="of the run; the same again goes on with it")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument(
        "--raw-rounds",
        choices=("", "yes", "no-cache"),
        default="",
        help="raw SGLang's rounds in turns with the run's rollouts; no-cache: for a server without a cache to flush",
    )
    parser.add_argument("--step", default="layers,layers+master", help="variants of the plain step")
    parser.add_argument("--seconds", type=float, default=420, help="time limit of the run")
    parser.add_argument("--part-seconds", type=float, default=150, help="time limit of every other measurement")
    add_results_option(parser)
    arguments = parser.parse_intermixed_args()
    arguments.name = arguments.name or f"gpu-{arguments.shape}-{datetime.now(UTC):%m%d-%H%M%S}".replace(".", "")
    for part in arguments.parts.split(","):
        print(f"── {part}", flush=True)
        RUN[part](arguments)


def paths(arguments: argparse.Namespace) -> tuple[Path, Path, str]:
    """(model, prompts, store URL), the first two made if they are missing."""
    folder = arguments.folder.resolve()
    model = make_shape(arguments.shape, folder / arguments.shape)
    prompts = folder / f"prompts-{arguments.shape}-{arguments.prompt_tokens}.jsonl"
    make_prompts(model, prompts, 512, arguments.prompt_tokens)
    return model, prompts, (folder / "store").as_uri()


def overrides(arguments: argparse.Namespace) -> dict[str, str]:
    """Of the benchmark's recipe."""
    model, prompts, store = paths(arguments)
    own = {"model.path": str(model), "data.source": str(prompts), "store.url": store}
    if arguments.raw_rounds:
        words = {"results": str(raw_file(arguments))} | ({} if arguments.raw_rounds == "yes" else {"flush": False})
        own |= {"workflow.name": "benchmarks.gpu.raw_rounds:RawRounds", "workflow.arguments": json.dumps(words)}
    return own | dict(override.split("=", 1) for override in words_of(arguments.shape, arguments.overrides))


def raw_file(arguments: argparse.Namespace) -> Path:
    """The file with a run's raw rounds."""
    return arguments.folder.resolve() / f"raw-rounds-{arguments.name}.jsonl"


def recipe_of(arguments: argparse.Namespace) -> RlhfRecipe:
    """The recipe as it is run."""
    return recipe_of_shape(arguments.shape, [f"{key}={value}" for key, value in overrides(arguments).items()])


def run_product(arguments: argparse.Namespace) -> None:
    """The run itself; its rows go to `<results' folder>/<run>-iterations.csv`."""
    changes, home = overrides(arguments), Path(os.environ.get("AREALFLOW_HOME", "/tmp/gpu-bench/home"))
    recipe = recipe_of(arguments)
    store, name = open_store(changes["store.url"]), arguments.name
    if arguments.raw_rounds:
        prepare_raw_rounds(recipe, raw_file(arguments), fresh=not committed(store, name))
    started = time.monotonic()
    api_url = start_machine(home, "benchmarks/gpu/prefect.yaml")
    try:
        flow_run = deploy_run(api_url, "rlhf/gpu-iteration", name, changes)
        tell = lambda: f"{committed(store, name)} of {recipe.schedule.iterations} iterations"  # noqa: E731
        ended = follow(api_url, {name: flow_run}, started + arguments.seconds, tell)[name]
        if ended != "COMPLETED":
            show_failure(home, name)
    finally:
        down()
    if not committed(store, name):
        raise SystemExit(f"the flow run ended {ended or 'not'} before its first iteration was committed")
    table = iteration_rows(store, name, read_rounds(raw_file(arguments)) if arguments.raw_rounds else ())
    write_csv(arguments.results.parent / f"{name}-iterations.csv", table)
    counted = without_end(table)
    warm = min(WARM, len(counted) - 1)
    found = {key: _rounded(value) for key, value in summary(counted, warm, cadence()).items()}
    record(
        arguments.results,
        "our_iteration",
        shape=arguments.shape,
        run=name,
        flow_run=flow_run,
        state=ended,
        store=store.url,
        prompt_tokens=arguments.prompt_tokens,
        **settings_of(recipe),
        **found,
        **cache_of(*(home / "logs" / name).glob("inference-*.log")),
        seconds_in_all=round(time.monotonic() - started, 1),
    )
    if among := beside_raw(counted, warm):
        size = {"shape": arguments.shape, "run": name, "new_tokens": recipe.rollout.max_new_tokens}
        record(arguments.results, "raw_sglang", alternating=True, **size, **among)


def prepare_raw_rounds(recipe: RlhfRecipe, file: Path, fresh: bool) -> None:
    """Check that the file will hold rounds of this run alone. SystemExit if they would also go elsewhere."""
    if recipe.evaluation.every:
        raise SystemExit("--raw-rounds: evaluations would have raw rounds, too; set evaluation.every=0")
    if fresh:
        file.unlink(missing_ok=True)


def settings_of(recipe: RlhfRecipe) -> dict[str, Any]:
    """What of the recipe decides which results may be compared with this one, and what was left out."""
    return {
        "groups": recipe.rollout.groups,
        "group_size": recipe.rollout.group_size,
        "new_tokens": recipe.rollout.max_new_tokens,
        "minibatches": recipe.algorithm.minibatches,
        "kl": recipe.algorithm.kl,
        "artifact_every": recipe.schedule.artifact_every,
    }


def cadence() -> Cadence:
    """Of the recipe that people start from."""
    trainer = load_recipe("gsm8k").trainer  # type: ignore[union-attr]
    return Cadence(trainer.weights_every, trainer.recover_within_seconds)


def run_sglang(arguments: argparse.Namespace) -> None:
    """Raw SGLang on the prompts of the last iteration that is committed."""
    measure("baseline_sglang", sglang_words(arguments), arguments.part_seconds)


def sglang_words(arguments: argparse.Namespace) -> list[str]:
    """The command line of the raw baseline for this run: of that name, or the shape's last one."""
    model, _, _ = paths(arguments)
    recipe = recipe_of(arguments)
    store = recipe.store.url
    known = committed(open_store(store), arguments.name) > 0
    options = {
        "--model": model,
        "--run": arguments.name if known else last_run(arguments)["run"],
        "--store": store,
        "--new-tokens": recipe.rollout.max_new_tokens,
        "--concurrency": concurrency_of(recipe),
        "--results": arguments.results,
    }
    changes = [f"{key}={value}" for key, value in overrides(arguments).items()]
    return [arguments.shape, *changes, *_words(options)]


def run_step(arguments: argparse.Namespace) -> None:
    """The plain compiled step on as many sequences as an iteration has, of their mean length."""
    options = {
        "--rows": samples_of(recipe_of(arguments)),
        "--length": step_length(last_run(arguments)),
        "--results": arguments.results,
    }
    for variant in arguments.step.split(","):
        name, _, master = variant.partition("+")
        words = [arguments.shape, "--variant", name, *(["--master"] if master else []), *_words(options)]
        measure("baseline_step", words, arguments.part_seconds)


RUN = {"run": run_product, "sglang": run_sglang, "step": run_step}


def last_run(arguments: argparse.Namespace) -> Record:
    """The newest result of `run` for this shape on this machine."""
    here = {"what": "our_iteration", "shape": arguments.shape, "device": device_name()}
    found = [r for r in load(arguments.results) if here.items() <= r.items()]
    if not found:
        raise SystemExit(f"{arguments.results} holds no run of {arguments.shape}; include the part run")
    return found[-1]


def write_csv(file: Path, table: Sequence[Row]) -> None:
    """All rows, with every column that any of them has."""
    names = list(dict.fromkeys(name for row in table for name in row))
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as sink:
        writer = csv.DictWriter(sink, names)
        writer.writeheader()
        writer.writerows({key: _rounded(value) for key, value in row.items()} for row in table)


def _words(options: dict[str, Any]) -> list[str]:
    return [word for key, value in options.items() for word in (key, str(value))]


def _rounded(value: Any) -> Any:
    return round(value, 5) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
