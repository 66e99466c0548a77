"""Weights broadcast from one machine to servers on others, over gloo in NCCL's place."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Final

import httpx
import psutil
import torch

from areal_tasks.engines.ports import group_interface
from areal_tasks.engines.trainer.commands import Receiver, Send
from areal_tasks.engines.trainer.transport import Sender
from machines.bed import ROOT, Machine, Machines, Process, first_line

TOKEN: Final = "secret"
RECEIVER: Final = ROOT / "tests/transports/receiver.py"
LIMIT_SECONDS: Final = 120.0
IMPORTS: Final = {"PYTHONPATH": f"{ROOT}:{ROOT}/tests"}


def test_servers_of_other_machines_take_weights_at_the_addresses_of_the_network() -> None:
    with Machines("trainer", "node1", "node2") as bed:
        urls = [_receiver(bed[name]) for name in ("node1", "node2")]
        seen = json.loads(bed["trainer"].run([sys.executable, __file__, bed["trainer"].address, *urls], IMPORTS).stdout)
        assert seen["gone"] == {}
        assert seen["listens at"] == [bed["trainer"].address]
        assert [held["version"] for held in seen["held"]] == ["3", "3"]
        assert all(held["tensors"] == {"a": [0.5, 0.5]} for held in seen["held"])


def _receiver(machine: Machine) -> str:
    """The address of a server that takes weights on this machine."""
    interface = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "eth0")
    command = [sys.executable, str(RECEIVER), TOKEN, machine.address]
    started: Process = machine.popen(command, interface, stdout=subprocess.PIPE, text=True)
    return f"http://{machine.address}:{first_line(started)}"


def _send(address: str, urls: list[str]) -> None:
    """The trainer's part, on its machine; prints what came of it."""
    assert set(group_interface(address).values()) == {"eth0"}
    sender = Sender(print, "gloo", LIMIT_SECONDS, LIMIT_SECONDS, address=address)
    receivers = tuple(Receiver(url=url) for url in urls)
    command = Send(owner=1, version=3, transport="nccl", receivers=receivers, token=TOKEN)
    gone = sender.send({"a": torch.full((2,), 0.5)}, command)
    listening = {one.laddr.ip for one in psutil.Process().net_connections() if one.status == psutil.CONN_LISTEN}
    held = [httpx.get(url, timeout=LIMIT_SECONDS).json() for url in urls]
    print(json.dumps({"gone": gone, "listens at": sorted(listening), "held": held}))


if __name__ == "__main__":
    _send(sys.argv[1], sys.argv[2:])
