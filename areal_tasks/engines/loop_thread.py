"""An event loop beside the threads of a flow."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop in a thread of its own, for connections that outlast one call."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._turn, name="inference-client", daemon=True)
        self.thread.start()

    def run(self, work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(seconds)

    def _turn(self) -> None:
        """Until `stop`. asyncio leaves its loop when a task calls `sys.exit`, also one of somebody's own workflow:
        whoever waits for that task gets it, and all others would wait for ever."""
        while True:
            try:
                return self.loop.run_forever()
            except (SystemExit, KeyboardInterrupt):
                continue

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)
        self.loop.close()
