"""Ends a process whose flow is over, and which has only to tell so to a Prefect server that does not answer.

Prefect would try each request for a minute or more, and each of the events that wait for 7 s: hundreds of them after a
server has died amid a run. What the run made is in its store by then. No part of Prefect can be asked to give up, in
whichever thread or `atexit` handler it waits; so a thread asks the server, and ends the process when it is gone. A
server that answers gets all the time it needs.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, Final

from flows.cli.output import visible
from schemas.errors import UserError

Result = dict[str, Any]

#: How long the server may refuse connections: one that `arealflow up` keeps may be back before that.
REFUSED_SECONDS: Final = 5.0
#: How long it may not answer in time; it may have much to do.
SILENT_SECONDS: Final = 60.0
ASK_SECONDS: Final = 0.5  # between two questions
#: In seconds: to connect, read, write and get a connection. Prefect's client tries four times to connect; the worker
#: kills a flow 7 s after asking it to end.
ASK_TIMEOUT: Final = (1.0, 2.0, 2.0, 2.0)
#: Loggers of Prefect's that repeat for every event that it could not be sent.
REPEATING: Final = ("prefect.events.clients", "prefect._internal.concurrency", "EventsWorker", "APILogWorker")

WATCHING: Final = "ending"  # the thread that asks

#: Whether this process ends with its flow: that of the command `arealflow`, or one that a worker has started.
exits = "PREFECT__FLOW_RUN_ID" in os.environ
#: What else is to be done before this process ends without its `atexit` handlers.
at_last: list[Callable[[], object]] = []


class Silence:
    """For how long the Prefect server has not answered. `ask` gives the error with which it does not."""

    def __init__(self, ask: Callable[[], Exception | None], clock: Callable[[], float] = time.monotonic) -> None:
        self.ask = ask
        self.clock = clock
        self.since: float | None = None

    @property
    def is_long(self) -> bool:
        """Ask the server; whether it has not answered for so long that it counts as gone."""
        from httpx import ConnectError  # here: every command imports this module

        began = self.clock()
        if (error := self.ask()) is None:
            self.since = None
            return False
        self.since = began if self.since is None else self.since
        limit = REFUSED_SECONDS if isinstance(error, ConnectError) else SILENT_SECONDS
        return self.clock() - self.since >= limit


def impatient_client() -> Any:
    """A client of the Prefect server in force that asks once, and waits for ASK_TIMEOUT. Use as a context."""
    from prefect.client.orchestration import get_client

    return get_client(sync_client=True, httpx_settings={"timeout": ASK_TIMEOUT})  # authenticated as in settings


def ask_server() -> Exception | None:
    """Why the Prefect server does not answer; None if it answers, whatever it says, or if there is none."""
    from httpx import TransportError
    from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    if not PREFECT_API_URL.value():
        return None
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), impatient_client() as client:
        error: Exception | None = client.api_healthcheck()
        return error if isinstance(error, TransportError) else None


silence = Silence(ask_server)


class Once:
    """What a command does with the result of its flow: once, by itself or before its process is ended."""

    last: Once | None = None

    def __init__(self, show: Callable[[Result], object]) -> None:
        self._show = show
        self._begun = threading.Lock()
        Once.last = self

    def __call__(self, result: Result) -> None:
        if self._begun.acquire(blocking=False):
            self._show(result)


class Reporting:
    """A context around all of a flow's work: after it nothing is left but to report, unless another flow called it.

    Called with the flow's result, it returns that.
    """

    def __init__(self) -> None:
        self.result: Result | None = None

    def __enter__(self) -> Reporting:
        _again.set()  # a retry in this process: what watches since the last attempt ends
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        from prefect.context import FlowRunContext

        context = FlowRunContext.get()
        known = context.flow_run if context is not None else None
        if known is None or known.parent_task_run_id is None:  # its parent's id would have to be asked for
            over(self.result, error)

    def __call__(self, result: Result) -> Result:
        self.result = result
        return result


#: Set while a flow of this process runs again.
_again = threading.Event()


def over(result: Result | None, error: BaseException | None) -> None:
    """The flow has ended so: end this process once the server is gone. Asked in a thread, with the flow's settings."""
    _again.clear()
    if not exits or any(thread.name == WATCHING for thread in threading.enumerate()):
        return

    def watch() -> None:
        while not silence.is_long:
            if silence.since is not None:
                _quieten()
            if _again.wait(ASK_SECONDS):
                return
        end(result, error)

    threading.Thread(target=copy_context().run, args=(watch,), name=WATCHING, daemon=True).start()


def _quieten() -> None:
    for name in REPEATING:
        logging.getLogger(name).setLevel(logging.CRITICAL)


def end(result: Result | None, error: BaseException | None) -> None:
    """Say what could not be sent, and how the flow ended; then end this process, without `atexit` handlers."""
    try:
        print(f"the Prefect server does not answer, and is not told {unsent()}", file=sys.stderr)
        if isinstance(error, UserError):
            print(f"error: {visible(str(error))}", file=sys.stderr)
        if result is not None and Once.last is not None:
            Once.last(result)
        for call in at_last:
            call()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # also where the output is closed
        os._exit(0 if error is None else 1)


def unsent() -> str:
    """`the end of this flow run, 566 events and 3 log messages`: what waits in Prefect's queues. For Prefect 3.8.8."""
    from prefect._internal.concurrency.services import _active_services

    found = {"EventsWorker": 0, "APILogWorker": 0}
    for service in list(_active_services):
        items = sum(item is not None for item in list(service._queue.queue))  # None: that it is to end
        found[type(service).__name__] = found.get(type(service).__name__, 0) + items
    return f"the end of this flow run, {found['EventsWorker']} events and {found['APILogWorker']} log messages"
