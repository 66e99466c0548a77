"""Whole GRPO iterations through the product, then the bare parts for the same tokens: one machine, one command.

    python -m benchmarks.gpu.iteration SHAPE [--parts run,sglang,step,trl] [key=value …]

1. `run`: Prefect server, worker and `prefect deployment run rlhf/gpu-iteration` on random weights and prompts;
2. `sglang`: raw SGLang under the run's flags on exactly the prompts of one of its iterations; after a `run`, its server
   has been started beside that, and has been idle since;
3. `step`: the plain compiled training step on sequences of the run's mean length;
4. `trl`: whole iterations of TRL's GRPOTrainer on the same prompts.

Each part has a time limit and appends its result; `benchmarks.gpu.report` makes the table. `key=value` overrides
fields of benchmarks/gpu/iteration.yaml.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from areal_tasks.store.backend import open_store
from benchmarks.gpu.baseline_sglang import RECIPE
from benchmarks.gpu.product import committed, deploy_run, follow, show_failure, start_machine
from benchmarks.gpu.prompts import make_prompts
from benchmarks.gpu.results import add_results_option, end_group, load, measure, record
from benchmarks.gpu.run_times import Cadence, Row, iteration_rows, summary
from benchmarks.gpu.shapes import SHAPES, make_shape
from flows.cli.machine import down
from schemas.recipe.load import load_recipe
from schemas.recipe.recipe import RlhfRecipe

PARTS = ("run", "sglang", "step", "trl")
#: Tokens of a pass: with the recipe's number the GPU would be done with a small model's pass before the host.
PASS_TOKENS = {"135m": 65536, "0.5b": 32768}
WARM = 2  # iterations of the run that are left out: compilation, first CUDA graphs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("overrides", nargs="*", help="of the recipe, as section.field=value")
    parser.add_argument("--parts", default="run,sglang,step", help=f"of {','.join(PARTS)}")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/gpu-bench"), help="models, store; memory-backed")
    parser.add_argument("--name", default="", help="of the run; the same again goes on with it")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300, help="time limit of the run")
    parser.add_argument("--part-seconds", type=float, default=150, help="time limit of every other part")
    add_results_option(parser)
    arguments = parser.parse_intermixed_args()
    arguments.name = arguments.name or f"gpu-{arguments.shape}-{datetime.now(UTC):%m%d-%H%M%S}".replace(".", "")
    parts = arguments.parts.split(",")
    with raw_server_beside(arguments) if {"run", "sglang"} <= set(parts) else contextlib.nullcontext():
        for part in parts:
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
    if arguments.shape in PASS_TOKENS:
        own["trainer.micro_batch_tokens"] = str(PASS_TOKENS[arguments.shape])
    return own | dict(override.split("=", 1) for override in arguments.overrides)


def recipe_of(arguments: argparse.Namespace) -> RlhfRecipe:
    """The recipe as it is run."""
    found = load_recipe(RECIPE, [f"{key}={value}" for key, value in overrides(arguments).items()])
    assert isinstance(found, RlhfRecipe)
    return found


def run_product(arguments: argparse.Namespace) -> None:
    """The run itself; its rows go to `<results' folder>/<run>-iterations.csv`."""
    changes, home = overrides(arguments), Path(os.environ.get("AREALFLOW_HOME", "/tmp/gpu-bench/home"))
    recipe = recipe_of(arguments)
    store, name = open_store(changes["store.url"]), arguments.name
    started = time.monotonic()
    machine = start_machine(home, "benchmarks/gpu/prefect.yaml")
    try:
        flow_run = deploy_run(machine, "rlhf/gpu-iteration", name, changes)
        tell = lambda: f"{committed(store, name)} of {recipe.schedule.iterations} iterations"  # noqa: E731
        ended = follow(machine, {name: flow_run}, started + arguments.seconds, tell)[name]
        if ended != "COMPLETED":
            show_failure(home, name)
    finally:
        down()
    if not committed(store, name):
        raise SystemExit(f"the flow run ended {ended or 'not'} before its first iteration was committed")
    table = iteration_rows(store, name)
    write_csv(arguments.results.parent / f"{name}-iterations.csv", table)
    found = {key: _rounded(value) for key, value in summary(table, min(WARM, len(table) - 1), cadence()).items()}
    settings = {"groups": recipe.rollout.groups, "group_size": recipe.rollout.group_size}
    record(
        arguments.results,
        "our_iteration",
        shape=arguments.shape,
        run=name,
        flow_run=flow_run,
        state=ended,
        store=store.url,
        new_tokens=recipe.rollout.max_new_tokens,
        prompt_tokens=arguments.prompt_tokens,
        **settings,
        **found,
        seconds_in_all=round(time.monotonic() - started, 1),
    )


def cadence() -> Cadence:
    """Of the recipe that people start from."""
    trainer = load_recipe("gsm8k").trainer  # type: ignore[union-attr]
    return Cadence(trainer.weights_every, trainer.recover_within_seconds)


@contextlib.contextmanager
def raw_server_beside(arguments: argparse.Namespace) -> Iterator[None]:
    """Start the raw server already now: it is ready, and idle until told to go, while the run is measured."""
    go = arguments.results.parent / f"{arguments.name}.go"
    command = [sys.executable, "-m", "benchmarks.gpu.baseline_sglang", *sglang_words(arguments), "--go", str(go)]
    arguments.beside = subprocess.Popen(command, start_new_session=True)
    try:
        yield
    finally:
        end_group(arguments.beside)
        go.unlink(missing_ok=True)


def run_sglang(arguments: argparse.Namespace) -> None:
    """Raw SGLang on the prompts of the last iteration that is committed."""
    beside = getattr(arguments, "beside", None)
    if beside is None:
        measure("baseline_sglang", sglang_words(arguments), arguments.part_seconds)
        return
    (arguments.results.parent / f"{arguments.name}.go").touch()
    try:
        code = beside.wait(arguments.part_seconds)
    except subprocess.TimeoutExpired:
        code = 124
        end_group(beside)
    if code:
        print(f"benchmarks.gpu.baseline_sglang ended with {code}", file=sys.stderr, flush=True)


def sglang_words(arguments: argparse.Namespace) -> list[str]:
    """The command line of the raw baseline for this run."""
    model, _, store = paths(arguments)
    recipe = recipe_of(arguments)
    samples = recipe.rollout.groups * recipe.rollout.group_size
    under_way = recipe.inference.max_concurrent_requests * recipe.inference.groups_per_request
    options = {
        "--model": model,
        "--run": arguments.name,
        "--store": store,
        "--new-tokens": recipe.rollout.max_new_tokens,
        "--concurrency": min(samples, under_way * recipe.rollout.group_size),
        "--results": arguments.results,
    }
    changes = [f"{key}={value}" for key, value in overrides(arguments).items()]
    return [arguments.shape, *changes, *_words(options)]


def run_step(arguments: argparse.Namespace) -> None:
    """The plain compiled step on as many sequences as an iteration has, of their mean length."""
    recipe, ours = recipe_of(arguments), last_run(arguments)
    options = {
        "--variant": "layers",
        "--rows": recipe.rollout.groups * recipe.rollout.group_size,
        "--length": round(ours["mean_tokens"] / 8) * 8,
        "--results": arguments.results,
    }
    measure("baseline_step", [arguments.shape, *_words(options)], arguments.part_seconds)


def run_trl(arguments: argparse.Namespace) -> None:
    """TRL's iterations on the same prompts."""
    model, prompts, _ = paths(arguments)
    recipe = recipe_of(arguments)
    options = {
        "--model": model,
        "--prompts": prompts,
        "--groups": recipe.rollout.groups,
        "--size": recipe.rollout.group_size,
        "--new-tokens": recipe.rollout.max_new_tokens,
        "--results": arguments.results,
    }
    measure("baseline_trl_iteration", [arguments.shape, *_words(options)], arguments.part_seconds)


RUN = {"run": run_product, "sglang": run_sglang, "step": run_step, "trl": run_trl}


def last_run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The newest result of `run` for this shape."""
    found = [r for r in load(arguments.results) if r["what"] == "our_iteration" and r["shape"] == arguments.shape]
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
