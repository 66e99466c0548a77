"""Which sockets a tree of processes listens on."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator
from contextlib import suppress

import psutil
from warm_processes import SERVER


def listening(roots: Iterable[psutil.Process]) -> dict[str, list[str]]:
    """The addresses on which each of `roots` and its descendants listens, by the process's number and command."""
    found = {}
    for process in {process for root in roots for process in _family(root)}:
        with suppress(psutil.NoSuchProcess):  # it has just ended
            found[f"{process.pid} {' '.join(process.cmdline())}"] = _addresses(process)
    return found


def _family(process: psutil.Process, is_root: bool = True) -> Iterator[psutil.Process]:
    """A process and its descendants, but not the server that forks for all tests, nor what it has forked."""
    with suppress(psutil.NoSuchProcess):
        if is_root or str(SERVER) not in process.cmdline():
            yield process
            for child in process.children():
                yield from _family(child, is_root=False)


def beyond_loopback(roots: Iterable[psutil.Process]) -> dict[str, list[str]]:
    """Those that listen where other machines can reach them."""
    found = {name: [a for a in held if not _is_loopback(a)] for name, held in listening(roots).items()}
    return {name: reachable for name, reachable in found.items() if reachable}


def _addresses(process: psutil.Process) -> list[str]:
    sockets = process.net_connections("inet")
    return [f"{s.laddr.ip} port {s.laddr.port}" for s in sockets if s.status == psutil.CONN_LISTEN]


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split()[0]).is_loopback
