"""What a client needs to use services: their bearer token, and the certificate authority that it trusts."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import httpx

from areal_tasks.engines.tls import Trust, trusting

#: A connection to a machine that vanishes without closing it breaks after 35 s.
SOCKET_OPTIONS: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 35_000),
)


@dataclass(frozen=True)
class Access:
    """`authority`: the certificate (PEM) of the only trusted authority; empty: those that this machine trusts."""

    token: str = field(default="", repr=False)
    authority: str = ""

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    @property
    def trust(self) -> Trust:
        """For `verify` of httpx, and `ssl` of aiohttp."""
        return trusting(self.authority)

    def connector(self, **more: Any) -> aiohttp.TCPConnector:
        """For an aiohttp session with any number of connections."""
        return aiohttp.TCPConnector(limit=0, ssl=self.trust, socket_factory=_socket, **more)

    def transport(self) -> httpx.HTTPTransport:
        return httpx.HTTPTransport(verify=self.trust, socket_options=SOCKET_OPTIONS)


def _socket(address: Any) -> socket.socket:
    family, kind, protocol, _, _ = address
    found = socket.socket(family, kind, protocol)
    for option in SOCKET_OPTIONS:
        found.setsockopt(*option)
    return found
