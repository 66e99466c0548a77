"""The firewall rules of the guides, on each machine, and a run that they must admit."""

from __future__ import annotations

import re
import shutil
import sys
from typing import Final

import pytest

from machines.bed import NETWORK, OUTPUT, ROOT, S3, Machines, first_line
from machines.clusters import HEAD, NODES, Cluster, OnRay, OnSlurm
from machines.runs import UNTRAINED

GUIDES: Final = [ROOT / "docs" / "guides" / name for name in ("machines.md", "ray.md")]
#: Nothing comes in but answers, and what the guides' rules admit.
CLOSED: Final = """
nft add table inet filter
nft add chain inet filter input '{ type filter hook input priority 0; policy drop; }'
nft add rule inet filter input iif lo accept
nft add rule inet filter input ct state established,related accept
"""
#: The options of the table in docs/guides/ray.md.
PORTS: Final = (
    *("node-manager", "object-manager", "runtime-env-agent"),
    *("dashboard-agent-grpc", "dashboard-agent-listen", "metrics-export"),
)
LISTENER: Final = "import socket; s = socket.create_server(('', 8000)); print('ready', flush=True); s.accept()"
CALLER: Final = "import socket, sys; socket.create_connection((sys.argv[1], 8000), timeout=2)"


class Closed(Cluster):
    """A cluster whose machines are closed before its daemons start."""

    system: str  # whose rules these are

    def __init__(self, bed: Machines) -> None:
        if shutil.which("nft") is None:
            pytest.skip("nft is not installed (Debian: nftables)")
        for machine in bed:
            if machine.name != S3:
                machine.run(["sh", "-ec", CLOSED + rules(self.system)])
        super().__init__(bed)


class ClosedSlurm(Closed, OnSlurm):
    system = "Slurm"


class ClosedRay(Closed, OnRay):
    system = "Ray"
    options = (
        *(f"--{name}-port={number}" for number, name in enumerate(PORTS, 6380)),
        *("--min-worker-port=10002", "--max-worker-port=19999"),
    )


def rules(system: str) -> str:
    """The rules of the guides for our own ports and those of a cluster system, for the machines' network."""
    found = [line for guide in GUIDES for line in re.findall(r"^nft add rule .*", guide.read_text(), re.MULTILINE)]
    wanted = [line for line in found if re.search(f"# (ours|{system})", line)]
    assert len(wanted) == 2, found
    return "\n".join(wanted).replace("10.0.0.0/24", f"{NETWORK}.0/24").replace("{", "'{").replace("}", "}'")


@pytest.mark.slow("Slurm's or Ray's daemons, and a run of a minute")
@pytest.mark.parametrize("cluster", [ClosedSlurm, ClosedRay], indirect=True)
def test_a_run_needs_no_more_than_the_rules_of_the_guides(cluster: Cluster) -> None:
    """The trainer's ranks are on two machines, and use gloo."""
    node = cluster.bed[NODES[0]]
    first_line(node.popen([sys.executable, "-c", LISTENER], **OUTPUT))
    call = [sys.executable, "-c", CALLER]
    assert "TimeoutError" in cluster.bed[HEAD].run([*call, node.address], check=False).stderr
    node.run([*call, "127.0.0.1"])

    size = ("inference.servers=2", "rollout.workers=2", "schedule.iterations=3", "evaluation.every=3")
    trainer = ("trainer.backend=fsdp2", "trainer.ranks=2", "trainer.nodes=2", "launcher.trust_network=true")
    cluster.arealflow(*cluster.run("quickstart", "run=r", *UNTRAINED, *size, *trainer))
    assert "r: sound" in cluster.arealflow("audit", "r")
