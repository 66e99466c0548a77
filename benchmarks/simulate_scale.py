"""The speed-up of asynchrony from 4 to 1,024 GPUs, and what limits it first: simulated runs, and measured unit costs.

    python -m benchmarks.simulate_scale units.json [--times times.json] [--store-gb 10] [--weights-gb 3.1] [--most 1024]

Assumed: the batch grows with the GPUs (32 groups of 8 samples each), half of them generate and half train, η = 4;
training scales perfectly. `simulate` simulates that many servers up to 32 GPUs, each sample by itself, and a
synchronous run over as many. Iterations last as long on 4 GPUs as on 32, and those of larger runs are taken to.
`unit_costs` writes `units.json`.

Each of these is the share of a capacity that is used:

worker: one rollout worker does the work of all groups (requests, answers, tables), on one core.
spool: the same worker writes every group into the spool, a record each (the worst case: none is consumed in time).
requests: of the flow to the store, one after the other, and each training rank's four reads, 64 at a time.
Prefect: the iteration's task runs, one after the other.
transfer: all servers load new weights through the store within an iteration; it sends `--store-gb` GB per second.

A share above 100 % limits the run. The speed-ups:

alone: nothing limits the run; new weights take `Times.publish` seconds, as they do from GPU to GPU.
store: weights go through the store and take as long as the transfer; while one version is under way, later ones wait,
    and the newest follows. There are as many workers as are needed. Simulated with 4 GPUs, since `alone` is the same
    for all numbers.
all: the same with one rollout worker: an iteration takes at least as long as its work.

A synchronous run has its servers on the trainer's GPUs, which give them the weights without the store. In `all`, it has
one worker, too, and generates for at least as long as its work takes.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from benchmarks.simulate import Layout, Load, Simulation, Times, synchronous

GPUS: Final[Sequence[int]] = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
GROUPS_PER_GPU: Final = 32
READS_PER_RANK: Final = 4
READS_AT_ONCE: Final = 64
ETA: Final = 4
FEW: Final = 4  # GPUs
SIMULATED: Final = 32  # GPUs at most; per GPU larger runs do the same


@dataclass(frozen=True)
class Pace:
    """Seconds per iteration of a run, of which no GPU trains in `idle`."""

    seconds: float
    idle: float


@cache
def pace(gpus: int, eta: int, times: Times) -> Pace:
    """Of a run on so many GPUs: half of them generate, or with η = 0 all do both in turn."""
    if gpus > SIMULATED:
        return pace(SIMULATED, eta, times)
    load, half = load_of(gpus), gpus // 2
    found = Simulation(load, Layout(half, half, eta) if eta else synchronous(gpus), times).run()
    seconds = found.seconds / load.iterations
    return Pace(seconds, found.trainer_idle * seconds)


def load_of(gpus: int) -> Load:
    return Load(groups=GROUPS_PER_GPU * gpus)


def shares(gpus: int, seconds: float, units: Mapping[str, Any], weights_gb: float, store_gb: float) -> dict[str, float]:
    """For each thing that could limit the run, the share of its capacity that is used, in iterations of `seconds`."""
    groups, half, latency = GROUPS_PER_GPU * gpus, gpus / 2, units["request"]["seconds"]
    return {
        "worker": groups * units["group"]["cpu"] / seconds,
        "spool": groups * units["spool_record"]["cpu"] / seconds,
        "requests": (units["requests"] + half * READS_PER_RANK / READS_AT_ONCE) * latency / seconds,
        "Prefect": units["tasks"] * units["task"]["seconds"] / seconds,
        "transfer": half * weights_gb / store_gb / seconds,
    }


def speed_ups(asynchronous: Pace, base: Pace, used: Mapping[str, float], times: Times) -> dict[str, float]:
    """By what may limit the run."""
    work, transfer, alone = (share * asynchronous.seconds for share in (used["worker"], used["transfer"], 1.0))
    stored = pace(FEW, ETA, replace(times, publish=max(times.publish, transfer))).seconds
    generating = base.idle - times.train_fixed - times.publish
    return {
        "alone": base.seconds / alone,
        "store": base.seconds / stored,
        "all": (base.seconds + max(0.0, work - generating)) / max(stored, work),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("units", type=Path)
    parser.add_argument("--times", type=Path, help="JSON with fields of simulate.Times")
    parser.add_argument("--weights-gb", type=float, default=3.1)
    parser.add_argument("--store-gb", type=float, default=10.0, help="GB per second that the store gives in all")
    parser.add_argument("--most", type=int, default=GPUS[-1], help="GPUs")
    options = parser.parse_args()
    units = json.loads(options.units.read_text())
    times = Times(**json.loads(options.times.read_text())) if options.times else Times()
    for n, gpus in enumerate(gpus for gpus in GPUS if gpus <= options.most):
        asynchronous, base = pace(gpus, ETA, times), pace(gpus, 0, times)
        used = shares(gpus, asynchronous.seconds, units, options.weights_gb, options.store_gb)
        found = speed_ups(asynchronous, base, used, times)
        if not n:
            sizes = ["GPUs", "s per iteration", "synchronous", "groups per second"]
            names = [*sizes, *used, "most", "workers"]
            print("| " + " | ".join([*names, *found]) + " |")
            print("| --- " * (len(names) + len(found)) + "|")
        cells = [
            f"{gpus:,}",
            f"{asynchronous.seconds:.1f}",
            f"{base.seconds:.1f}",
            f"{GROUPS_PER_GPU * gpus / asynchronous.seconds:.0f}",
            *(f"{share:.1%}" for share in used.values()),
            max(used, key=lambda name: used[name]),
            str(math.ceil(used["worker"])),
            *(f"{ratio:.2f}" for ratio in found.values()),
        ]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
