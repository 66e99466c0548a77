"""A webhook that remembers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Webhook:
    """What was posted to it, oldest first."""

    url: str
    posted: list[dict[str, Any]] = field(default_factory=list)

    def of(self, alert: str) -> list[dict[str, Any]]:
        return [body for body in list(self.posted) if body["alert"] == alert]
