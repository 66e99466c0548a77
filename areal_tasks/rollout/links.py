"""The flow's links to all rollout workers of a run."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from areal_tasks.engines.client import InferenceClient
from areal_tasks.engines.sharing import Followers, Serving
from areal_tasks.engines.watchdog import Heartbeat
from areal_tasks.rollout.assignments import Assignments
from areal_tasks.rollout.background import Background
from areal_tasks.rollout.link import Link


@dataclass
class Links(Followers):
    """The links, by start of a worker: (address, restart). As `Followers` they follow `client`.

    `served` is called soon after other servers may generate, or hold other weights.
    """

    client: InferenceClient
    background: Background
    served: Callable[[], None]
    by_start: dict[tuple[str, int], Link] = field(default_factory=dict)
    _serving: Serving | None = None  # as last sent to the workers

    def ready(self) -> list[Link]:
        """Links to workers that may be given groups, or write them."""
        return [link for link in self.by_start.values() if link.ready and not link.leaving]

    def left(self, assigned: Assignments) -> list[Link]:
        """Links to workers that are leaving, to be started again, and have no group any more."""
        leaving = (link for link in self.by_start.values() if link.ready and link.leaving and not link.retired)
        return [link for link in leaving if not assigned.of(link)]

    @property
    def starting(self) -> bool:
        """Whether some worker has not begun yet, and has not failed to."""
        return any(not link.tried for link in self.by_start.values())

    async def heartbeats(self, assigned: Assignments) -> dict[str, Heartbeat]:
        """The workers' heartbeats by address: whether they answer, whatever the progress of their groups."""
        links = list(self.by_start.values())
        found = await asyncio.gather(*(link.heartbeat() for link in links))
        return {
            link.url: Heartbeat(heartbeat, f"{len(assigned.of(link))} groups")
            for link, heartbeat in zip(links, found, strict=True)
        }

    def changed(self) -> None:
        """Send the workers the servers that may generate, without waiting for the acknowledgements."""
        if (serving := self.client.serving) != self._serving:
            self._serving = serving
            self.background.do(self.acknowledged())
            asyncio.get_running_loop().call_soon(self.served)

    async def acknowledged(self) -> None:
        """Return when all workers have acknowledged which servers may generate."""
        serving = self.client.serving
        await asyncio.gather(*(link.follow(serving) for link in self.by_start.values()))

    async def busy(self) -> Mapping[str, int]:
        """The workers' requests in flight, by server address."""
        found = await asyncio.gather(*(link.requests() for link in self.by_start.values()))
        return sum(map(Counter, found), Counter[str]())

    def under_way(self) -> Mapping[str, int]:
        """The same, as of the workers' last heartbeats."""
        return sum((Counter(link.busy) for link in self.by_start.values()), Counter[str]())
