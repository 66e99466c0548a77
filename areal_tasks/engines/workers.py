"""The rollout workers of one run: started again when they end, and told whose orders to take."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from areal_tasks.engines.loop_thread import LoopThread
from areal_tasks.engines.starting import ready
from areal_tasks.engines.watchdog import Heartbeat, Watchdog
from areal_tasks.launchers.supervisor import Ready, Supervisor
from schemas.recipe.recipe import Recipe, RlhfRecipe


class Employer(Protocol):
    """Who gives the workers their orders. For the event loop of the client of the servers."""

    async def have(self, starts: Collection[tuple[str, int]]) -> None:
        """These starts of workers are there, by their addresses."""
        ...

    async def heartbeats(self) -> Mapping[str, Heartbeat]:
        """How each gets on, by its address."""
        ...


class Workers:
    """The workers that `recipe` asks for, where the run `generates`; none else. They are started by `Services`."""

    def __init__(
        self, recipe: Recipe, generates: bool, supervisor: Supervisor, watchdog: Watchdog, loop: LoopThread
    ) -> None:
        count = recipe.rollout.workers if generates and isinstance(recipe, RlhfRecipe) else 0
        self.names = [f"rollout-{i}" for i in range(count)]
        self._supervisor = supervisor
        self._watchdog = watchdog
        self._loop = loop
        self._employer: Employer | None = None
        self._ready: list[Ready] = []  # as the employer knows them

    def serve(self, employer: Employer | None) -> None:
        """Have the workers, once they have started, take the orders of this one alone; of nobody, if none."""
        self._employer, self._ready = employer, []
        if employer is not None:
            ready(self._supervisor, self._watchdog, self.names)
            self.tend()

    def tend(self) -> None:
        """Start workers again that have ended, and have those take orders that are ready.

        Raises:
            ServiceFailed: none is left, and `launcher.restarts` are used up.
        """
        if self._employer is None:
            return
        found = self._supervisor.look(self.names)
        if found != self._ready:
            self._ready = found
            self._loop.run(self._employer.have({(one.url, one.restart) for one in found}))

    def heartbeats(self) -> dict[str, Heartbeat]:
        """How each gets on, by its name."""
        found = self._loop.run(self._employer.heartbeats()) if self._employer is not None else {}
        return {self._supervisor.name_at(url): heartbeat for url, heartbeat in found.items()}
