"""The rollout workers of one run: restarted when they end, and reported to the manager that leases them groups."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from areal_tasks.engines.loop_thread import BRIEF_SECONDS, LoopThread
from areal_tasks.engines.starting import ready
from areal_tasks.engines.watchdog import Heartbeat, Watchdog
from areal_tasks.launchers.supervisor import Ready, Supervisor
from schemas.recipe.recipe import Recipe

if TYPE_CHECKING:
    from areal_tasks.rollout.rollouts import Rollouts

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backlog:
    """The groups that are under way: being generated, being verified; finished ones, in a worker's memory or spooled.

    `generating`, `verifying` and `held` are by worker, by its address. `room`: how many can be generated at once.
    """

    generating: Mapping[str, int]
    verifying: Mapping[str, int]
    held: Mapping[str, int]
    spooled: int
    room: int


@dataclass(eq=False)
class Workers:
    """The workers that `recipe` asks for by `names_of`, if the run `generates`, else none. `Engines` starts them.

    If a changed recipe asks for fewer, the others leave: each is stopped when it no longer holds groups.
    """

    names_of: Callable[[Recipe], list[str]]
    recipe: Recipe
    generates: bool
    supervisor: Supervisor
    watchdog: Watchdog
    loop: LoopThread
    _leaving: list[str] = field(default_factory=list)
    _join: Callable[[str], None] = lambda name: None
    _manager: Rollouts | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock)  # one thread supervises at a time
    _ready: list[Ready] | None = None  # as the manager knows them

    @property
    def names(self) -> list[str]:
        return self.names_of(self.recipe) if self.generates else []

    @property
    def used(self) -> list[str]:
        """The names of the workers while a manager leases them groups."""
        return self.names if self._manager is not None else []

    def adapt(self, recipe: Recipe, join: Callable[[str], None]) -> None:
        """Change to this recipe. `join` starts a worker that it adds; those that it removes leave."""
        with self._lock:
            before, self.recipe, self._join = self.names, recipe, join
            self._leaving += [name for name in before if name not in self.names]
            self._join_and_leave()

    def _join_and_leave(self) -> None:
        """Stop leaving workers that no longer hold groups, and start those that are missing."""
        found = {name: one for name in self._leaving if (one := self.supervisor.services[name].ready) is not None}
        running = {name: (one.url, one.restart) for name, one in found.items()}
        manager = self._manager
        empty = self.loop.run(manager.leave(running.values())) if manager and running else running.values()
        for name in [name for name in self._leaving if running.get(name) in (None, *empty)]:
            log.info("%s leaves the run", name)
            self._leaving.remove(name)
            self.supervisor.retire(name)
        for name in self.names:
            if name not in self.supervisor.services:
                log.info("%s joins the run", name)
                self._join(name)

    def serve(self, manager: Rollouts | None) -> None:
        """Have this manager alone lease groups to the workers, once they have started; None: no manager.

        Afterwards no worker is reported to the previous manager, or restarted for it: it can be closed.
        """
        with self._lock:  # waits for a `supervise` in progress, which may still report to the previous manager
            self._manager, self._ready = manager, None
        if manager is not None:
            ready(self.supervisor, self.watchdog, self.names)
            self.supervise()

    def supervise(self) -> None:
        """Restart ended workers, report the ready ones. ServiceFailed: none runs, `launcher.restarts` are used up."""
        with self._lock:
            if (manager := self._manager) is None:
                return
            if self._leaving:
                self._join_and_leave()
            staying = [name for name in self.names if name not in self._leaving]
            found = self.supervisor.poll(staying, explained=lambda: self.loop.run(manager.explained_ends()))
            found += [one for name in self._leaving if (one := self.supervisor.services[name].ready) is not None]
            if found != self._ready:
                self._ready = found
                self.loop.run(manager.use_workers({(one.url, one.restart) for one in found}))

    def backlog(self) -> Backlog | None:
        """The groups that are under way now; None while no component uses the workers. For any thread."""
        manager = self._manager
        return manager.backlog() if manager is not None else None

    def end(self, manager: Rollouts) -> None:
        """Have this manager use the workers no more: it abandons running groups, and finished ones are spooled."""
        try:
            self.serve(None)
            self.loop.run(manager.close(), BRIEF_SECONDS)
        except Exception as error:  # another error ended the run, and must not be hidden
            why = str(error) or type(error).__name__
            log.warning("rollout workers did not end in order: groups that are not in the store begin again: %s", why)

    def heartbeats(self) -> dict[str, Heartbeat]:
        """A heartbeat per worker, by its name. For any thread."""
        manager = self._manager  # another thread may end it meanwhile
        found = self.loop.run(manager.heartbeats()) if manager is not None else {}
        return {self.supervisor.name_at(url): heartbeat for url, heartbeat in found.items()}
