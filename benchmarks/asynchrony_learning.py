"""What old samples cost in learning: the quickstart with several η, from the same SFT weights, with several seeds.

    python -m benchmarks.asynchrony_learning [--seeds 1,2,3,4,5] [--only VARIANT,…] [key=value …]

For each variant: the mean reward of the last tenth of the iterations, its difference to the synchronous run of the same
seed, the accuracy after the last iteration, and the greatest lag. `key=value` overrides fields of the recipe.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.query import run_sql
from benchmarks.bare_loop import machine
from benchmarks.overhead import run_loop, warm_up
from schemas.recipe.load import load_recipe
from schemas.recipe.recipe import RlhfRecipe

VARIANTS: Final[Mapping[str, tuple[str, ...]]] = {
    "eta-0": (),
    "eta-2": ("rollout.max_head_offpolicyness=2",),
    "eta-4": ("rollout.max_head_offpolicyness=4",),
    "eta-4-plain-ppo": ("rollout.max_head_offpolicyness=4", "algorithm.decoupled=false"),
    "eta-4-abort": ("rollout.max_head_offpolicyness=4", "rollout.interruption=abort"),
}
REWARD: Final = (
    "SELECT avg(reward) AS reward, max(lag) AS lag FROM samples "
    "WHERE iteration >= (SELECT floor(0.9 * (max(iteration) + 1)) FROM samples)"
)
ACCURACY: Final = "SELECT avg((verdict = 'correct')::INT) AS accuracy FROM evaluate GROUP BY weights_version"
LAST: Final = f"{ACCURACY} ORDER BY weights_version DESC LIMIT 1"


@dataclass(frozen=True)
class Learned:
    """One run: mean reward at its end, accuracy after it, and the greatest lag of a sample there."""

    reward: float
    accuracy: float
    lag: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2,3,4,5")
    parser.add_argument("--only", default=",".join(VARIANTS), help="variants")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    print(machine())
    chosen = [name for name in VARIANTS if name in options.only.split(",")]
    found: dict[str, list[Learned]] = {name: [] for name in chosen}
    with tempfile.TemporaryDirectory() as folder:
        store = open_store((Path(folder) / "store").as_uri())
        warm_up(store, Path(folder))
        for seed in map(int, options.seeds.split(",")):
            for name in chosen:
                found[name].append(learn(store, Path(folder), name, seed, options.overrides))
                print(f"seed {seed}, {name}: {found[name][-1]}", flush=True)
    print_table(found)


def learn(store: Store, folder: Path, name: str, seed: int, overrides: Sequence[str]) -> Learned:
    """One run from the shared SFT weights."""
    own = ["model.warm_start=", "model.path=run://warm", f"seed={seed}", *overrides, *VARIANTS[name]]
    run = f"{name}-{seed}"
    run_loop(store, run, cast(RlhfRecipe, load_recipe("quickstart", own)), folder)
    [ended], [last] = run_sql(store, run, REWARD).to_pylist(), run_sql(store, run, LAST).to_pylist()
    return Learned(ended["reward"], last["accuracy"], ended["lag"])


def print_table(found: Mapping[str, Sequence[Learned]]) -> None:
    base = next(iter(found.values()))
    print("| variant | reward at the end | difference to the first, by seed | mean | accuracy | greatest lag |")
    print("|---|---|---|---|---|---|")
    for name, runs in found.items():
        apart = [one.reward - other.reward for one, other in zip(runs, base, strict=True)]
        reward, accuracy = (statistics.mean(getattr(run, what) for run in runs) for what in ("reward", "accuracy"))
        by_seed = " ".join(f"{d:+.3f}" for d in apart)
        lag = max(run.lag for run in runs)
        print(f"| {name} | {reward:.3f} | {by_seed} | {statistics.mean(apart):+.3f} | {accuracy:.3f} | {lag} |")


if __name__ == "__main__":
    main()
