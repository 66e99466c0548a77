"""Work that is repeated in a thread during a run."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, ClassVar, Final, Self

from areal_tasks.store.backend import StoreError

#: How long the end of a run waits for the last of such work.
CLOSE_SECONDS: Final = 60.0
HURRIED_SECONDS: Final = 2.0  # the same when the run is cancelled, or the store is away


class Background:
    """Calls `repeat` every `seconds` in a thread of its own, and `end` after that. Use as a context.

    No error there ends a run: the first of several in a row is logged with what it delays (`what`), and then the work
    is tried again.
    """

    seconds: ClassVar[float]
    what: ClassVar[str]
    close_seconds: ClassVar[float] = CLOSE_SECONDS

    def __init__(self, log: Any) -> None:
        self.log = log
        self._failing = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name=self.what, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        hurried = error is not None and (isinstance(error, StoreError) or not isinstance(error, Exception))
        self._over.set()
        self._thread.join(HURRIED_SECONDS if hurried else self.close_seconds)

    def repeat(self) -> None:
        raise NotImplementedError

    def end(self) -> None:
        """What is done last; by default once more the same."""
        self.repeat()

    def _work(self) -> None:
        over = False
        while not over:
            over = self._over.wait(self.seconds)
            try:
                self.end() if over else self.repeat()
            except Exception as error:
                if not self._failing:
                    self.log.warning("%s are not up to date: %s; tried again", self.what, error)
                self._failing = True
            else:
                self._failing = False
