"""What a client needs to be let in by services: their bearer token, and whose certificates it trusts."""

from __future__ import annotations

from dataclasses import dataclass, field

from areal_tasks.engines.tls import Trust, trusting


@dataclass(frozen=True)
class Access:
    """`authority`: the certificate (PEM) whose holder has signed theirs; empty: as this machine trusts any server."""

    token: str = field(default="", repr=False)
    authority: str = ""

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    @property
    def trust(self) -> Trust:
        """For `verify` of httpx, and `ssl` of aiohttp."""
        return trusting(self.authority)
