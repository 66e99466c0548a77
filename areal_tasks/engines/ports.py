"""The interface that services and their process groups listen on: loopback, or that of one address of this machine."""

from __future__ import annotations

import socket
from typing import Final

import psutil

HOST: Final = "127.0.0.1"


def group_interface(address: str = HOST) -> dict[str, str]:
    """Environment variables that keep gloo's and NCCL's sockets on the interface of this machine's `address`.

    Without them gloo uses the interface of the host's name, and NCCL the first that is not loopback.
    """
    if address != HOST:
        name = next(name for name, found in psutil.net_if_addrs().items() if address in (one.address for one in found))
    elif (name := "lo") not in {name for _, name in socket.if_nameindex()}:
        return {}
    return {f"{library}_SOCKET_IFNAME": name for library in ("GLOO", "NCCL")}


def listen(address: str = HOST) -> socket.socket:
    """A listening socket on a free port of one interface, for a server that sends small answers."""
    listener = socket.create_server((address, 0), family=family(address), backlog=512)
    # asyncio sets this only on sockets that name their protocol; without it each answer waits 40 ms for an ACK
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def hold_port(wanted: int, address: str) -> socket.socket:
    """A socket on the port `wanted` of this machine's address, or for 0 on any free one. It does not listen.

    While it is open, only a server that names the port can listen on it, as with uvicorn: the system gives it to no
    other program. OSError: the port is in use or not permitted. OverflowError: there is no such port.
    """
    held = socket.socket(family(address))
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((address, wanted))
    except BaseException:
        held.close()
        raise
    return held


def probe_port(wanted: int = 0) -> int:
    """`wanted` if it is free now, or for 0 any port that is. Errors as of `hold_port`."""
    with hold_port(wanted, HOST) as held:
        port: int = held.getsockname()[1]
    return port


def url_host(address: str) -> str:
    """An address as URLs write it."""
    return f"[{address}]" if ":" in address else address


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of `host:port`, whose host is as URLs write it."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
