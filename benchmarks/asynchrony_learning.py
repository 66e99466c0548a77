"""The effect of old samples on learning: the quickstart with several η, from the same SFT weights, by several seeds.

    python -m benchmarks.asynchrony_learning [--seeds 1,2,3,4,5] [--only VARIANT,…] [key=value …]

For each variant: the mean reward of the last tenth of the iterations, its difference to the synchronous run of the same
seed, the accuracy after the last iteration, the greatest lag, and the share of tokens over older KV caches.
`key=value` overrides fields of the recipe. `benchmarks.asynchrony_on_cpu` runs many at a time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, cast

from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.query import run_sql
from benchmarks.bare_loop import machine
from benchmarks.overhead import run_loop, warm_up
from schemas.recipe.load import load_recipe
from schemas.recipe.recipe import RlhfRecipe

ETA_4: Final = "rollout.max_head_offpolicyness=4"
#: Overrides of the recipe. A sample of the quickstart takes a few ms, so that new weights never interrupt one.
VARIANTS: Final[Mapping[str, Sequence[str]]] = {
    "eta-0": (),
    "eta-2": ("rollout.max_head_offpolicyness=2",),
    "eta-4": (ETA_4,),
    "eta-4-plain-ppo": (ETA_4, "algorithm.decoupled=false"),
}
#: Server and trainer compute on one thread each in all variants: they share a run's cores where η > 0.
SHARED: Final = ("model.warm_start=", "model.path=run://warm", "inference.threads=1", "trainer.threads=1")
#: A restart takes no time on this clock: the first iteration of a later start counts as the median of the others.
CURVE: Final = (
    "WITH each AS (SELECT iteration, CASE WHEN owner = lag(owner) OVER earlier THEN "
    "epoch(committed) - lag(epoch(committed)) OVER earlier END AS seconds FROM commits "
    "WINDOW earlier AS (ORDER BY iteration)), clock AS (SELECT iteration, sum(CASE WHEN iteration = 0 THEN 0 ELSE "
    "coalesce(seconds, (SELECT median(seconds) FROM each), 0) END) OVER (ORDER BY iteration) AS elapsed FROM each) "
    "SELECT avg(reward) AS reward, max(lag) AS lag, any_value(elapsed) AS elapsed "
    "FROM samples JOIN clock USING (iteration) GROUP BY iteration ORDER BY iteration"
)
EVALUATED: Final = (
    "SELECT weights_version AS version, avg((verdict = 'correct')::INT) AS accuracy, count(*) AS questions "
    "FROM evaluate GROUP BY 1 ORDER BY 1"
)
SOURCE: Final = "SELECT sha256 FROM initial_weights"
STALE: Final = "SELECT avg(stale_kv::INT) AS share FROM tokens WHERE version >= 0"


@dataclass(frozen=True)
class Learned:
    """One run: by iteration its mean reward and the seconds since the first one ended; accuracy after the last.

    `lag` is the greatest of a sample, `stale_kv` the share of generated tokens over a cache of older weights.
    `accuracies`: (version, accuracy) of all evaluations, with so many `questions` each. `source`: SHA-256 of the
    weights that the run began with.
    """

    variant: str
    seed: int
    rewards: Sequence[float]
    elapsed: Sequence[float]
    accuracy: float
    lag: int
    stale_kv: float
    accuracies: Sequence[tuple[int, float]] = ()
    questions: int = 0
    source: str = ""
    device: str = ""

    @property
    def reward(self) -> float:
        """The mean reward of the last tenth of the iterations."""
        return statistics.mean(self.rewards[len(self.rewards) * 9 // 10 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2,3,4,5")
    parser.add_argument("--only", default=",".join(VARIANTS), help="variants")
    parser.add_argument("--store", help="where a run `warm` is already, and runs are made; by default a new one")
    parser.add_argument("--rows", type=Path, help="append a line of JSON for each run to this file")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    print(machine())
    chosen = [name for name in VARIANTS if name in options.only.split(",")]
    found: list[Learned] = []
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(options.store or (Path(folder) / "store").as_uri())
        if not options.store:
            warm_up(store, Path(folder))
        for seed in map(int, options.seeds.split(",")):
            for name in chosen:
                found.append(learn(store, Path(folder), name, seed, options.overrides))
                note(found[-1], options.rows)
    print_table(found)


def note(learned: Learned, rows: Path | None) -> None:
    print(f"seed {learned.seed}, {learned.variant}: reward {learned.reward:.3f}", flush=True)
    if rows:
        with rows.open("a") as file:
            file.write(json.dumps(asdict(learned)) + "\n")


def learn(store: Store, folder: Path, variant: str, seed: int, overrides: Sequence[str]) -> Learned:
    """One run from the shared SFT weights."""
    run = f"{variant}-{seed}"
    recipe = load_recipe("quickstart", [*SHARED, f"seed={seed}", *overrides, *VARIANTS[variant]])
    run_loop(store, run, cast(RlhfRecipe, recipe), folder)
    return learned(store, run, variant, seed)


def learned(store: Store, run: str, variant: str, seed: int) -> Learned:
    """The result of a finished run, from its tables."""
    curve = run_sql(store, run, CURVE).to_pydict()
    evaluated, [stale], [source] = (run_sql(store, run, query).to_pylist() for query in (EVALUATED, STALE, SOURCE))
    return Learned(
        variant=variant,
        seed=seed,
        rewards=curve["reward"],
        elapsed=curve["elapsed"],
        accuracy=evaluated[-1]["accuracy"],
        lag=max(curve["lag"]),
        stale_kv=stale["share"],
        accuracies=[(one["version"], one["accuracy"]) for one in evaluated],
        questions=evaluated[-1]["questions"],
        source=source["sha256"],
    )


def print_table(found: Sequence[Learned]) -> None:
    """Print a row per variant: means over seeds, and differences to the synchronous run of the same seed."""
    base = {one.seed: one.reward for one in found if one.variant == "eta-0"}
    print(
        "| variant | runs | reward at the end | less eta-0, by seed | mean | accuracy | greatest lag | stale_kv | s |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for variant in VARIANTS:
        if runs := sorted((one for one in found if one.variant == variant), key=lambda one: one.seed):
            print(_row(variant, runs, base))


def _row(variant: str, runs: Sequence[Learned], base: Mapping[int, float]) -> str:
    gains = [one.reward - base[one.seed] for one in runs if one.seed in base]
    reward, accuracy, stale = (
        statistics.mean(getattr(one, name) for one in runs) for name in ("reward", "accuracy", "stale_kv")
    )
    by_seed, mean = " ".join(f"{d:+.3f}" for d in gains), f"{statistics.mean(gains):+.3f}" if gains else ""
    lag, seconds = max(one.lag for one in runs), statistics.median(one.elapsed[-1] for one in runs)
    shown = f"{reward:.3f} | {by_seed} | {mean} | {accuracy:.3f} | {lag} | {stale:.2%} | {seconds:.0f}"
    return f"| {variant} | {len(runs)} | {shown} |"


if __name__ == "__main__":
    main()
