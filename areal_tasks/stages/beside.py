"""What goes on beside the stages of the next iteration where η > 0: publication, and evaluation (DESIGN §9)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial

from areal_tasks.stages.build import Built
from areal_tasks.store.parallel import in_background


class Beside:
    """Work that a later commit names: at most one at a time, in a thread of its own."""

    def __init__(self) -> None:
        self._work: Future[dict[str, Built]] | None = None

    def begin(self, work: Callable[[], dict[str, Built]]) -> None:
        """Begin `work`, in the caller's context. What was begun before must have been taken."""
        assert self._work is None, "one at a time"
        self._work = in_background(partial(copy_context().run, work), "beside")

    def take(self) -> dict[str, Built]:
        """What was built, when it is done; nothing if nothing was begun. Raises what the work has raised."""
        work, self._work = self._work, None
        return {} if work is None else work.result()
