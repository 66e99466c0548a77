"""Ports of this machine, for whoever has to name one before it is listened on; imports nothing of ours."""

from __future__ import annotations

import socket


def loopback_port(wanted: int = 0) -> int:
    """`wanted` if nothing listens on it at the loopback interface, or for 0 any that is free now.

    Raises:
        OSError: something does, or this process may not.
        OverflowError: there is no such port.
    """
    with socket.create_server(("127.0.0.1", wanted)) as probe:
        port: int = probe.getsockname()[1]
    return port
