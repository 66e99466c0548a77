"""The HTTP API of the embedded server: SGLang's native routes for one engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from areal_tasks.engines.embedded.api import (
    Abort,
    Answerable,
    BadRequest,
    Generate,
    Limits,
    Pause,
    UpdateWeights,
    answer,
    open_request,
    parse,
)
from areal_tasks.engines.embedded.engine import Engine
from areal_tasks.engines.embedded.runner import read_weights_folder
from areal_tasks.engines.embedded.sequence import Job, SamplingParams, Sequence, make_sequences
from areal_tasks.engines.embedded.streaming import FAILURES, status_of, stream
from areal_tasks.engines.embedded.weights import weights_folder
from areal_tasks.store.backend import Store
from areal_tasks.store.provenance import code_version

HEALTH_SECONDS: Final = 20.0
HEALTH_POLL_SECONDS: Final = 0.02
Handler = Callable[[Request], Awaitable[Response]]


class Server:
    """The routes. `model_path` is what the current weights were loaded from."""

    def __init__(self, engine: Engine, limits: Limits, store: Store, model_path: str) -> None:
        self.engine = engine
        self.limits = limits
        self.store = store
        self.model_path = model_path
        self.version = code_version()
        self.updating = asyncio.Lock()

    def app(self) -> Starlette:
        """The ASGI application."""
        posts = {
            "/generate": self.generate,
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/abort_request": self.abort,
            "/update_weights_from_disk": self.update_weights,
        }
        gets = {
            "/health": self.health,
            "/health_generate": self.health_generate,
            "/server_info": self.server_info,
            "/model_info": self.model_info,
        }
        routes = [Route(path, _guarded(h), methods=["POST"]) for path, h in posts.items()]
        return Starlette(routes=routes + [Route(path, _guarded(h), methods=["GET"]) for path, h in gets.items()])

    async def generate(self, request: Request) -> Response:
        body = parse(Generate, await request.body())
        asked = open_request(body, self.limits)
        if body.stream:
            return stream(self.engine, asked)
        finished = asyncio.ensure_future(self._finish(asked.sequences))
        disconnected = asyncio.ensure_future(_disconnect(request))
        await asyncio.wait({finished, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        disconnected.cancel()
        if not finished.done():
            await self._abort_all(asked)
            return _json({"error": "the client disconnected"}, 499)
        finished.result()
        return Response(answer(asked, self.engine.detokenizer, self.engine.version), media_type="application/json")

    async def _finish(self, sequences: list[Sequence]) -> None:
        """Have the engine generate, and wait until all sequences have ended."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def done(error: Exception | None) -> None:
            loop.call_soon_threadsafe(_resolve, future, error)

        self.engine.submit(Job(sequences, done))
        await future

    async def _abort_all(self, asked: Answerable) -> None:
        sequences = set(asked.sequences)
        await asyncio.wrap_future(self.engine.abort(sequences.__contains__))

    async def pause(self, request: Request) -> Response:
        body = parse(Pause, await request.body())
        await asyncio.wrap_future(self.engine.pause(body.mode))
        return _json({"status": "ok", "message": f"paused ({body.mode})"})

    async def resume(self, request: Request) -> Response:
        await asyncio.wrap_future(self.engine.resume())
        return _json({"status": "ok", "message": "continued"})

    async def abort(self, request: Request) -> Response:
        body = parse(Abort, await request.body())
        if not body.rid and not body.abort_all:
            raise BadRequest("name a rid, or set abort_all")
        return _json({"aborted": await asyncio.wrap_future(self.engine.abort(partial(_matches, body)))})

    async def update_weights(self, request: Request) -> Response:
        body = parse(UpdateWeights, await request.body())
        if not body.flush_cache and not self.engine.paused:
            raise BadRequest("flush_cache=false keeps the old cache: pause with mode in_place first")
        version = self.engine.version if body.weight_version is None else str(body.weight_version)
        async with self.updating:
            if body.abort_all_requests:
                await asyncio.wrap_future(self.engine.abort(lambda sequence: True))
            seconds = await self._load(body.model_path, version, not body.flush_cache)
        message = f"loaded {body.model_path} in {seconds:.3f} s"
        return _json({"success": True, "message": message, "weight_version": version, "seconds": seconds})

    async def _load(self, source: str, version: str, keep_cache: bool) -> float:
        started = time.perf_counter()
        weights = await asyncio.to_thread(self._read, source)
        await asyncio.wrap_future(self.engine.update_weights(weights, version, keep_cache))
        self.model_path = source
        return time.perf_counter() - started

    def _read(self, source: str) -> dict[str, Any]:
        with weights_folder(self.store, source) as folder:
            return read_weights_folder(folder, self.engine.runner.model)

    async def health(self, request: Request) -> Response:
        if self.engine.failure is not None:
            return _json({"error": self.engine.failure}, 503)
        return _json({"status": "ok", "weight_version": self.engine.version, "paused": self.engine.paused})

    async def health_generate(self, request: Request) -> Response:
        """Healthy if the engine generates any token, if only for this request; a paused engine need not."""
        if not self.engine.paused and self.engine.failure is None and not await self._generates():
            return _json({"error": f"no token within {HEALTH_SECONDS:.0f} s"}, 503)
        return await self.health(request)

    async def _generates(self) -> bool:
        """Whether the engine makes a step in time. With a long queue, the probe's own token may come much later."""
        before, deadline = self.engine.steps, time.monotonic() + HEALTH_SECONDS
        probe = make_sequences("health", [0], SamplingParams(max_new_tokens=1), frozenset(), self.limits.max_length)
        work = asyncio.ensure_future(self._finish(probe))
        while self.engine.steps == before and time.monotonic() < deadline:
            await asyncio.wait({work}, timeout=HEALTH_POLL_SECONDS)
        if work.done():
            work.result()
        else:
            work.cancel()
            self.engine.abort(set(probe).__contains__)
        return self.engine.steps > before

    async def server_info(self, request: Request) -> Response:
        running, queued = self.engine.load()
        shapes = self.engine.runner.shapes
        return _json(
            {
                "version": self.version,
                "engine": "embedded",
                "deterministic": self.engine.deterministic,
                "slots": self.engine.usable_slots,
                "paused": self.engine.paused,
                "running": running,
                "queued": queued,
                "steps": self.engine.steps,
                "shapes": {"rows": shapes.rows, "lengths": shapes.lengths, "prefill_rows": shapes.prefill_rows},
                **self._model(),
            }
        )

    async def model_info(self, request: Request) -> Response:
        return _json(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "model_path": self.model_path,
            "weight_version": self.engine.version,
            "context_length": self.limits.max_length,
            "vocab_size": self.limits.vocab_size,
        }


def _guarded(handler: Handler) -> Handler:
    """Errors as JSON, with the status that `status_of` gives them."""

    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except FAILURES as error:
            return _json({"error": str(error)}, status_of(error))

    return guarded


def _json(content: Any, status: int = 200) -> Response:
    dumped = orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS)
    return Response(dumped, status_code=status, media_type="application/json")


def _resolve(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _matches(body: Abort, sequence: Sequence) -> bool:
    return body.abort_all or sequence.rid == body.rid or sequence.rid.startswith(f"{body.rid}_")


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
