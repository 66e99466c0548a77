"""The rollout workers of one run: restarted when they end, and made known to the component that leases them groups."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Final, Protocol

from areal_tasks.engines.loop_thread import LoopThread
from areal_tasks.engines.starting import ready
from areal_tasks.engines.watchdog import Heartbeat, Watchdog
from areal_tasks.launchers.supervisor import Ready, Supervisor
from schemas.errors import UserError
from schemas.recipe.recipe import Recipe, RlhfRecipe

TEND_SECONDS: Final = 1.0  # between two looks at the workers while the flow does not wait for them


class LeaseManager(Protocol):
    """The component that leases groups to the workers. Its methods run in the event loop of the inference client."""

    async def have(self, starts: Collection[tuple[str, int]]) -> None:
        """Use exactly these workers: (address, number of the start)."""
        ...

    async def heartbeats(self) -> Mapping[str, Heartbeat]:
        """A heartbeat per worker, by its address."""
        ...

    async def explained_ends(self) -> Collection[tuple[str, int]]:
        """Starts of workers whose end is no failure: they had groups in flight, which are blamed, or were to end."""
        ...


class Workers:
    """The workers that `recipe` asks for if the run `generates`, else none. `Engines` starts them."""

    def __init__(
        self, recipe: Recipe, generates: bool, supervisor: Supervisor, watchdog: Watchdog, loop: LoopThread
    ) -> None:
        count = recipe.rollout.workers if generates and isinstance(recipe, RlhfRecipe) else 0
        self.names = [f"rollout-{i}" for i in range(count)]
        self._supervisor = supervisor
        self._watchdog = watchdog
        self._loop = loop
        self._manager: LeaseManager | None = None
        self._lock = threading.RLock()  # one thread tends at a time
        self._tending: Future[None] | None = None
        self._ready: list[Ready] | None = None  # as the manager knows them

    def serve(self, manager: LeaseManager | None) -> None:
        """Give this manager alone the workers, once they have started; None: no component uses them.

        Once it returns, the manager before is given no worker and none is restarted for it: it can be closed.
        """
        if self._tending is not None:
            self._tending.cancel()
        with self._lock:  # a look that goes on would give the manager before its workers again
            self._manager, self._ready = manager, None
        if manager is not None:
            ready(self._supervisor, self._watchdog, self.names)
            self.tend()
            self._tending = self._loop.submit(self._tend_always())

    async def _tend_always(self) -> None:
        """Tend the workers whatever the flow does, such as training."""
        while True:
            await asyncio.sleep(TEND_SECONDS)
            with suppress(UserError):  # raised again for the stage that next waits for groups
                await asyncio.to_thread(self.tend)

    def tend(self) -> None:
        """Restart workers that have ended, and tell the manager which ones are ready.

        Raises:
            ServiceFailed: none is left, and `launcher.restarts` are used up.
        """
        with self._lock:
            if (manager := self._manager) is None:
                return
            found = self._supervisor.look(self.names, explained=lambda: self._loop.run(manager.explained_ends()))
            if found != self._ready:
                self._ready = found
                self._loop.run(manager.have({(one.url, one.restart) for one in found}))

    def heartbeats(self) -> dict[str, Heartbeat]:
        """A heartbeat per worker, by its name."""
        found = self._loop.run(self._manager.heartbeats()) if self._manager is not None else {}
        return {self._supervisor.name_at(url): heartbeat for url, heartbeat in found.items()}
