"""Runs under one fixed load, by layout and η: what their tables say, as a file each, and the table of all of them.

    python -m benchmarks.gpu.fixed_load collect STORE RUN LOGS RESULT.json
    python -m benchmarks.gpu.fixed_load table RESULT.json … [--baseline SECONDS]
    python -m benchmarks.gpu.fixed_load training RESULT.json …
    python -m benchmarks.gpu.fixed_load idle RESULT.json

`benchmarks/gpu/fixed_load.sh` makes the runs. An iteration's seconds are those between two commits. The first one of
each start of the run has none: a restart is no iteration's time. `table` leaves out the first η + 1 iterations of each
start, where services warm up and the pipeline fills (after a restart all groups under way begin again together, with
one version, as at first), and the last η of the run, for which nothing is generated any more. `training` says how fast
the ranks train, what memory they take, and how long a publication is. `idle` says when the trainer had nothing to do,
by iteration, and what saving has to do with it. `simulate_fixed_load.py` compares a run with its simulation.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.runs import load_run
from benchmarks.gpu.product import rows, write_json
from benchmarks.gpu.shapes import SHAPES, mfu

Result = dict[str, Any]
Commit = dict[str, Any]

FULL_PREFILL: Final = 4096  # tokens
SOME_ABORTED: Final = 0.02  # seconds: the pause between two polls; an abort that finds requests takes longer
STANDSTILL_SECONDS: Final = 60.0  # without any stage: a restart; a start of the services on GPUs takes longer

QUERIES: Final = {
    "commits": "SELECT iteration, epoch(committed) AS committed, checkpoint_version, owner FROM commits ORDER BY 1",
    "stages": "SELECT iteration, stage, epoch(started) AS started, seconds FROM stages ORDER BY 1, 3",
    "train": "SELECT iteration, sum(total_tokens) AS tokens, sum(step_seconds) AS seconds FROM train_steps "
    "GROUP BY 1 ORDER BY 1",
    "memory": "SELECT rank, max(bytes) AS bytes FROM (SELECT unnest(peak_bytes) AS bytes, "
    "generate_subscripts(peak_bytes, 1) - 1 AS rank FROM train_steps) GROUP BY 1 ORDER BY 1",
    "lengths": "SELECT sum(num_tokens) AS tokens, sum(num_tokens * num_tokens) AS squares FROM samples",
    "ages": "SELECT iteration, metrics['effective_sample_size'] AS effective, metrics['stale_kv'] AS stale_kv "
    "FROM stages WHERE stage = 'train' ORDER BY 1",
    "publish": "SELECT iteration, transport, write_seconds, coalesce(list_max(load_seconds), 0) AS load_seconds "
    "FROM publish ORDER BY 1",
    "samples": "SELECT iteration, lag, count(*) AS samples, sum(num_generated) AS tokens, "
    "max(num_generated) AS longest, count(*) FILTER (stop_reason = 'stop') AS ended_early FROM samples "
    "GROUP BY 1, 2 ORDER BY 1, 2",
}


def collect(store: Store, run: str, logs: Path) -> Result:
    """What the tables of a run say, and how fast its servers decoded."""
    recipe = load_run(store, run).recipe_at(0)
    found: Result = {
        "run": run,
        "iterations": recipe["schedule"]["iterations"],
        "gpus": len({*recipe["trainer"]["gpus"], *recipe["inference"]["gpus"]}),
        "shape": Path(recipe["model"]["path"]).name,
        "trainer": {name: recipe["trainer"][name] for name in ("backend", "zero_stage", "ranks")},
        "greatest_lag": rows(store, run, "SELECT max(lag) AS lag FROM samples")[0]["lag"],
        "longest": recipe["workflow"]["arguments"]["longest"],
        "pace": recipe["rollout"]["pace"],
    }
    said = "\n".join(log.read_text(errors="replace") for log in sorted(logs.glob(f"{run}/**/inference-*.log")))
    found |= {"decoding": decoding(said), "aborts": aborts(said), "prefill_rates": prefill_rates(said)}
    return found | {name: rows(store, run, query) for name, query in QUERIES.items()}


def decoding(said: str) -> list[tuple[int, int, float]]:
    """(samples at once, tokens in their caches, seconds of a decoding step), as SGLang's log has them now and then."""
    found = re.findall(r"Decode batch.*?#running-req: (\d+), #token: (\d+).*?throughput \(token/s\): ([\d.]+)", said)
    return [(int(n), int(tokens), int(n) / float(rate)) for n, tokens, rate in found if float(rate) > 0 and int(n) > 0]


def aborts(said: str) -> list[float]:
    """Seconds until all requests had ended, of each abort that found some (`engines/sglang/child.py` logs them)."""
    found = map(float, re.findall(r"All requests aborted, seconds: ([\d.]+)", said))
    return [seconds for seconds in found if seconds >= SOME_ABORTED]


def prefill_rates(said: str) -> list[float]:
    """Tokens per second of each full prefill behind which requests wait, as after an abort."""
    found = re.findall(
        r"Prefill batch.*?#new-token: (\d+).*?#queue-req: (\d+).*?throughput \(token/s\): ([\d.]+)", said
    )
    return [float(rate) for tokens, waiting, rate in found if int(tokens) >= FULL_PREFILL and int(waiting) > 0]


def eta_of(run: str) -> int:
    return int(run.split("-")[1])


def starts(result: Result) -> list[int]:
    """The first iteration that each start of the run has committed."""
    commits = result["commits"]
    later = [k for k in range(1, len(commits)) if restarted(result, commits[k - 1], commits[k])]
    return [commits[k]["iteration"] for k in (0, *later)]


def restarted(result: Result, before: Commit, commit: Commit) -> bool:
    """Whether another start made the commit. Files that do not have its owner show it by a time without any stage."""
    if "owner" in commit:
        return bool(before["owner"] != commit["owner"])
    reached, longest = before["committed"], 0.0
    for stage in sorted(result["stages"], key=lambda stage: float(stage["started"])):
        if stage["started"] < commit["committed"]:
            longest = max(longest, stage["started"] - reached)
            reached = max(reached, stage["started"] + stage["seconds"])
    return longest > STANDSTILL_SECONDS


def steady(result: Result) -> list[int]:
    """The iterations that count."""
    eta, begun = eta_of(result["run"]), starts(result)
    there = [c["iteration"] for c in result["commits"] if c["iteration"] < result["iterations"] - eta]
    return [k for k in there if not any(first <= k <= first + eta for first in begun)]


def of(result: Result, table: str, column: str, where: str = "") -> list[float]:
    """A column of the steady iterations; of `stages`, the rows of the stage `where`."""
    kept = set(steady(result))
    return [
        float(row[column] or 0)
        for row in result[table]
        if row["iteration"] in kept and row.get("stage", where) == where
    ]


def seconds(result: Result) -> float:
    """Mean seconds of a steady iteration."""
    times = intervals(result)
    return statistics.mean(times[k] for k in steady(result))


def row(result: Result, baseline: float) -> str:
    """A line of the table."""
    each, kept = seconds(result), set(steady(result))
    lags: dict[int, int] = {}
    for part in result["samples"]:
        if part["iteration"] in kept and part["lag"] is not None:
            lags[part["lag"]] = lags.get(part["lag"], 0) + part["samples"]
    total = sum(lags.values())
    shares = " ".join(f"{lag}:{n / total:.0%}" for lag, n in sorted(lags.items()))
    train = statistics.mean(of(result, "train", "seconds"))
    waited, published = waits(result), of(result, "stages", "seconds", "publish")
    wait, publish = statistics.mean(waited[k] for k in kept), sum(published) / max(1, len(published))
    tokens = sum(of(result, "samples", "tokens")) / len(kept)
    parts = (f"{len(kept)}", f"{each:.2f}", f"{baseline / each:.2f}", f"{train:.2f}", f"{wait:.2f}", f"{publish:.2f}")
    return f"| {result['run']} | {' | '.join(parts)} | {tokens:,.0f} | {shares} |"


HEAD: Final = (
    "| run | iterations | s each | × shared-0 | training | waits for groups | publish | tokens | samples by lag |\n"
    "|---|---|---|---|---|---|---|---|---|"
)
NOTHING: Final = ("",) * 5


def table(results: Sequence[Result], baseline: float = float("nan")) -> str:
    """All runs that have steady iterations; ratios to the synchronous run of the same lengths over all GPUs.

    `baseline`: its seconds where it is not among them.
    """
    usable = [result for result in results if len(result["commits"]) and len(steady(result)) > 0]
    base = {"-equal" in r["run"]: seconds(r) for r in usable if r["run"].startswith("shared-0")}
    return "\n".join([HEAD, *(row(r, base.get("-equal" in r["run"], baseline)) for r in usable)])


def training(results: Sequence[Result]) -> str:
    """How fast the ranks train, their memory, and how long a publication is; all iterations with an interval."""
    usable = [result for result in results if "trainer" in result and intervals(result)]
    return "\n".join([TRAINING, *map(training_row, usable)])


TRAINING: Final = (
    "| run | shape | trainer | iterations | trained tokens/s | MFU | peak by rank, GiB | publish, s | load, s | by |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def training_row(result: Result) -> str:
    """A line of that table. The FLOPs of a token depend on its sample's length: on average squares ÷ tokens."""
    counted, trainer, [length] = set(intervals(result)), result["trainer"], result["lengths"]
    steps = [step for step in result["train"] if step["iteration"] in counted]
    rate = sum(int(step["tokens"]) for step in steps) / sum(step["seconds"] for step in steps)
    used = mfu(SHAPES[result["shape"]], rate / trainer["ranks"], round(int(length["squares"]) / int(length["tokens"])))
    peaks = ", ".join(f"{rank['bytes'] / 2**30:.1f}" for rank in result["memory"])
    publications = [row for row in result["publish"] if row["iteration"] in counted]
    loads = [row["load_seconds"] for row in publications]
    published = [seconds for k, seconds in seconds_of(result, "publish").items() if k in counted]
    stage = f" {trainer['zero_stage']}" if trainer["backend"] == "deepspeed" else ""
    parts = (
        *(result["run"], result["shape"], f"{trainer['backend']}{stage}, ranks: {trainer['ranks']}", str(len(counted))),
        *(f"{rate:,.0f}", f"{used:.3f}", peaks, mean_of(published), mean_of(loads)),
        ", ".join(dict.fromkeys(row["transport"] for row in publications)),
    )
    return f"| {' | '.join(parts)} |"


def mean_of(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.2f}" if values else ""


def idle(result: Result) -> str:
    """When the trainer did not train, by iteration, what was saved meanwhile, and what of it that explains."""
    found = [spent(result, commit["iteration"]) for commit in result["commits"][1:]]
    lines = [
        "| iteration | seconds | steps | waits for groups | checkpoint | else | weights written meanwhile, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in found:
        parts = (one.steps, one.waits, one.checkpoint, one.other, one.writes)
        shown = (f"{one.seconds:.2f}", *(f"{part:.2f}" for part in parts)) if one.seconds else ("restart", *NOTHING)
        lines.append(f"| {one.iteration} | {' | '.join(shown)} |")
    return "\n".join([*lines, "", saving(found)])


@dataclass(frozen=True)
class Spent:
    """Seconds of an iteration; `seconds` is None if a restart is in it, `writes` are concurrent with the others."""

    iteration: int
    seconds: float | None
    steps: float
    waits: float
    checkpoint: float
    writes: float

    @property
    def other(self) -> float:
        return (self.seconds or 0.0) - self.steps - self.waits - self.checkpoint


def spent(result: Result, k: int) -> Spent:
    """What the trainer did in iteration k. Weights of the iteration before are written while it runs."""
    by = {row["iteration"]: row for row in result["commits"]}
    closed = by[k]["committed"] - max(
        s["started"] + s["seconds"]
        for s in result["stages"]
        if s["iteration"] == k and s["started"] + s["seconds"] <= by[k]["committed"]
    )
    return Spent(
        iteration=k,
        seconds=intervals(result).get(k),
        steps=next(row["seconds"] for row in result["train"] if row["iteration"] == k),
        waits=waits(result)[k],
        checkpoint=closed if k + 1 in {row["checkpoint_version"] for row in result["commits"]} else 0.0,  # begun here
        writes=sum(row["write_seconds"] or 0.0 for row in result["publish"] if row["iteration"] == k - 1),
    )


def saving(found: Sequence[Spent]) -> str:
    """How long the trainer was idle for checkpoints and written weights, as a share of the iterations' time.

    Of written weights that is what such iterations have more than the others, beyond steps, waits and checkpoints;
    unknown (nan) where all iterations have them. With η = 0 the trainer waits for groups meanwhile.
    """
    counted = [one for one in found if one.seconds]
    quiet = [one.other for one in counted if one.writes == 0]
    usual = statistics.median(quiet) if quiet else float("nan")
    checkpoints = [one.checkpoint for one in counted if one.checkpoint]
    written = [np.maximum(0.0, one.other - usual) for one in counted if one.writes > 0]
    whole = sum(one.seconds or 0.0 for one in counted)
    return (
        f"Trainer idle in {len(counted)} iterations, {whole:.1f} s: {len(checkpoints)} checkpoints "
        f"{sum(checkpoints):.2f} s, {len(written)} writes of weights {sum(written):.2f} s, together "
        f"{(sum(checkpoints) + sum(written)) / whole:.2%}; waits for groups {sum(one.waits for one in counted):.1f} s"
    )


def seconds_of(result: Result, stage: str) -> dict[int, float]:
    """Seconds of a stage by iteration."""
    return {s["iteration"]: s["seconds"] for s in result["stages"] if s["stage"] == stage}


def waits(result: Result) -> dict[int, float]:
    """Seconds from each commit until the next iteration has its groups, which with η > 0 may be there before."""
    ends = {s["iteration"]: s["started"] + s["seconds"] for s in result["stages"] if s["stage"] == "rollout"}
    return {c["iteration"] + 1: max(0.0, ends[c["iteration"] + 1] - c["committed"]) for c in result["commits"][:-1]}


def intervals(result: Result) -> dict[int, float]:
    """Seconds of each iteration but the first of each start."""
    times = {commit["iteration"]: float(commit["committed"]) for commit in result["commits"]}
    return {k: times[k] - times[k - 1] for k in times.keys() - set(starts(result))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("collect")
    for name in ("store", "run"):
        one.add_argument(name)
    for name in ("logs", "result"):
        one.add_argument(name, type=Path)
    tables = {name: commands.add_parser(name) for name in ("table", "training")}
    for several in tables.values():
        several.add_argument("results", type=Path, nargs="+")
    without = "seconds of an iteration of shared-0, if no file has it"
    tables["table"].add_argument("--baseline", type=float, default=float("nan"), help=without)
    commands.add_parser("idle").add_argument("result", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "collect":
        write_json(arguments.result, collect(open_store(arguments.store), arguments.run, arguments.logs))
    elif arguments.command in tables:
        results = [json.loads(file.read_text()) for file in arguments.results]
        print(training(results) if arguments.command == "training" else table(results, arguments.baseline))
    else:
        print(idle(json.loads(arguments.result.read_text())))


if __name__ == "__main__":
    main()
