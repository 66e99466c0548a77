"""Ports of this machine; imports nothing of ours."""

from __future__ import annotations

import socket


def listen(host: str) -> socket.socket:
    """A listening socket at a free port of `host`, for a server of small answers."""
    listener = socket.create_server((host, 0), backlog=512)
    # asyncio sets this only on sockets that name their protocol; without it every answer waits 40 ms for an ACK
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def loopback_port(wanted: int = 0) -> int:
    """`wanted` if nothing listens on it at the loopback interface, or for 0 any that is free now.

    Raises:
        OSError: something does, or this process may not.
        OverflowError: there is no such port.
    """
    with socket.create_server(("127.0.0.1", wanted)) as probe:
        port: int = probe.getsockname()[1]
    return port
