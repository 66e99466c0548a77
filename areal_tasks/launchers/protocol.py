"""What a launcher is: it starts services somewhere and tells whether they live. A service neither knows nor cares."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from areal_tasks.engines.service import ServiceSpec


@dataclass(frozen=True)
class Job:
    """One service to start: the module with `make_app(spec)`, its specification, token and surroundings."""

    module: str
    spec: ServiceSpec
    token: str
    log: Path
    threads: int = 0


class Handle(Protocol):
    """A started service."""

    def exit_code(self) -> int | None:
        """None while it runs."""
        ...

    def stop(self, grace_seconds: float = 5.0) -> None:
        """End it and everything it started; returns when it is gone."""
        ...


class Launcher(Protocol):
    """Starts services and owns them: they end with the launcher, however it ends."""

    def start(self, job: Job) -> Handle: ...

    def close(self) -> None: ...
