"""SmolLM2-135M-Instruct learns GSM8K through the product: evaluate, SFT, evaluate, GRPO, evaluate.

    python -m benchmarks.gpu.learn_gsm8k --model FOLDER --data FOLDER [--seconds 560]

Call it again as often as needed: every step has a run of a fixed name, and goes on where the store stands. When the
time is over it writes what there is so far and ends; flow runs that are still at work are left alone (`--end leave`),
killed with everything they started (`kill`: what the next call resumes from), or stopped in order (`down`).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from areal_tasks.store.backend import Store, open_store
from benchmarks.gpu.learn_export import export
from benchmarks.gpu.product import ENDED, committed, deploy_run, follow, show_failure, start_machine, state, write_json
from flows.cli.machine import down
from flows.cli.processes import flow_processes, parts, running
from schemas.recipe.load import load_recipe

EVALUATE: Final = ("evaluate/smollm2-gsm8k", "smollm2-evaluate-gsm8k")
#: step -> (deployment, recipe); the run is named after the step.
STEPS: Final = {
    "eval-base": EVALUATE,
    "sft": ("sft/smollm2-gsm8k", "smollm2-sft-gsm8k"),
    "eval-sft": EVALUATE,
    "grpo": ("rlhf/smollm2-gsm8k", "smollm2-gsm8k"),
    "eval-grpo": EVALUATE,
}
AFTER: Final = {"eval-sft": "sft", "grpo": "sft", "eval-grpo": "grpo"}  # whose weights a step starts from
SETTLED: Final = 2  # iterations after which nothing of GRPO starts any more
LOOK_SECONDS: Final = 15.0
EXPORT_SECONDS: Final = 25.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--data", type=Path, required=True, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/learn"), help="store, logs, Prefect's database")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "/tmp/learn/out")))
    parser.add_argument("--seconds", type=float, default=560, help="end before so long has passed")
    parser.add_argument("--end", choices=("leave", "kill", "down"), default="leave", help="what is still at work then")
    parser.add_argument("--name", default="gsm8k", help="runs are called NAME-sft, NAME-grpo, …")
    for flow in ("all", "sft", "grpo", "evaluate"):
        parser.add_argument(f"--{flow}", default="", help=f"further overrides of {flow}, blanks between")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    store = open_store((arguments.folder.resolve() / "store").as_uri())
    alive = machine_runs(arguments.folder / "home")
    api_url = start_machine(arguments.folder / "home")
    known = flow_runs(arguments.folder) if alive else {}
    finished = work(api_url, store, arguments, known, deadline - EXPORT_SECONDS)
    end(api_url, "down" if finished else arguments.end)
    print(export(store, names(arguments.name), flow_runs(arguments.folder), arguments.out))
    print("finished" if finished else "not finished: call again to go on", flush=True)


def names(prefix: str) -> dict[str, str]:
    """The run of each step."""
    return {step: f"{prefix}-{step}" for step in STEPS}


def machine_runs(home: Path) -> bool:
    """Whether an earlier call's server and worker are still there (and with them its flow runs)."""
    os.environ["AREALFLOW_HOME"] = str(home)
    return bool(running())


def flow_runs(folder: Path) -> dict[str, list[str]]:
    """Ids of the flow runs that were started for each step, oldest first."""
    file = folder / "flow_runs.json"
    found: dict[str, list[str]] = json.loads(file.read_text()) if file.exists() else {}
    return found


def work(
    api_url: str, store: Store, arguments: argparse.Namespace, known: Mapping[str, list[str]], deadline: float
) -> bool:
    """Run what is missing, as much side by side as can be; True once every step has all its iterations."""
    going = {s: ids[-1] for s, ids in known.items() if state(api_url, ids[-1]) not in (*ENDED, "")}
    while time.monotonic() < deadline:
        left = missing(store, arguments)
        if not left:
            return True
        settled = committed(store, names(arguments.name)["grpo"]) >= SETTLED
        for step in ready(left, settled):
            if step not in going:
                going[step] = submit(api_url, arguments, step)
        ended = wait_for_one(api_url, store, arguments, going, deadline)
        for step, how in ended.items():
            del going[step]
            if how != "COMPLETED":
                show_failure(arguments.folder / "home", names(arguments.name)[step])
                raise SystemExit(f"{step} ended {how}")
    return not missing(store, arguments)


def missing(store: Store, arguments: argparse.Namespace) -> list[str]:
    """Steps whose runs do not have all their iterations yet."""
    run = names(arguments.name)
    return [s for s in STEPS if committed(store, run[s]) < planned(s, arguments)]


def planned(step: str, arguments: argparse.Namespace) -> int:
    """Iterations of a step's run."""
    if STEPS[step] == EVALUATE:
        return 1
    recipe = load_recipe(STEPS[step][1], [f"{k}={v}" for k, v in overrides(step, arguments).items()])
    return recipe.schedule.iterations  # type: ignore[union-attr]


def ready(left: Sequence[str], settled: bool) -> list[str]:
    """Steps that can run now: those whose weights are there, and on one GPU no two servers start at the same time.

    `settled`: GRPO's server and trainer have taken their memory.
    """
    return [s for s in left if AFTER.get(s) not in left and (settled or s != "eval-sft")]


def overrides(step: str, arguments: argparse.Namespace) -> dict[str, str]:
    """Of the step's recipe."""
    weights = f"run://{names(arguments.name)[AFTER[step]]}" if step in AFTER else str(arguments.model.resolve())
    own = {
        "store.url": (arguments.folder.resolve() / "store").as_uri(),
        "data.source": f"{arguments.data.resolve()}/{{split}}.jsonl",
        "data.subset": "",
        "model.path": weights,
    }
    flow = "evaluate" if STEPS[step] == EVALUATE else step
    if flow == "evaluate":
        # Of what is free when its server starts. SGLang counts as the server's own what the trainer of a concurrent
        # step takes meanwhile: 16.5 % of an H200 while SFT was starting.
        own["inference.memory_fraction"] = "0.25"
    more = f"{arguments.all} {getattr(arguments, flow)}".split()
    return own | dict(word.split("=", 1) for word in more)


def submit(api_url: str, arguments: argparse.Namespace, step: str) -> str:
    """Start a step's flow run, and remember it."""
    flow_run = deploy_run(api_url, STEPS[step][0], names(arguments.name)[step], overrides(step, arguments))
    known = flow_runs(arguments.folder)
    known.setdefault(step, []).append(flow_run)
    write_json(arguments.folder / "flow_runs.json", known)
    return flow_run


def wait_for_one(
    api_url: str, store: Store, arguments: argparse.Namespace, going: Mapping[str, str], deadline: float
) -> dict[str, str]:
    """Steps that have ended, with their states, as soon as there is one; none after `LOOK_SECONDS`, or the deadline."""
    run = names(arguments.name)

    def tell() -> str:
        return ", ".join(f"{s} {committed(store, run[s])}/{planned(s, arguments)}" for s in going)

    states = follow(api_url, going, min(deadline, time.monotonic() + LOOK_SECONDS), tell, first=True)
    return {step: how for step, how in states.items() if how in ENDED}


def end(api_url: str, how: str) -> None:
    """Leave what is at work alone, stop it in order, or kill all of it at once."""
    if how == "down":
        down()
    elif how == "kill":
        for process in (*flow_processes(), *parts("worker", "server")):
            process.kill()
        print("killed the worker with its flow runs, and the Prefect server", flush=True)


if __name__ == "__main__":
    main()
