"""The trainer's HTTP face, on rank 0: /health, /load, /train, /logprobs, /publish and /checkpoint.

One worker thread runs the commands in the order they came, so a repeat waits for the original; /health is answered at
once. Errors are JSON: {"error": "..."}.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from areal_tasks.engines.service import ServiceSpec
from areal_tasks.engines.trainer.commands import Command, Load, Logprobs, Message, Send, Train, Write
from areal_tasks.engines.trainer.fencing import Refused
from areal_tasks.engines.trainer.service import Trainer
from schemas.errors import UserError

Endpoint = Callable[[Request], Awaitable[Response]]
log = logging.getLogger(__name__)


def make_app(spec: ServiceSpec) -> Starlette:
    """The trainer that `spec` describes, with nothing loaded."""
    trainer = Trainer(spec)
    queue = _Queue(spec.recipe.get("trainer", {}).get("threads", 0) or os.cpu_count() or 1)

    async def health(_request: Request) -> Response:
        return _json(trainer.health(queue.busy))

    commands: list[tuple[str, type[Command], Callable[[Any], Message]]] = [
        ("load", Load, trainer.load),
        ("train", Train, trainer.train),
        ("logprobs", Logprobs, trainer.logprobs),
        ("publish", Write, trainer.publish),
        ("send", Send, trainer.send),
        ("checkpoint", Write, trainer.checkpoint),
    ]
    routes = [
        Route(f"/{name}", _endpoint(trainer, queue, kind, obey), methods=["POST"]) for name, kind, obey in commands
    ]
    return Starlette(routes=[Route("/health", health), *routes])


class _Queue:
    """Commands, one at a time, all in one thread (torch keeps a thread pool for every thread that calls it).

    The size of that pool is set by the thread itself: bits depend on it, and other threads' settings do not reach it.
    """

    def __init__(self, threads: int) -> None:
        self.thread = ThreadPoolExecutor(1, "trainer", torch.set_num_threads, (threads,))
        self.waiting = 0

    @property
    def busy(self) -> bool:
        return self.waiting > 0

    async def run(self, work: Callable[[], Message]) -> Message:
        self.waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self.thread, work)
        finally:
            self.waiting -= 1


def _endpoint(trainer: Trainer, queue: _Queue, kind: type[Command], obey: Callable[[Any], Message]) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        try:
            command = kind.model_validate_json(await request.body())
            trainer.fence.admit(command.owner)  # at once, so that what a lower owner has queued is refused too
            return _json(await queue.run(lambda: obey(command)))
        except Exception as error:
            return _failure(error)

    return endpoint


def _json(message: Message) -> Response:
    return Response(message.model_dump_json(), media_type="application/json")


def _failure(error: Exception) -> Response:
    """409: refused; 422: malformed body; 400: what a person can mend; 500, and a log entry: the rest."""
    if isinstance(error, Refused):
        return JSONResponse({"error": str(error)}, 409)
    if isinstance(error, ValidationError):
        return JSONResponse({"error": f"malformed command: {error}"}, 422)
    if isinstance(error, UserError):
        return JSONResponse({"error": str(error)}, 400)
    log.error("a command failed", exc_info=error)
    return JSONResponse({"error": f"{type(error).__name__}: {error}"}, 500)
