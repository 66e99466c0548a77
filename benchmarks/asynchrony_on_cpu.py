"""Learning and speed of asynchronous runs, measured at the same time on a machine with many cores.

    python -m benchmarks.asynchrony_on_cpu FOLDER [--seeds 1,2,3,4,5] [--only VARIANT,…] [--iterations 250]
        [--speed-iterations 40] [--cores N] [--minutes 8]

Runs `asynchrony_learning` several times, each on its own physical cores (by default as many as have two CPUs), while
three other cores compare the speed (`asynchrony`; not with `--speed-iterations 0`). Failures and timeouts are reported.
FOLDER gets rows of JSON, a plot of the rewards (reward.svg) and the logs of the runs. Existing rows are shown with the
new ones: several calls can share the work.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_tasks.store.backend import open_store
from benchmarks import asynchrony, asynchrony_learning
from benchmarks.asynchrony_learning import VARIANTS, Learned
from benchmarks.asynchrony_plot import plot
from benchmarks.bare_loop import machine
from benchmarks.on_cores import Job, physical_cores, run_all
from benchmarks.overhead import warm_up


def main() -> None:
    options = parser().parse_args()
    until = time.monotonic() + 60 * options.minutes
    folder: Path = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{machine()}, {len(physical_cores())} physical cores for this benchmark", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        store = open_store((Path(scratch) / "store").as_uri())
        warm_up(store, Path(scratch))
        jobs = [*speed(options, folder), *learning(options, folder, store.url)]
        wrong = run_all(jobs, folder / "logs", until)
    show(folder)
    for name, end in wrong.items():
        print(f"FAILED {name}: {end}")
    raise SystemExit(bool(wrong))


def speed(options: argparse.Namespace, folder: Path) -> list[Job]:
    """The job that compares the speed: one core each for server, trainer and flow, or two if there are no more."""
    if not options.speed_iterations:
        return []
    arguments = ["--iterations", str(options.speed_iterations), "--rows", str(folder / "speed.jsonl")]
    return [Job("speed", asynchrony.__name__, arguments, min(3, len(physical_cores())))]


def learning(options: argparse.Namespace, folder: Path, store: str) -> list[Job]:
    """The jobs that train, seed by seed, so that those done when the time is over are complete for some seeds."""
    length = [f"schedule.iterations={options.iterations}", f"evaluation.every={options.iterations}"]
    common = ["--store", store, "--rows", str(folder / "learning.jsonl"), *length]
    there = physical_cores()
    cores = options.cores or min(len(there), 1 if len(there[0]) > 1 else 2)
    chosen = [(seed, name) for seed in options.seeds.split(",") for name in options.only.split(",")]
    return [
        Job(f"{name}-{seed}", asynchrony_learning.__name__, ["--seeds", seed, "--only", name, *common], cores)
        for seed, name in chosen
    ]


def show(folder: Path) -> None:
    """Plot and print all existing rows."""
    learned = [Learned(**row) for row in rows(folder / "learning.jsonl")]
    if learned:
        plot(learned, folder)
    print(machine())
    asynchrony_learning.print_table(learned)
    print()
    asynchrony.print_table([asynchrony.Measured(**row) for row in rows(folder / "speed.jsonl")])


def rows(path: Path) -> Sequence[Mapping[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("folder", type=Path)
    made.add_argument("--seeds", default="1,2,3,4,5")
    made.add_argument("--only", default=",".join(VARIANTS), help="variants")
    made.add_argument("--iterations", type=int, default=250)
    made.add_argument("--speed-iterations", type=int, default=40)
    made.add_argument("--cores", type=int, help="physical cores of a learning run")
    made.add_argument("--minutes", type=float, default=8.0)
    return made


if __name__ == "__main__":
    main()
