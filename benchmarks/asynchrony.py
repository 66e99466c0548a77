"""The speed-up by generation during training on a CPU, where each of the two has one core.

    python -m benchmarks.asynchrony [--iterations 40] [--rounds 1] [--etas 1,2,4] [--rows FILE] [key=value …]

A small randomly initialised model, whose samples end at random (their lengths have a tail), is trained with a learning
rate of 1e-9, so that every configuration has the same work. First unpinned and synchronous: two cores for server and
trainer in turn. Then each of the two is pinned to one core: synchronous, and with each η. The flow's process is not
pinned. An iteration's time is the difference between two commits. `key=value` overrides fields of the recipe.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, cast

from areal_tasks.launchers.local import LocalHandle, LocalLauncher
from areal_tasks.launchers.protocol import Job
from areal_tasks.store.backend import open_store
from areal_tasks.store.query import run_sql
from benchmarks.bare_loop import machine
from benchmarks.on_cores import physical_cores
from benchmarks.overhead import run_loop
from benchmarks.simulate_run import compare, step_of, times_of
from schemas.recipe.load import load_recipe
from schemas.recipe.recipe import RlhfRecipe

RECIPE: Final = (
    *("model.warm_start=", "model.scratch={}", "model.max_length=80", "evaluation={}"),
    *("rollout.max_new_tokens=64", "trainer.lr=1e-9", "trainer.lr_schedule=constant", "trainer.lr_final=1"),
)
LAGS: Final = "SELECT lag, sum(num_generated)::BIGINT AS tokens FROM samples GROUP BY lag ORDER BY lag"
STAGES: Final = "SELECT stage, avg(seconds) AS seconds FROM stages WHERE stage IN ('rollout', 'train') GROUP BY stage"


UNPINNED: Final = "unpinned, η = 0"
PINNED: Final = "pinned, η = "


@dataclass(frozen=True)
class Measured:
    """Seconds per iteration; mean seconds of the stages rollout and train; shares of tokens by their sample's lag.

    `step`: seconds of a decoding step, measured in this run if it is synchronous, else in the previous one;
    `simulated`: seconds per iteration that `simulate_run` computes with it.
    """

    name: str
    seconds: float
    stages: Mapping[str, float]
    lags: Mapping[int, float]
    step: float = math.nan
    simulated: float = math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=1, help="repeat all configurations so often, in turns")
    parser.add_argument("--etas", default="1,2,4")
    parser.add_argument("--rows", type=Path, help="append a line of JSON for each run to this file")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    print(machine())
    configurations = [(0, False), *((eta, True) for eta in (0, *map(int, options.etas.split(","))))]
    overrides = [*options.overrides, f"schedule.iterations={options.iterations}"]
    found: list[Measured] = []
    for eta, pinned in configurations * options.rounds:
        found.append(measure(eta, pinned, overrides, found[-1].step if found else 0.0))
        if options.rows:
            with options.rows.open("a") as file:
                file.write(json.dumps(asdict(found[-1])) + "\n")
    print_table(found)


def measure(eta: int, pinned: bool, overrides: Sequence[str], step: float) -> Measured:
    """One run, in its own store; `step`: that of a previous synchronous run."""
    threads = 1 if pinned else 2
    own = [f"rollout.max_head_offpolicyness={eta}", f"inference.threads={threads}", f"trainer.threads={threads}"]
    recipe = cast(RlhfRecipe, load_recipe("quickstart", [*RECIPE, *overrides, *own]))
    with tempfile.TemporaryDirectory() as folder, pinning(pinned):
        store = open_store((Path(folder) / "store").as_uri())
        run_loop(store, "run", recipe, Path(folder))
        stages = {row["stage"]: row["seconds"] for row in run_sql(store, "run", STAGES).to_pylist()}
        lags = {row["lag"]: row["tokens"] for row in run_sql(store, "run", LAGS).to_pylist()}
        shares = {lag: tokens / sum(lags.values()) for lag, tokens in lags.items()}
        name = f"{PINNED}{eta}" if pinned else UNPINNED
        step = step if eta else step_of(store, "run")
        compared = compare(store, "run", times_of(store, "run", step))
        return Measured(name, compared.measured, stages, shares, step, compared.simulated)


@contextmanager
def pinning(pinned: bool) -> Iterator[None]:
    """While inside, if `pinned`, the trainer of a run is started on one core, and the other services on another.

    Raises:
        SystemExit: there is only one core.
    """
    cores = [set(core[:1]) for core in physical_cores()]
    if len(cores) < 2:
        raise SystemExit("Pinning needs two cores.")
    start = LocalLauncher.start

    def start_pinned(self: LocalLauncher, job: Job) -> LocalHandle:
        handle = start(self, job)
        own = cores[1] if job.spec.name == "trainer" else cores[0]
        os.sched_setaffinity(handle.process.pid, own if pinned else cores[0] | cores[1])
        return handle

    LocalLauncher.start = start_pinned  # type: ignore[method-assign]
    try:
        yield
    finally:
        LocalLauncher.start = start  # type: ignore[method-assign]


def print_table(found: Sequence[Measured]) -> None:
    """Print a row for each configuration: medians, and the shares of the last run."""
    names = list(dict.fromkeys(one.name for one in found))
    seconds = {name: statistics.median(one.seconds for one in found if one.name == name) for name in names}
    base = seconds.get(f"{PINNED}0", float("nan"))
    print(
        "| configuration | s per iteration | over pinned, η = 0 | rollout | train | simulated ÷ real | tokens by lag |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, last in {one.name: one for one in found}.items():
        lags = " ".join(f"{lag}:{share:.0%}" for lag, share in last.lags.items())
        ratio = last.simulated / last.seconds
        stages = " | ".join(f"{last.stages[stage]:.3f}" for stage in ("rollout", "train"))
        print(f"| {name} | {seconds[name]:.3f} | {base / seconds[name]:.2f} | {stages} | {ratio:.2f} | {lags} |")


if __name__ == "__main__":
    main()
