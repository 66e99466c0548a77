"""The trainer as a process, or as one of several (see `ranks`). Rank 0 serves its HTTP API: /health and `COMMANDS`.

One worker thread runs the commands in order of arrival, so a retry waits for the original; /health is answered at once.
Those that need only weights that the trainer keeps (`KEPT`) run concurrently, in another thread. Errors are JSON.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from threading import Thread
from typing import Any, Final

import torch
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route

from areal_tasks.engines import service
from areal_tasks.engines.trainer.commands import COMMANDS, KEPT, Command, Health
from areal_tasks.engines.trainer.fencing import Fence, StaleCommand, Superseded
from areal_tasks.engines.trainer.group import Group, GroupBroken, text_of
from areal_tasks.engines.trainer.ranks import cpu_threads, end_group, join
from areal_tasks.engines.trainer.service import Trainer
from areal_tasks.engines.trainer.settings import read_settings
from areal_tasks.store.backend import Unavailable
from schemas.errors import UserError
from schemas.record import Record

log = logging.getLogger(__name__)


def main() -> None:
    """Serve, or follow rank 0, until terminated."""
    spec = service.read_spec()
    with service.as_service():
        group = join(spec, read_settings(spec.recipe).trainer)
        if group.rank == 0:
            service.serve(make_app(spec, group), spec)
            return
        if group.rank == group.first_here:
            service.register(spec, f"rank://{group.rank}")  # ready; only rank 0 is asked
    _follow(spec, group)


def _follow(spec: service.ServiceSpec, group: Group) -> None:
    """Run the commands that rank 0 passes on, until its end ends this process; signals are ignored."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    try:
        trainer = Trainer(spec, group)
        torch.set_num_threads(cpu_threads(trainer.settings.trainer))
        while True:
            group.follow(lambda text: trainer.run(_parsed(text)), trainer.state)
            trainer.clear()  # all ranks have ended the command by now
    except GroupBroken as error:
        log.error("rank %d ends: %s", group.rank, error)
        sys.stderr.flush()
        os._exit(1)  # without cleanup: the other ranks may be stuck in a collective


def _parsed(text: str) -> Command:
    """A command as rank 0 passes it on."""
    name, _, body = text.partition(" ")
    return COMMANDS[name].model_validate_json(body)


# ── rank 0 ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def make_app(spec: service.ServiceSpec, group: Group | None = None) -> Starlette:
    """The application of the trainer that `spec` describes, with nothing loaded. With a `group`, this is its rank 0."""
    queue = _CommandQueue(Trainer(spec, group))

    async def health(_request: Request) -> Health:
        return queue.trainer.health(queue.waiting > 0)

    commands = {name: (queue.run, kind) for name, kind in COMMANDS.items()}
    return Starlette(
        routes=[
            Route("/health", service.endpoint(health, _status, _text)),
            *service.routes_of(commands, _status, _text),
        ]
    )


class _CommandQueue:
    """Accepts commands; the trainer runs them one at a time, all in one thread, in order of arrival.

    One thread, because torch keeps a thread pool for each calling thread. That thread itself sets the pool's size:
    results depend on it bitwise, and settings made in other threads do not reach it.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.group = trainer.group
        self.gate: Fence[None] = Fence()
        self.gate.admit(trainer.fence.owner)
        self.kept_thread = ThreadPoolExecutor(1, "kept")
        self.thread = ThreadPoolExecutor(1, "trainer", torch.set_num_threads, (cpu_threads(trainer.settings.trainer),))
        self.waiting = 0

    @cached_property
    def broken(self) -> asyncio.Future[Exception]:
        """The group's future of that name in the event loop; one for all commands, since each is kept by the group."""
        return asyncio.wrap_future(self.group.broken)

    async def run(self, command: Command) -> Record:
        """The answer to `command`. Raises Superseded at once for a superseded owner, even if other commands wait."""
        self.gate.admit(command.owner)
        self.waiting += 1
        alone = command.name in KEPT and self.trainer.snapshot.version == command.version
        thread, run = (self.kept_thread, self._run_on_rank_0) if alone else (self.thread, self._run_on_all_ranks)
        try:
            work = asyncio.get_running_loop().run_in_executor(thread, run, command)
            both: set[asyncio.Future[Any]] = {work, self.broken}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if self.broken.done():
                raise self.broken.result()
            return await work
        finally:
            self.waiting -= 1

    def _run_on_all_ranks(self, command: Command) -> Record:
        self.gate.admit(command.owner)  # again: refuses a queued command of an owner that was superseded meanwhile
        body = command.model_dump_json(exclude={"token"})  # the ranks' key-value store is not authenticated
        try:
            return self.group.lead(f"{command.name} {body}", lambda: self.trainer.run(command), self.trainer.state)
        except GroupBroken as error:
            Thread(target=end_group, args=(self.group, error), daemon=True).start()
            raise
        finally:
            self.trainer.clear()  # all ranks have ended the command by now

    def _run_on_rank_0(self, command: Command) -> Record:
        """Run a command on this rank only: its copy of the weights is complete and locked meanwhile."""
        self.gate.admit(command.owner)
        with self.trainer.snapshot.lock:
            if self.trainer.snapshot.version != command.version:
                raise StaleCommand(f"version {command.version} is no longer kept")
            return self.trainer.run(command)


#: The HTTP status of each error (`TrainerClient` reads it). Any other error is 500: this process failed internally, and
#: its state is no longer reliable.
STATUSES: Final = ((Superseded, 403), (StaleCommand, 409), (ValidationError, 422), (Unavailable, 503), (UserError, 400))


def _status(error: Exception) -> int:
    return 400 if isinstance(error, GroupBroken) and error.by_user else service.status_in(STATUSES, error)


def _text(error: Exception) -> str:
    return f"malformed command: {error}" if isinstance(error, ValidationError) else text_of(error)
