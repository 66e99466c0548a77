"""SmolLM2-135M-Instruct on GSM8K with η = 4 and with η = 0, from the same SFT weights: runs side by side.

    python -m benchmarks.gpu.learn_asynchrony --model FOLDER --data FOLDER [--seeds 1,2] [--at-once 2] [--gpus 0,1]
        [--iterations 100] [--evaluate-every 20] [--seconds 560] [--folder FOLDER] [--out FOLDER] [key=value …]
    python -m benchmarks.gpu.learn_asynchrony --merge LEARNING.jsonl … [--out FOLDER]

Each is `arealflow run` of `smollm2-gsm8k` or `smollm2-gsm8k-async`, evaluated every so many versions (greedy, the whole
test set). Runs take the GPUs in turn, η = 4 before η = 0 of each seed: with two GPUs each shares its GPU with its like.
On one GPU, one is started when the one before has committed an iteration, and the tokens of a server's cache are
bounded: while a server starts, SGLang counts what others free on the GPU as its own.

OUT (FOLDER) gets a row of JSON for each finished run, and reward.svg; FOLDER store and logs. Before `--seconds` have
passed, what still runs is stopped. Calling it again goes on where the store stands; where the store is lost, with
further seeds, of which the two runs then share other SFT weights. With no seeds (`--seeds ""`) there is only the SFT.
`--merge` shows the rows of several calls. `key=value` overrides fields of both recipes. `--cpu` tries the script itself
(model: `benchmarks.gpu.shapes FOLDER tiny`).

The tables: reward; then accuracy of η = 4 less that of η = 0 of the same seed, after equal iterations, and at equal
wall-clock, when the first of the two had ended (between two evaluations on a straight line). The clock begins when the
first iteration has ended, and has the evaluations in it, but no restart.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Final

import numpy as np

from areal_tasks.store.backend import Store, open_store
from benchmarks.asynchrony_learning import Learned, learned, note, print_table
from benchmarks.asynchrony_on_cpu import rows
from benchmarks.asynchrony_plot import plot
from benchmarks.gpu.product import ROOT, committed
from benchmarks.gpu.results import device_name
from benchmarks.gpu.settings import ON_CPU, TRAINER_ON_CPU

RECIPES: Final = {"eta-4": "smollm2-gsm8k-async", "eta-0": "smollm2-gsm8k"}
SFT, SFT_ITERATIONS = "smollm2-sft-gsm8k", 9
SIDE_BY_SIDE: Final = (
    "launcher.type=local",
    "inference.memory_fraction=0.12",
    "inference.flags.max-total-tokens=450000",
    "trainer.micro_batch_tokens=16384",
    "reward.workers=3",
)
SFT_ON_CPU: Final = (*TRAINER_ON_CPU, "algorithm.batch_size=8", "algorithm.steps=2", "trainer.warmup_steps=0")
SMALL_ON_CPU: Final = (
    *ON_CPU,
    "rollout.groups=4",
    "rollout.group_size=4",
    "rollout.max_new_tokens=8",
    "trainer.warmup_steps=0",
    "evaluation.max_new_tokens=8",
    "inference.max_concurrent_requests=64",
    "reward.workers=1",
)
LOOK_SECONDS: Final = 2.0
END_SECONDS: Final = 20.0  # for the end of what is stopped
#: 97.5 % quantiles of Student's t with 1, 2, … degrees of freedom.
STUDENT: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
Running = dict[str, subprocess.Popen[bytes]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--merge", type=Path, nargs="+", help="show these files; nothing is run")
    parser.add_argument("--model", type=Path, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--data", type=Path, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/learn-asynchrony"))
    parser.add_argument("--out", type=Path, help="for what is to be kept; by default FOLDER")
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--at-once", type=int, default=2, help="runs side by side on each GPU")
    parser.add_argument("--gpus", default="0", help="that runs take in turn")
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--evaluate-every", type=int, default=20, help="versions")
    parser.add_argument("--seconds", type=float, default=560, help="end before so long has passed")
    parser.add_argument("--cpu", action="store_true", help="embedded servers, small sizes")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args()
    out: Path = options.out or options.folder
    out.mkdir(parents=True, exist_ok=True)
    if options.merge:
        show([Learned(**row) for file in options.merge for row in rows(file)], out)
        return
    if not (options.model and options.data):
        parser.error("--model and --data, or --merge")
    finished = work(options, out / "learning.jsonl", time.monotonic() + options.seconds - END_SECONDS)
    show([Learned(**row) for row in rows(out / "learning.jsonl")], out)
    print("finished" if finished else "not finished: call again to go on")


def work(options: argparse.Namespace, file: Path, deadline: float) -> bool:
    """Run what is missing until the deadline (monotonic seconds); whether all has ended."""
    store, gpus = open_store((options.folder.resolve() / "store").as_uri()), options.gpus.split(",")
    runs = [f"{variant}-{seed}" for seed, variant in product(seeds_of(options), RECIPES)]
    gpu_of = {run: gpus[place % len(gpus)] for place, run in enumerate(runs)}
    left = [run for run in runs if committed(store, run) < options.iterations]
    going: Running = {}
    if committed(store, SFT) < SFT_ITERATIONS:
        model = [f"model.path={options.model.resolve()}", *(SFT_ON_CPU if options.cpu else ())]
        going[SFT] = start(options, store, SFT, SFT, gpus[0], model)
    try:
        while (left or going) and time.monotonic() < deadline:
            for run in list(left):
                if may_start(store, options, going, gpu_of, run):
                    left.remove(run)
                    recipe = RECIPES[run.rpartition("-")[0]]
                    going[run] = start(options, store, run, recipe, gpu_of[run], overrides(options, run))
            collect(store, going, file)
    finally:
        stop(going)
    note_missing(store, options, file)
    return committed(store, SFT) >= SFT_ITERATIONS and all(
        committed(store, run) >= options.iterations for run in gpu_of
    )


def seeds_of(options: argparse.Namespace) -> list[int]:
    return [int(seed) for seed in options.seeds.split(",") if seed]


def overrides(options: argparse.Namespace, run: str) -> list[str]:
    """Of a run's recipe."""
    length = [f"schedule.iterations={options.iterations}", f"evaluation.every={options.evaluate_every}"]
    cpu = SMALL_ON_CPU if options.cpu else ()
    return [f"seed={run.rpartition('-')[2]}", *SIDE_BY_SIDE, *cpu, *length, *options.overrides]


def may_start(store: Store, options: argparse.Namespace, going: Running, gpu_of: dict[str, str], run: str) -> bool:
    """Whether the SFT has ended, there is room on this run's GPU, and the runs there have taken their memory."""
    beside = [other for other in going if gpu_of.get(other) == gpu_of[run]]
    return SFT not in going and len(beside) < options.at_once and all(committed(store, other) > 0 for other in beside)


def start(
    options: argparse.Namespace, store: Store, run: str, recipe: str, gpu: str, changes: Sequence[str]
) -> subprocess.Popen[bytes]:
    """A process of its own: `arealflow run`."""
    data = [f"data.source={options.data.resolve()}/{{split}}.jsonl", "data.subset="]
    command = [sys.executable, "-c", "from flows.cli.main import main; main()", "run", recipe, f"run={run}"]
    environment = os.environ | {
        "AREALFLOW_STORE": store.url,
        "AREALFLOW_HOME": str(options.folder / "home" / run),
        "CUDA_VISIBLE_DEVICES": gpu,
    }
    options.folder.mkdir(parents=True, exist_ok=True)
    print(f"{time.strftime('%H:%M:%S')} starts {run} on GPU {gpu}", flush=True)
    with (options.folder / f"{run}.log").open("ab") as log:
        return subprocess.Popen(
            [*command, *data, *changes], cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
        )


def collect(store: Store, going: Running, file: Path) -> None:
    """Wait a moment; note what has ended meanwhile. SystemExit if that is the SFT, and it has failed."""
    time.sleep(LOOK_SECONDS)
    for run, process in list(going.items()):
        if (code := process.poll()) is not None:
            del going[run]
            print(f"{time.strftime('%H:%M:%S')} {run} ended with {code}", flush=True)
            if code and run == SFT:
                raise SystemExit(f"{SFT} ended with {code}: its log says why")
            if not code and run != SFT:
                note_run(store, run, file)


def stop(going: Running) -> None:
    """Have what still runs end in order, so that a later call can go on."""
    for process in going.values():
        process.terminate()
    for run, process in going.items():
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"{run} has not ended within {END_SECONDS:.0f} s: it is killed", flush=True)
            process.kill()


def note_run(store: Store, run: str, file: Path) -> None:
    """Append the row of a finished run."""
    variant, _, seed = run.rpartition("-")
    note(replace(learned(store, run, variant, int(seed)), device=device_name()), file)


def note_missing(store: Store, options: argparse.Namespace, file: Path) -> None:
    """Append the rows of runs that an earlier call has finished, but not noted here."""
    there = {f"{row['variant']}-{row['seed']}" for row in rows(file)}
    for seed, variant in product(seeds_of(options), RECIPES):
        if (run := f"{variant}-{seed}") not in there and committed(store, run) >= options.iterations:
            note_run(store, run, file)


# ── what they have learned ──────────────────────────────────────────────────────────────────────────────────────────


def show(found: Sequence[Learned], folder: Path) -> None:
    """The tables and the plot of all finished runs; of a run that there is twice, the last."""
    newest = list({(one.variant, one.seed): one for one in found}.values())
    if newest:
        plot(newest, folder)
    print_table(newest)
    print_comparison(newest)


def print_comparison(found: Sequence[Learned]) -> None:
    """Accuracy of η = 4 and of η = 0, seed by seed."""
    by = {(one.variant, one.seed): one for one in found}
    seeds = sorted(seed for variant, seed in by if variant == "eta-4" and ("eta-0", seed) in by)
    pairs = [(by["eta-4", seed], by["eta-0", seed]) for seed in seeds]
    print(COMPARISON)
    after, then = [], []
    for pair in pairs:
        until = min(one.elapsed[-1] for one in pair)
        ends, clock = [one.accuracy for one in pair], [accuracy_at(one, until) for one in pair]
        after.append(ends[0] - ends[1])
        then.append(clock[0] - clock[1])
        parts = (
            *(f"{pair[0].seed}", pair[0].device, " ".join(dict.fromkeys(one.source[:8] for one in pair))),
            *(f"{pair[0].questions}", f"{len(pair[0].rewards)}", " ".join(f"{100 * share:.2f}" for share in ends)),
            *(f"{until:.0f}", " ".join(str(iterations_at(one, until)) for one in pair)),
            " ".join(f"{100 * share:.2f}" for share in clock),
        )
        print(f"| {' | '.join(parts)} |")
    print(f"η = 4 less η = 0, points: after equal iterations {interval(after)}, at equal wall-clock {interval(then)}")


COMPARISON: Final = (
    "\n| seed | device | SFT | questions | iterations | accuracy of η = 4 and η = 0, % | at s | iterations then | "
    "accuracy then, % |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def iterations_at(one: Learned, seconds: float) -> int:
    """The iterations that had ended by then."""
    return sum(elapsed <= seconds for elapsed in one.elapsed)


def accuracy_at(one: Learned, seconds: float) -> float:
    """Of the weights at that time, on a line between the evaluations before and after it.

    Iteration v - 1 makes version v.
    """
    times = [one.elapsed[max(version, 1) - 1] for version, _ in one.accuracies]
    return float(np.interp(seconds, times, [accuracy for _, accuracy in one.accuracies]))


def interval(differences: Sequence[float]) -> str:
    """Their mean, in points, with Student's 95 % interval."""
    if not differences:
        return "unknown"
    points, runs = [100 * difference for difference in differences], len(differences)
    mean = f"{statistics.mean(points):+.2f}"
    if runs == 1:
        return f"{mean} (one seed)"
    half = STUDENT[runs - 2] * statistics.stdev(points) / runs**0.5
    return f"{mean} ± {half:.2f} ({runs} seeds)"


if __name__ == "__main__":
    main()
