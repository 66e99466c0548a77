"""What limits an asynchronous run first, from 4 to 1,024 GPUs: the simulation of two GPUs, and measured unit costs.

    python -m benchmarks.simulate_scale units.json [--times times.json] [--store-gb 10] [--weights-gb 3.1]

Assumed: the batch grows with the GPUs (32 groups of 8 samples each), half of them generate and half train, η = 4, so
that an iteration takes as long as on two GPUs (`simulate`); training scales perfectly. `unit_costs` writes
`units.json`. Each figure is the share of a capacity that is used; a share above 100 % limits the run:

worker: one rollout worker does the work of all groups (requests, answers, tables), on one core.
spool: the same worker writes every group into the spool, a record each (the worst case: none is consumed in time).
requests: of the flow to the store, one after the other, and each training rank's four reads, 64 at a time.
Prefect: the iteration's task runs, one after the other.
transfer: all servers load new weights through the store within an iteration; it sends `--store-gb` GB per second.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.simulate import Layout, Load, Simulation, Times

GPUS: Final[Sequence[int]] = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
GROUPS_PER_GPU: Final = 32
READS_PER_RANK: Final = 4
READS_AT_ONCE: Final = 64


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("units", type=Path)
    parser.add_argument("--times", type=Path, help="JSON with fields of simulate.Times")
    parser.add_argument("--weights-gb", type=float, default=3.1)
    parser.add_argument("--store-gb", type=float, default=10.0, help="GB per second that the store gives in all")
    options = parser.parse_args()
    units = json.loads(options.units.read_text())
    times = Times(**json.loads(options.times.read_text())) if options.times else Times()
    load = Load(groups=2 * GROUPS_PER_GPU)
    found = Simulation(load, Layout(1, 1, 4), times).run()
    seconds = found.seconds / load.iterations
    print(f"{seconds:.1f} s per iteration, trainers idle {found.trainer_idle:.0%}\n")
    for n, gpus in enumerate(GPUS):
        used = shares(gpus, seconds, units, options.weights_gb, options.store_gb)
        if not n:
            print("| GPUs | groups per second | " + " | ".join(used) + " | most |")
            print("| --- " * (len(used) + 3) + "|")
        cells = " | ".join(f"{share:.1%}" for share in used.values())
        print(
            f"| {gpus:,} | {GROUPS_PER_GPU * gpus / seconds:.0f} | {cells} | {max(used, key=lambda name: used[name])} |"
        )


if __name__ == "__main__":
    main()
