"""SmolLM2-135M-Instruct on GSM8K with η = 4 and with η = 0, from the same SFT weights: runs side by side.

    python -m benchmarks.gpu.learn_asynchrony --model FOLDER --data FOLDER [--seeds 1,2] [--at-once 4]
        [--gpus 0,1] [--iterations 100] [--folder FOLDER] [key=value …]

With two GPUs all runs with η = 4 use the first and all others the second, so that each shares its GPU with its like.

Each is `arealflow run` of `smollm2-gsm8k` or `smollm2-gsm8k-async`, evaluated before and after (greedy, the whole test
set). One is started when the one before has committed an iteration, and the tokens of a server's cache are bounded:
while a server starts, SGLang counts what others free on the GPU as its own. FOLDER gets store, logs, a row of JSON for
each finished run, and reward.svg. Calling it again goes on where the store stands. `key=value` overrides fields of both
recipes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Final

from areal_tasks.store.backend import Store, open_store
from benchmarks.asynchrony_learning import Learned, learned, note, print_table
from benchmarks.asynchrony_on_cpu import rows
from benchmarks.asynchrony_plot import plot
from benchmarks.gpu.product import ROOT, committed

RECIPES: Final = {"eta-4": "smollm2-gsm8k-async", "eta-0": "smollm2-gsm8k"}
SFT, SFT_ITERATIONS = "smollm2-sft-gsm8k", 9
SIDE_BY_SIDE: Final = (
    "launcher.type=local",
    "inference.memory_fraction=0.12",
    "inference.flags.max-total-tokens=450000",
    "trainer.micro_batch_tokens=16384",
    "reward.workers=3",
)
LOOK_SECONDS: Final = 2.0
Running = dict[str, subprocess.Popen[bytes]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--data", type=Path, required=True, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/learn-asynchrony"))
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--at-once", type=int, default=4, help="runs side by side")
    parser.add_argument("--gpus", default="0", help="the GPU of runs with η = 4, and that of the others")
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    store = open_store((options.folder.resolve() / "store").as_uri())
    if committed(store, SFT) < SFT_ITERATIONS and (
        code := start(options, store, SFT, SFT, [f"model.path={options.model.resolve()}"]).wait()
    ):
        raise SystemExit(f"{SFT} ended with {code}: its log says why")
    length = [f"schedule.iterations={options.iterations}", f"evaluation.every={options.iterations}"]
    common = [*SIDE_BY_SIDE, *length, *options.overrides]
    going: Running = {}
    for seed, variant in product(map(int, options.seeds.split(",")), RECIPES):
        if committed(store, run := f"{variant}-{seed}") < options.iterations:
            going[run] = start(options, store, run, RECIPES[variant], [f"seed={seed}", *common])
            while not settled(store, run, going) or len(going) >= options.at_once:
                collect(store, going, options.folder)
    while going:
        collect(store, going, options.folder)
    show(options.folder)


def start(
    options: argparse.Namespace, store: Store, run: str, recipe: str, overrides: Sequence[str]
) -> subprocess.Popen[bytes]:
    """A process of its own: `arealflow run`."""
    data = [f"data.source={options.data.resolve()}/{{split}}.jsonl", "data.subset="]
    command = [sys.executable, "-c", "from flows.cli.main import main; main()", "run", recipe, f"run={run}"]
    gpus = options.gpus.split(",")
    environment = os.environ | {
        "AREALFLOW_STORE": store.url,
        "AREALFLOW_HOME": str(options.folder / "home" / run),
        "CUDA_VISIBLE_DEVICES": gpus[-1 if recipe == RECIPES["eta-0"] else 0],
    }
    options.folder.mkdir(parents=True, exist_ok=True)
    print(f"{time.strftime('%H:%M:%S')} starts {run}", flush=True)
    with (options.folder / f"{run}.log").open("ab") as log:
        return subprocess.Popen(
            [*command, *data, *overrides], cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
        )


def settled(store: Store, run: str, going: Running) -> bool:
    """Whether the run has taken its memory (or is over)."""
    return run not in going or committed(store, run) > 0


def collect(store: Store, going: Running, folder: Path) -> None:
    """Wait a moment; note what has ended meanwhile."""
    time.sleep(LOOK_SECONDS)
    for run, process in list(going.items()):
        if (code := process.poll()) is not None:
            del going[run]
            print(f"{time.strftime('%H:%M:%S')} {run} ended with {code}", flush=True)
            variant, _, seed = run.rpartition("-")
            if code == 0:
                note(learned(store, run, variant, int(seed)), folder / "learning.jsonl")


def show(folder: Path) -> None:
    """The table and the plot of all finished runs."""
    found = [Learned(**row) for row in rows(folder / "learning.jsonl")]
    plot(found, folder)
    print_table(found)


if __name__ == "__main__":
    main()
