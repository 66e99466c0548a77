"""A whole trained quickstart, its SFT first, on three nodes with two services each, of Slurm or Ray (as root).

    python tests/machines/quickstart.py --through ray [--recipe quickstart-async] [--iterations 250]

The run of the synchronous recipe is then compared with the same run by `launcher.type=local` on the head.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from machines.bed import Machines, obstacle  # noqa: E402
from machines.clusters import Cluster, OnRay, OnSlurm  # noqa: E402
from machines.runs import check_complete, query  # noqa: E402

SYSTEMS: Final[dict[str, type[Cluster]]] = {"slurm": OnSlurm, "ray": OnRay}
OWN: Final = ("inference.servers=2", "rollout.workers=2")
#: Six services of nine CPUs fill the nodes, of three CPUs each, with two on each of them.
NEEDS: Final = ("launcher.resources.trainer.cpus=2", "launcher.resources.inference.cpus=2")
EDGE: Final = 25  # iterations at the beginning and at the end whose mean rewards are shown
FIGURES: Final = f"""
select count(*) samples, count(distinct iteration) iterations, max(lag) lag,
  avg(reward) filter (iteration < {EDGE}) first,
  avg(reward) filter (iteration >= (select max(iteration) from samples) + 1 - {EDGE}) last
from samples
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--through", choices=SYSTEMS, required=True)
    parser.add_argument("--recipe", choices=("quickstart", "quickstart-async"), default="quickstart")
    parser.add_argument("--iterations", type=int, default=250)
    options = parser.parse_args()
    if obstacle():
        sys.exit(obstacle())
    kind = SYSTEMS[options.through]
    with Machines(*kind.names, s3=True) as bed:
        measure(kind(bed), options.recipe, options.iterations)


def measure(cluster: Cluster, recipe: str, iterations: int) -> None:
    own = (*OWN, f"schedule.iterations={iterations}")
    printed = timed(cluster, *cluster.run(recipe, "run=r", *NEEDS, *own))
    hosts = dict(re.findall(r"service (\S+) starts on (\S+)", printed))  # of the last start: the SFT has a trainer, too
    print(", ".join(f"{service} on {host}" for service, host in sorted(hosts.items())), flush=True)
    assert len(set(hosts.values())) > 1, "services are on one node"
    assert check_complete(cluster) == iterations
    print("each group trained once;", cluster.arealflow("audit", "r").partition("\n")[0])
    [found] = query(cluster, FIGURES)
    print(f"{found['samples']:,} samples in {found['iterations']} iterations, greatest lag {found['lag']};", end=" ")
    print(f"mean reward {found['first']:.3f} in the first {EDGE}, {found['last']:.3f} in the last", flush=True)
    if recipe == "quickstart":
        timed(cluster, "run", recipe, "run=here", "launcher.type=local", *own)
        print(cluster.arealflow("diff", "here", "r").strip())


def timed(cluster: Cluster, *arguments: str) -> str:
    """What a run prints. It ends with an assertion if the run fails."""
    began = time.monotonic()
    printed = cluster.arealflow(*arguments)
    print(f"arealflow {' '.join(arguments)}: {(time.monotonic() - began) / 60:.1f} minutes", flush=True)
    return printed


if __name__ == "__main__":
    main()
