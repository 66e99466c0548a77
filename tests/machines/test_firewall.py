"""The firewall rules of the guide, on each machine, and a run that they must admit."""

from __future__ import annotations

import re
import shutil
import sys
from typing import Final

import pytest

from machines.bed import NETWORK, OUTPUT, ROOT, S3, first_line
from machines.clusters import HEAD, NODES, OnSlurm
from machines.runs import UNTRAINED, through_slurm

GUIDE: Final = ROOT / "docs" / "guides" / "machines.md"
#: Nothing comes in but answers, and what the guide's rules admit.
CLOSED: Final = """
nft add table inet filter
nft add chain inet filter input '{ type filter hook input priority 0; policy drop; }'
nft add rule inet filter input iif lo accept
nft add rule inet filter input ct state established,related accept
"""
LISTENER: Final = "import socket; s = socket.create_server(('', 8000)); print('ready', flush=True); s.accept()"
CALLER: Final = "import socket, sys; socket.create_connection((sys.argv[1], 8000), timeout=2)"


def rules() -> str:
    """The rules of the guide, for the machines' network."""
    found = "\n".join(re.findall(r"^nft add rule .*", GUIDE.read_text(), re.MULTILINE))
    return found.replace("10.0.0.0/24", f"{NETWORK}.0/24").replace("{", "'{").replace("}", "}'")


@pytest.mark.parametrize("cluster", [through_slurm], indirect=True)
def test_a_run_through_slurm_needs_no_more_than_the_rules_of_the_guide(cluster: OnSlurm) -> None:
    """The trainer's ranks are on two machines, and use gloo."""
    if shutil.which("nft") is None:
        pytest.skip("nft is not installed (Debian: nftables)")
    for machine in cluster.bed:
        if machine.name != S3:
            machine.run(["sh", "-ec", CLOSED + rules()])
    node = cluster.bed[NODES[0]]
    first_line(node.popen([sys.executable, "-c", LISTENER], **OUTPUT))
    call = [sys.executable, "-c", CALLER]
    assert "TimeoutError" in cluster.bed[HEAD].run([*call, node.address], check=False).stderr
    node.run([*call, "127.0.0.1"])

    size = ("inference.servers=2", "rollout.workers=2", "schedule.iterations=3", "evaluation.every=3")
    trainer = ("trainer.backend=fsdp2", "trainer.ranks=2", "trainer.nodes=2")
    cluster.arealflow(*cluster.run("quickstart", "run=r", *UNTRAINED, *size, *trainer))
    assert "r: sound" in cluster.arealflow("audit", "r")
