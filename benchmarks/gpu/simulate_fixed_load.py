"""A run of fixed_load.sh, simulated with the times of its own steps and transfers.

    python -m benchmarks.gpu.simulate_fixed_load RESULT.json [--times-of OTHER.json]

RESULT.json is what `fixed_load collect` has written. Decoding is a line through what SGLang's log says, with the log's
times of aborts and prefills where requests were aborted. Each iteration before the first restart (which the simulation
does not know) is compared; then what the same times give for other layouts. `--times-of` predicts the run by the times
of another one.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.gpu.fixed_load import Result, eta_of, intervals, seconds_of, starts, waits
from benchmarks.simulate import HEAD, Layout, Load, Simulation, Times, row, synchronous


def simulate(result: Result, source: Result) -> str:
    """The run simulated with the times of `source`, by iteration until it was restarted.

    Also what these times give for split GPUs over long runs.
    """
    run, layout = result["run"], layout_of(result)
    times = replace(times_of(source), publish_waits=layout.eta == 0)
    sigma, longest = 0.0 if "-equal" in run else Load.sigma, result.get("longest", 8000)  # of the first recorded runs
    load = Load(longest=longest, prompt=64, iterations=result["iterations"], sigma=sigma)
    unbroken, half = starts(result)[1:] or [result["iterations"]], half_of(result)
    real = {k: seconds for k, seconds in intervals(result).items() if k < unbroken[0]}
    ends = Simulation(load, layout, times).run().ends
    ours = {k: ends[k] - ends[k - 1] for k in real}
    lines = [str(times), "| iteration | " + " | ".join(str(k) for k in real) + " | all |"]
    for name, found in (("simulated", ours), ("measured", real)):
        shown = " | ".join(f"{seconds:.1f}" for seconds in found.values())
        lines.append(f"| {name} | {shown} | {sum(found.values()):.1f} |")
    lines += [f"simulated ÷ measured: {sum(ours.values()) / sum(real.values()):.3f}", "", HEAD]
    lines += [
        row(load, Layout(half, half, eta, mode=mode), times) for mode in ("in_place", "abort") for eta in (1, 2, 4, 8)
    ]
    return "\n".join(lines)


def layout_of(result: Result) -> Layout:
    """As `fixed_load.sh` names its runs. SystemExit for several GPUs that train and generate at the same time.

    Where one GPU does both at once, the run's own speeds are averages of times with and without the other work.
    """
    run = result["run"]
    if run.startswith(("shared-0", "one-0")):
        return synchronous(gpus_of(result))
    if not run.startswith(("split-", "one-")):
        raise SystemExit(f"{run}: the simulation does not know several GPUs that train and generate at the same time")
    mode = "abort" if "-abort" in run else "in_place"
    half = half_of(result)
    return Layout(half, half, eta_of(run), mode=mode, pace=result.get("pace"))


def gpus_of(result: Result) -> int:
    return int(result.get("gpus", 2))  # the first recorded runs were all on two


def half_of(result: Result) -> int:
    """The GPUs that train, and those that generate, where they are split."""
    return max(gpus_of(result) // 2, 1)


def times_of(result: Result) -> Times:
    """The times of a run for the simulation, of all iterations that have one. The fixed part is what no stage says.

    The first training is compiled meanwhile: what it takes more than the others is `compilation`.
    """
    step, per_sample, per_token = step_times(result["decoding"])
    layout, each, waited = layout_of(result), intervals(result), waits(result)
    training = seconds_of(result, "train")
    busy = sum(seconds for k, seconds in training.items() if k in each)
    publish = sum(seconds for k, seconds in seconds_of(result, "publish").items() if k in each) / len(each)
    alone = publish if layout.eta == 0 else 0.0  # else it is concurrent with training
    return Times(
        step=step,
        step_per_sample=per_sample,
        step_per_token=per_token,
        train_rate=sum(int(row["tokens"]) for row in result["train"] if row["iteration"] in each)
        / busy
        / layout.training,
        train_fixed=(sum(each.values()) - sum(waited[k] for k in each) - busy) / len(each) - alone,
        compilation=max(training.get(0, 0.0) - busy / len(each), 0.0),
        publish=publish,
        publish_waits=layout.eta == 0,
        **(interruptions(result) if layout.mode == "abort" else {}),
    )


def interruptions(result: Result) -> dict[str, float]:
    """What aborts take, and the prefills after them; where the run's log was not read for them, as assumed."""
    measured = {"abort": result.get("aborts"), "prefill_rate": result.get("prefill_rates")}
    return {name: statistics.median(found) for name, found in measured.items() if found}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--times-of", type=Path, help="another result; default: the same")
    arguments = parser.parse_args()
    result, source = (
        json.loads(file.read_text()) for file in (arguments.result, arguments.times_of or arguments.result)
    )
    print(simulate(result, source))


if __name__ == "__main__":
    main()
