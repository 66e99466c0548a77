"""Services as threads of this process, for a debugger."""

from __future__ import annotations

import importlib
import threading

import uvicorn

from areal_tasks.engines.service import make_server
from areal_tasks.launchers.protocol import Job
from areal_tasks.launchers.usage import Usage, machine


class InlineHandle:
    """A service in a thread."""

    def __init__(self, server: uvicorn.Server, thread: threading.Thread) -> None:
        self.server = server
        self.thread = thread

    def exit_code(self) -> int | None:
        return None if self.thread.is_alive() else 1

    def waiting(self) -> str:
        return ""

    def usage(self) -> Usage | None:
        return machine()

    def stop(self, grace_seconds: float = 5.0) -> None:
        self.server.should_exit = True
        self.thread.join(grace_seconds)


class InlineLauncher:
    """Starts each service's app in a thread with an event loop of its own."""

    authority = ""

    def start(self, job: Job) -> InlineHandle:
        app = importlib.import_module(f"{job.module}.process").make_app(job.spec)
        server, listener = make_server(app, job.spec, job.token)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name=job.spec.name, daemon=True)
        thread.start()
        return InlineHandle(server, thread)

    def close(self) -> None:
        """Nothing to do: threads end with this process."""
