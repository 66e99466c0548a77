"""Runs under one fixed load, by layout and η: what their tables say, as a file each, and the table of all of them.

    python -m benchmarks.gpu.fixed_load collect STORE RUN LOGS RESULT.json
    python -m benchmarks.gpu.fixed_load table RESULT.json …
    python -m benchmarks.gpu.fixed_load idle RESULT.json
    python -m benchmarks.gpu.fixed_load simulate RESULT.json

`benchmarks/gpu/fixed_load.sh` makes the runs. An iteration's seconds are those between two commits, without the first
η + 1 iterations, where services warm up and the pipeline fills, and without the last η of the run, for which nothing is
generated any more. `idle` says when the trainer had nothing to do, by iteration. `simulate` runs benchmarks/simulate.py
with the times of a run's own steps and transfers, decoding by a line through what SGLang's log says, compares each
iteration, and tells what the same times give for other layouts.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.runs import load_run
from benchmarks.gpu.product import rows, write_json
from benchmarks.simulate import HEAD as SIMULATED
from benchmarks.simulate import Layout, Load, Simulation, Times, synchronous
from benchmarks.simulate import row as simulated_row

Result = dict[str, Any]

QUERIES: Final = {
    "commits": "SELECT iteration, epoch(committed) AS committed, checkpoint_version FROM commits ORDER BY 1",
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
    recipe = load_run(store, run).recipe_at(0)
    found: Result = {
        "run": run,
        "iterations": recipe["schedule"]["iterations"],
        "gpus": len({*recipe["trainer"]["gpus"], *recipe["inference"]["gpus"]}),
        "greatest_lag": rows(store, run, "SELECT max(lag) AS lag FROM samples")[0]["lag"],
        "decoding": decoding(sorted(logs.glob(f"{run}/**/inference-*.log"))),
    }
    return found | {name: rows(store, run, query) for name, query in QUERIES.items()}


def decoding(logs: Sequence[Path]) -> list[tuple[int, int, float]]:
    """(samples at once, tokens in their caches, seconds of a decoding step), as SGLang's log has them now and then."""
    said = "\n".join(log.read_text(errors="replace") for log in logs)
    found = re.findall(r"Decode batch.*?#running-req: (\d+), #token: (\d+).*?throughput \(token/s\): ([\d.]+)", said)
    return [(int(n), int(tokens), int(n) / float(rate)) for n, tokens, rate in found if float(rate) > 0 and int(n) > 0]


def step_times(steps: Sequence[tuple[int, int, float]]) -> tuple[float, float, float]:
    """Seconds of a step by itself, more for each sample, more for each token in a cache: least squares.

    Steps of more than .1 s (compilation, new weights) are left out, prefills are not. Where few samples decode at once,
    steps do not show what a cached token costs: then it costs nothing.
    """
    samples, tokens, seconds = np.array([step for step in steps if step[2] < 0.1], float).T
    parts = np.stack([np.ones_like(samples), samples, tokens], axis=1)
    found = np.linalg.lstsq(parts, seconds)[0]
    if found[2] < 0:
        found = np.array([*np.linalg.lstsq(parts[:, :2], seconds)[0], 0.0])
    step, per_sample, per_token = map(float, found)
    return step, per_sample, per_token


def eta_of(run: str) -> int:
    return int(run.split("-")[1])


def steady(result: Result) -> list[int]:
    """The iterations that count."""
    last, eta = result["commits"][-1]["iteration"], eta_of(result["run"])
    return list(range(eta + 1, min(last + 1, result["iterations"] - eta)))


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
    waited, published = waits(result), of(result, "stages", "seconds", "publish")
    wait, publish = statistics.mean(waited[k] for k in kept), sum(published) / max(1, len(published))
    tokens = sum(of(result, "samples", "tokens")) / len(kept)
    parts = (f"{len(kept)}", f"{each:.2f}", f"{baseline / each:.2f}", f"{train:.2f}", f"{wait:.2f}", f"{publish:.2f}")
    return f"| {result['run']} | {' | '.join(parts)} | {tokens:,.0f} | {shares} |"


HEAD: Final = (
    "| run | iterations | s each | × shared-0 | training | waits for groups | publish | tokens | samples by lag |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def table(results: Sequence[Result]) -> str:
    """All runs that have steady iterations; ratios to the synchronous run of the same lengths over all GPUs."""
    usable = [result for result in results if len(result["commits"]) and len(steady(result)) > 0]
    base = {"-equal" in r["run"]: seconds(r) for r in usable if r["run"].startswith("shared-0")}
    return "\n".join([HEAD, *(row(r, base.get("-equal" in r["run"], float("nan"))) for r in usable)])


def idle(result: Result) -> str:
    """When the trainer did not train, by iteration, and what was saved meanwhile."""
    trained, waited = seconds_of(result, "train"), waits(result)
    written = {row["iteration"]: row["write_seconds"] or 0.0 for row in result["publish"]}
    checkpoints = {commit["checkpoint_version"] for commit in result["commits"]}
    lines = [
        "| iteration | seconds | training | waits for groups | else | weights written, s | checkpoint |",
        "|---|---|---|---|---|---|---|",
    ]
    for k, each in enumerate(intervals(result), start=1):
        rest = each - trained[k] - waited[k]
        checkpoint = "yes" if k + 1 in checkpoints else ""  # begun here
        parts = " | ".join(f"{part:.2f}" for part in (each, trained[k], waited[k], rest, written.get(k, 0.0)))
        lines.append(f"| {k} | {parts} | {checkpoint} |")
    return "\n".join(lines)


def layout_of(result: Result) -> Layout:
    """As `fixed_load.sh` names its runs. SystemExit for GPUs that train and generate at the same time."""
    run, gpus = result["run"], result.get("gpus", 2)  # the first recorded runs were all on two
    if not run.startswith(("split-", "shared-0")):
        raise SystemExit(f"{run}: the simulation does not know GPUs that train and generate at the same time")
    mode = "abort" if "-abort" in run else "in_place"
    return synchronous(gpus) if run.startswith("shared-0") else Layout(gpus // 2, gpus // 2, eta_of(run), mode=mode)


def times_of(result: Result) -> Times:
    """The times of a run for the simulation, without its first iteration. The fixed part is what no stage says."""
    step, per_sample, per_token = step_times(result["decoding"])
    layout, count = layout_of(result), len(intervals(result))
    busy = sum(seconds_of(result, "train").values())
    publish = sum(seconds_of(result, "publish").values()) / count
    alone = publish if layout.eta == 0 else 0.0  # else it is concurrent with training
    return Times(
        step=step,
        step_per_sample=per_sample,
        step_per_token=per_token,
        train_rate=sum(int(row["tokens"]) for row in result["train"] if row["iteration"] > 0) / busy / layout.training,
        train_fixed=(sum(intervals(result)) - sum(waits(result).values()) - busy) / count - alone,
        publish=publish,
        publish_waits=layout.eta == 0,
    )


def seconds_of(result: Result, stage: str) -> dict[int, float]:
    """Seconds of a stage by iteration, without the first."""
    return {s["iteration"]: s["seconds"] for s in result["stages"] if s["stage"] == stage and s["iteration"] > 0}


def waits(result: Result) -> dict[int, float]:
    """Seconds from each commit until the next iteration has its groups, which with η > 0 may be there before."""
    ends = {s["iteration"]: s["started"] + s["seconds"] for s in result["stages"] if s["stage"] == "rollout"}
    return {c["iteration"] + 1: max(0.0, ends[c["iteration"] + 1] - c["committed"]) for c in result["commits"][:-1]}


def intervals(result: Result) -> list[float]:
    """Seconds of each iteration but the first."""
    times = [float(commit["committed"]) for commit in result["commits"]]
    return [later - earlier for earlier, later in pairwise(times)]


def simulate(result: Result) -> str:
    """The run simulated, iteration by iteration; what its times give for split GPUs over long runs."""
    times, run = times_of(result), result["run"]
    load = Load(longest=8000, prompt=64, iterations=result["iterations"], sigma=0.0 if "-equal" in run else Load.sigma)
    real = intervals(result)
    layout = layout_of(result)
    half = layout.gpus // 2
    ends = Simulation(load, layout, times).run().ends
    ours = [later - earlier for earlier, later in pairwise(ends)][: len(real)]
    lines = [str(times), "| iteration | " + " | ".join(str(k + 1) for k in range(len(real))) + " | all |"]
    for name, found in (("simulated", ours), ("measured", real)):
        lines.append(f"| {name} | {' | '.join(f'{seconds:.1f}' for seconds in found)} | {sum(found):.1f} |")
    lines += [f"simulated ÷ measured: {sum(ours) / sum(real):.3f}", "", SIMULATED]
    lines += [
        simulated_row(load, Layout(half, half, eta, mode=mode), times)
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
    for name in ("idle", "simulate"):
        commands.add_parser(name).add_argument("result", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "collect":
        write_json(arguments.result, collect(open_store(arguments.store), arguments.run, arguments.logs))
    elif arguments.command == "table":
        print(table([json.loads(file.read_text()) for file in arguments.results]))
    else:
        print({"idle": idle, "simulate": simulate}[arguments.command](json.loads(arguments.result.read_text())))


if __name__ == "__main__":
    main()
