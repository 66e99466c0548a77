"""How long `arealflow run` of a tiny recipe takes to commit its first iteration, and to report a mistake.

    python -m benchmarks.startup [--rounds 3] [--against CHECKOUT] [launcher.type=local …]

Each round runs the recipe in an empty home, where Prefect's database is created, too; then once more in the same home;
then a recipe that names data that does not exist. `--against`: another checkout does the same in turn, by this Python.
CPU seconds are those of the command and of everything it starts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.bare_loop import machine

HERE: Final = Path(__file__).resolve().parents[1]
RECIPE: Final = """\
name: tiny
flow: rlhf
model: {scratch: {layers: 1, hidden: 16, heads: 2, intermediate: 16}, max_length: 12}
data: {source: "sums://2"}
rollout: {groups: 4, group_size: 4, max_new_tokens: 3}
reward: {verifier: exact}
trainer: {micro_batch_tokens: 64, threads: 1}
inference: {slots: 16, groups_per_request: 4, threads: 1}
schedule: {iterations: 1}
"""
COMMITTED: Final = "iteration 0 done"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=Path, help="the root of another checkout")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    checkouts = [HERE, *([arguments.against.resolve()] if arguments.against else [])]
    print(machine())
    print(f"{'load':>5}  {'what':13} {'first iteration':>15} {'end':>7} {'CPU s':>6}  checkout")
    for _ in range(arguments.rounds):
        for checkout in checkouts:
            with tempfile.TemporaryDirectory() as home:
                measure(checkout, Path(home), arguments.overrides)


def measure(checkout: Path, home: Path, overrides: Sequence[str]) -> None:
    """Run the three commands, and print a line for each."""
    (recipe := home / "tiny.yaml").write_text(RECIPE)
    for what, words in {
        "empty home": ["run=first", *overrides],
        "again": ["run=second", *overrides],
        "mistake": ["data.source=/no/such/{split}.jsonl", *overrides],
    }.items():
        committed, seconds, cpu = timed(checkout, home, ["run", str(recipe), *words])
        first = f"{committed:.1f} s" if committed else ""
        load = os.getloadavg()[0]
        print(f"{load:5.1f}  {what:13} {first:>15} {seconds:5.1f} s {cpu:6.1f}  {checkout}", flush=True)


def timed(checkout: Path, home: Path, words: Sequence[str]) -> tuple[float, float, float]:
    """Seconds until the first iteration (0: there was none) and until the end, and CPU seconds."""
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    environment |= {"AREALFLOW_HOME": str(home), "PYTHONPATH": str(checkout), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-P", "-c", "from flows.cli.main import main; main()", *words]
    before, began, committed = os.times(), time.monotonic(), 0.0
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if COMMITTED in line:
                committed = time.monotonic() - began
    seconds, after = time.monotonic() - began, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return committed, seconds, cpu


if __name__ == "__main__":
    main()
