"""A finished run, simulated with its own times: the ratio of simulated to measured time.

    python -m benchmarks.simulate_run --store URL RUN --decoding RUN0
    python -m benchmarks.simulate_run --store URL RUN --times times.json [--generating 1] [--training 1]

Lengths, batches and η are the run's, and so are the mean times of its stages: training (with `proximal` and
`reference`), publication, and the rest as a fixed part. Only the time of a decoding step comes from another source: a
synchronous run of the same recipe and servers (`--decoding`), or a file with fields of `simulate.Times`, which override
those of the run. Prints seconds per iteration, simulated and measured, and their ratio.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.query import run_sql
from areal_tasks.store.runs import load_run
from benchmarks.overhead import WARM, per_iteration
from benchmarks.simulate import Layout, Simulation, Times
from schemas.recipe.derived import interruption
from schemas.recipe.load import parse_recipe
from schemas.recipe.recipe import RlhfRecipe

LENGTHS: Final = (
    "SELECT group_id, list(num_generated ORDER BY sample_index) AS lengths, avg(num_tokens - num_generated) AS prompt "
    "FROM rollout GROUP BY 1"
)
STAGES: Final = f"SELECT stage, sum(seconds) AS seconds FROM stages WHERE iteration >= {WARM} GROUP BY 1"
TOKENS: Final = f"SELECT sum(num_tokens)::BIGINT AS tokens FROM rollout WHERE iteration >= {WARM}"
#: A synchronous rollout lasts as long as its longest sample, and one step more for the prompt.
STEP: Final = (
    "SELECT avg(s.seconds / (r.longest + 1)) AS step FROM stages s JOIN "
    "(SELECT iteration, max(num_generated) AS longest FROM rollout GROUP BY 1) r USING (iteration) "
    f"WHERE s.stage = 'rollout' AND iteration >= {WARM}"
)
TRAINING: Final = ("train", "proximal", "reference", "values")
MEASURED_STAGES: Final = ("rollout", "publish", "evaluate", *TRAINING)  # what is not a fixed part of each iteration


@dataclass(frozen=True)
class Recorded:
    """The load of a run: what it generated, by group."""

    groups: int
    group_size: int
    prompt: float
    iterations: int
    by_group: Mapping[int, Sequence[int]]

    def lengths(self, index: int) -> Sequence[int]:
        return self.by_group[index]


@dataclass(frozen=True)
class Compared:
    """Seconds per iteration, without the first few."""

    simulated: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.simulated / self.measured


def compare(store: Store, run: str, times: Times, generating: int = 1, training: int = 1) -> Compared:
    """The run, simulated with these times."""
    recipe = recipe_of(store, run)
    layout = Layout(
        *(generating, training, recipe.rollout.max_head_offpolicyness, recipe.rollout.bound),
        mode=interruption(recipe) or "in_place",
        slots=recipe.inference.slots,
        pace=recipe.rollout.pace,
    )
    ends = Simulation(recorded(store, run, recipe), layout, times).run().ends
    return Compared((ends[-1] - ends[WARM]) / (len(ends) - 1 - WARM), per_iteration(store, run) / 1000)


def recorded(store: Store, run: str, recipe: RlhfRecipe) -> Recorded:
    rows = run_sql(store, run, LENGTHS).to_pylist()
    prompt = sum(row["prompt"] for row in rows) / len(rows)
    lengths = {row["group_id"]: row["lengths"] for row in rows}
    return Recorded(recipe.rollout.groups, recipe.rollout.group_size, prompt, recipe.schedule.iterations, lengths)


def times_of(store: Store, run: str, step: float, training: int = 1) -> Times:
    """The times of a run; `step`: seconds of a decoding step, which the run has not measured."""
    stages = {row["stage"]: row["seconds"] for row in run_sql(store, run, STAGES).to_pylist()}
    [row] = run_sql(store, run, TOKENS).to_pylist()
    count = recipe_of(store, run).schedule.iterations - WARM
    whole = run_sql(store, run, f"SELECT sum(seconds) AS s FROM commits WHERE iteration >= {WARM}").to_pylist()[0]["s"]
    trained = sum(stages.get(name, 0.0) for name in TRAINING)
    rest = whole - sum(stages.get(name, 0.0) for name in MEASURED_STAGES)
    return Times(
        step=step,
        step_per_sample=0.0,
        prefill_rate=1 / step,  # about one step for all prompts
        train_rate=row["tokens"] / trained / training,
        train_fixed=max(rest, 0.0) / count,
        publish=stages["publish"] / count,
        publish_waits=True,
    )


def step_of(store: Store, run: str) -> float:
    """Seconds of a decoding step, by a synchronous run."""
    return float(run_sql(store, run, STEP).to_pylist()[0]["step"])


def recipe_of(store: Store, run: str) -> RlhfRecipe:
    return cast(RlhfRecipe, parse_recipe(load_run(store, run).recipe_at(0)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--store", default="")
    parser.add_argument("--decoding", help="a synchronous run in the same store")
    parser.add_argument("--times", type=Path, help="JSON with fields of Times")
    parser.add_argument("--generating", type=int, default=1, help="servers")
    parser.add_argument("--training", type=int, default=1, help="GPUs of the trainer")
    options = parser.parse_args()
    store = open_store(options.store)
    given: dict[str, Any] = json.loads(options.times.read_text()) if options.times else {}
    step = step_of(store, options.decoding) if options.decoding else given["step"]
    times = replace(times_of(store, options.run, step, options.training), **given)
    found = compare(store, options.run, times, options.generating, options.training)
    print(times)
    print(f"{options.run}: simulated {found.simulated:.3f} s, measured {found.measured:.3f} s, {found.ratio:.2f}")


if __name__ == "__main__":
    main()
