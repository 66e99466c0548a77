"""A supervisor for tests of the engines: what it says that runs, and a note of what it is to end."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from areal_tasks.engines.access import Access
from areal_tasks.engines.handover import write_weights
from areal_tasks.engines.session import Engines
from areal_tasks.launchers.supervisor import Ready
from schemas.manifest import WeightsRef


class FakeSupervisor:
    """Its servers are those in `running`; nothing of it ever ends."""

    access = Access("token")
    services: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, *urls: str) -> None:
        self.running = [Ready(url) for url in urls]
        self.end_of: list[str] = []

    def wait(self, names: Sequence[str], weights: WeightsRef | None = None) -> list[str]:
        """As Supervisor.wait."""
        return ["http://trainer"] if list(names) == ["trainer"] else [one.url for one in self.running]

    def poll(self, names: Collection[str], weights: WeightsRef | None = None) -> list[Ready]:
        """As Supervisor.poll."""
        return [] if list(names) == ["trainer"] else list(self.running)

    def ended(self, names: Collection[str]) -> frozenset[tuple[str, int]]:
        """As Supervisor.ended."""
        return frozenset()

    def name_at(self, url: str) -> str:
        """As Supervisor.name_at."""
        return url

    def end(self, urls: Collection[str], why: str = "", grace_seconds: float = 5.0) -> None:
        """Note them."""
        self.end_of += urls

    def __exit__(self, *error: object) -> None:
        """Nothing is left to stop."""


def supervise(engines: Engines, supervisor: FakeSupervisor) -> None:
    """Have the engines ask this supervisor from now on."""
    for one in (engines, engines.servers, engines.actor):
        one.supervisor = supervisor  # type: ignore[assignment]


def publish(engines: Engines, trainer: Any, version: int) -> WeightsRef:
    """Have the trainer write a version, and the servers generate with it."""
    ref = write_weights(engines.run, trainer, version).ref
    engines.servers.serve(ref)
    return ref
