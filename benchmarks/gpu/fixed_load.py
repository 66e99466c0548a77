"""Runs under one fixed load, by layout and η: what their tables say, as a file each, and the table of all of them.

    python -m benchmarks.gpu.fixed_load collect STORE RUN LOGS RESULT.json
    python -m benchmarks.gpu.fixed_load table RESULT.json …
    python -m benchmarks.gpu.fixed_load simulate RESULT.json ITERATIONS

`benchmarks/gpu/fixed_load.sh` makes the runs. An iteration's seconds are those between two commits, without the first
η + 1 iterations, where services warm up and the pipeline fills, and without the last η, for which nothing is generated
any more. `simulate` runs benchmarks/simulate.py with the times of a run's own steps and transfers, decoding by a line
through what SGLang's log says, compares each iteration, and tells what the same times give for other layouts.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from areal_tasks.store.backend import Store, open_store
from benchmarks.gpu.product import rows, write_json
from benchmarks.simulate import HEAD as SIMULATED
from benchmarks.simulate import Layout, Load, Simulation, Times
from benchmarks.simulate import row as simulated_row

Result = dict[str, Any]

QUERIES: Final = {
    "commits": "SELECT iteration, epoch(committed) AS committed FROM commits ORDER BY 1",
    "stages": "SELECT iteration, stage, epoch(started) AS started, seconds FROM stages ORDER BY 1, 3",
    "train": "SELECT iteration, sum(total_tokens) AS tokens, sum(step_seconds) AS seconds FROM train_steps "
    "GROUP BY 1 ORDER BY 1",
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
    found: Result = {
        "run": run,
        "greatest_lag": rows(store, run, "SELECT max(lag) AS lag FROM samples")[0]["lag"],
        "decoding": decoding(sorted(logs.glob(f"{run}/**/inference-*.log"))),
    }
    return found | {name: rows(store, run, query) for name, query in QUERIES.items()}


def decoding(logs: Sequence[Path]) -> list[tuple[int, float]]:
    """(samples at once, seconds of a decoding step), as SGLang's log has them now and then."""
    said = [log.read_text(errors="replace") for log in logs]
    pairs = re.findall(r"Decode batch.*?#running-req: (\d+).*?gen throughput \(token/s\): ([\d.]+)", "\n".join(said))
    return [(int(n), int(n) / float(rate)) for n, rate in pairs if float(rate) > 0 and int(n) > 0]


def eta_of(run: str) -> int:
    return int(run.split("-")[1])


def steady(result: Result) -> list[int]:
    """The iterations that count."""
    last, eta = result["commits"][-1]["iteration"], eta_of(result["run"])
    return list(range(eta + 1, last + 1 - eta))


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
    times = {commit["iteration"]: commit["committed"] for commit in result["commits"]}
    kept = steady(result)
    return float((times[kept[-1]] - times[kept[0] - 1]) / len(kept))


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
    wait, publish = (statistics.mean(of(result, "stages", "seconds", stage)) for stage in ("rollout", "publish"))
    tokens = sum(of(result, "samples", "tokens")) / len(kept)
    parts = (f"{len(kept)}", f"{each:.2f}", f"{baseline / each:.2f}", f"{train:.2f}", f"{wait:.2f}", f"{publish:.2f}")
    return f"| {result['run']} | {' | '.join(parts)} | {tokens:,.0f} | {shares} |"


HEAD: Final = (
    "| run | iterations | seconds each | × shared-0 | training | rollout (wait) | publish | tokens | samples by lag |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def table(results: Sequence[Result]) -> str:
    """All runs that have steady iterations; ratios to the synchronous run of the same lengths over both GPUs."""
    usable = [result for result in results if len(result["commits"]) and len(steady(result)) > 0]
    base = {"-equal" in r["run"]: seconds(r) for r in usable if r["run"].startswith("shared-0")}
    return "\n".join([HEAD, *(row(r, base.get("-equal" in r["run"], float("nan"))) for r in usable)])


def times_of(result: Result) -> Times:
    """The times of a run for the simulation, without its first iteration. The fixed part is what no stage says."""
    samples, steps = zip(*result["decoding"], strict=True)
    per_sample, step = statistics.linear_regression(samples, steps)
    trained = [row for row in result["train"] if row["iteration"] > 0]
    busy, count = sum(row["seconds"] for row in trained), len(trained)
    waits, publish = stage_seconds(result, "rollout"), stage_seconds(result, "publish")
    return Times(
        step=step,
        step_per_sample=per_sample,
        train_rate=sum(int(row["tokens"]) for row in trained) / busy,
        train_fixed=(sum(intervals(result)) - waits - publish - busy) / count,
        publish=publish / count,
        publish_waits=True,
    )


def stage_seconds(result: Result, stage: str) -> float:
    return float(sum(s["seconds"] for s in result["stages"] if s["stage"] == stage and s["iteration"] > 0))


def intervals(result: Result) -> list[float]:
    """Seconds of each iteration but the first."""
    times = [float(commit["committed"]) for commit in result["commits"]]
    return [later - earlier for earlier, later in pairwise(times)]


def simulate(result: Result, iterations: int) -> str:
    """The run simulated, iteration by iteration; what its times give for all layouts over long runs."""
    times, eta = times_of(result), eta_of(result["run"])
    load = Load(longest=8000, prompt=64, iterations=iterations)
    ends = Simulation(load, Layout(1, 1, eta), times).run().ends
    ours, real = [later - earlier for earlier, later in pairwise(ends)], intervals(result)
    ours = ours[: len(real)]
    lines = [str(times), "| iteration | " + " | ".join(str(k + 1) for k in range(len(real))) + " | all |"]
    for name, found in (("simulated", ours), ("measured", real)):
        lines.append(f"| {name} | {' | '.join(f'{seconds:.1f}' for seconds in found)} | {sum(found):.1f} |")
    lines += [f"simulated ÷ measured: {sum(ours) / sum(real):.3f}", "", SIMULATED]
    long = replace(load, iterations=60)
    lines += [
        simulated_row(long, Layout(1, 1, eta, mode=mode), times)
        for mode in ("in_place", "abort")
        for eta in (1, 2, 4, 8)
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("collect")
    for name in ("store", "run"):
        one.add_argument(name)
    for name in ("logs", "result"):
        one.add_argument(name, type=Path)
    commands.add_parser("table").add_argument("results", type=Path, nargs="+")
    other = commands.add_parser("simulate")
    other.add_argument("result", type=Path)
    other.add_argument("iterations", type=int, help="that the run was to have")
    arguments = parser.parse_args()
    if arguments.command == "collect":
        write_json(arguments.result, collect(open_store(arguments.store), arguments.run, arguments.logs))
    elif arguments.command == "simulate":
        print(simulate(json.loads(arguments.result.read_text()), arguments.iterations))
    else:
        print(table([json.loads(file.read_text()) for file in arguments.results]))


if __name__ == "__main__":
    main()
