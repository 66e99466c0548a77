"""The embedded inference server as a process. Its HTTP API: those of SGLang's native routes that the client uses."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import orjson
import torch
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from areal_tasks.engines.embedded.api import Generate, Pause, UpdateWeights, answer, open_request, parse, partial_answer
from areal_tasks.engines.embedded.engine import Engine
from areal_tasks.engines.embedded.proven import check_decode
from areal_tasks.engines.embedded.runner import Runner, read_weights_folder
from areal_tasks.engines.embedded.sequence import SamplingParams, Sequence, make_sequence
from areal_tasks.engines.ends import Detokenizer, end_tokens
from areal_tasks.engines.fetching import local_weights, weights_folder
from areal_tasks.engines.models import load_tokenizer
from areal_tasks.engines.service import ServiceSpec, as_service, endpoint, read_spec, serve, status_in
from areal_tasks.store.backend import Store, Unavailable, open_store
from areal_tasks.store.objects.files import read_weights
from schemas.errors import UserError
from schemas.recipe.sections import Inference, Model

Answer = dict[str, Any]
#: The HTTP status of each error: 503 if store or engine do not answer. Any other is 500, as `NotFinite`.
STATUSES: Final = ((Unavailable, 503), (RuntimeError, 503), (UserError, 400))
status_of: Final = partial(status_in, STATUSES)
HEALTH_SECONDS: Final = 20.0
HEALTH_POLL_SECONDS: Final = 0.02


def make_app(spec: ServiceSpec, on_failure: Callable[[], None] = lambda: None) -> Starlette:
    """Load the model that `spec` names, start its engine, and return its application. Raises UserError."""
    if spec.weights is None:
        raise UserError("the inference server was given no weights; publish version 0 first")
    settings = Inference.model_validate(spec.recipe.get("inference", {}))
    model = Model.model_validate(spec.recipe["model"])
    store = open_store(spec.store_url)
    torch.set_num_threads(settings.threads or os.cpu_count() or 1)
    with local_weights(store, read_weights(store, spec.weights).files) as folder:
        runner = Runner(folder, settings.slots, model.max_length, getattr(torch, model.dtype))
        tokenizer = load_tokenizer(folder)
    check_decode(runner.model.config)
    engine = Engine(
        runner,
        settings.slots,
        version=str(spec.weights.version),
        detokenizer=Detokenizer(tokenizer),
        eos=end_tokens(runner.model.config, getattr(runner.model, "generation_config", None), tokenizer),
        deterministic=settings.deterministic,
        on_failure=on_failure,
    )
    engine.start()
    return Server(engine, store).app()


def main() -> None:
    """Serve until terminated; exits with the reason if the model cannot be served."""
    spec = read_spec()
    with as_service():
        on_failure = partial(os.kill, os.getpid(), signal.SIGTERM)  # the supervisor restarts the process
        serve(make_app(spec, on_failure), spec)


@dataclass
class Server:
    """The HTTP routes of one engine."""

    engine: Engine
    store: Store
    updating: asyncio.Lock = field(default_factory=asyncio.Lock)

    def app(self) -> Starlette:
        """The ASGI application."""
        handlers = [
            ("POST", "/generate", self.generate),
            ("POST", "/pause_generation", self.pause),
            ("POST", "/continue_generation", self.resume),
            ("POST", "/update_weights_from_disk", self.update_weights),
            ("GET", "/health_generate", self.health),
            ("GET", "/server_info", self.server_info),
            ("GET", "/model_info", self.model_info),
        ]
        routes = [Route(path, endpoint(do, status_of), methods=[how]) for how, path, do in handlers]
        return Starlette(routes=routes, lifespan=self._serving)

    @asynccontextmanager
    async def _serving(self, app: Starlette) -> AsyncIterator[None]:
        """While inside, the engine runs; its thread holds the model."""
        try:
            yield
        finally:
            await asyncio.to_thread(self.engine.close)

    async def generate(self, request: Request) -> Response:
        """POST /generate: samples the request's prompts; aborts them if the client disconnects."""
        body = parse(Generate, await request.body())
        asked = open_request(body, self.engine)
        if body.stream:
            return stream(self.engine, asked)
        finished = asyncio.wrap_future(self.engine.submit(asked))
        disconnected = asyncio.ensure_future(_disconnect(request))
        await asyncio.wait({finished, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        disconnected.cancel()
        if not finished.done():
            await asyncio.wrap_future(self.engine.abort(set(asked).__contains__))
            return Response(status_code=499)  # as SGLang, for a request that was aborted before anything was generated
        finished.result()
        return Response(answer(asked, self.engine.detokenizer, self.engine.version), media_type="application/json")

    async def pause(self, request: Request) -> Answer:
        body = parse(Pause, await request.body())
        await asyncio.wrap_future(self.engine.pause(body.mode))
        return {"status": "ok", "message": f"paused ({body.mode})"}

    async def resume(self, request: Request) -> Answer:
        await asyncio.wrap_future(self.engine.resume())
        return {"status": "ok", "message": "continued"}

    async def update_weights(self, request: Request) -> Answer:
        """POST /update_weights_from_disk: answers when the engine generates with the new weights."""
        body = parse(UpdateWeights, await request.body())
        if not body.flush_cache and not self.engine.paused:
            raise UserError("flush_cache=false keeps the old cache: pause with mode in_place first")
        version = self.engine.version if body.weight_version is None else str(body.weight_version)
        async with self.updating:
            if body.abort_all_requests:
                await asyncio.wrap_future(self.engine.abort(lambda sequence: True))
            weights = await asyncio.to_thread(self._read, body.model_path)
            await asyncio.wrap_future(self.engine.update_weights(weights, version, not body.flush_cache))
        return {"success": True, "message": f"loaded {body.model_path}", "weight_version": version}

    def _read(self, source: str) -> dict[str, Any]:
        with weights_folder(self.store, source) as folder:
            return read_weights_folder(folder, self.engine.runner.model)

    async def health(self, request: Request) -> Answer:
        """GET /health_generate: healthy if the engine generates any token, or is paused."""
        if not self.engine.paused and self.engine.failure is None and not await self._generates():
            raise RuntimeError(f"no token within {HEALTH_SECONDS:.0f} s")
        if self.engine.failure is not None:
            raise RuntimeError(self.engine.failure)
        return {"status": "ok"}

    async def _generates(self) -> bool:
        """Whether the engine makes a step in time. With a long queue, the probe's own token may come much later."""
        before, deadline = self.engine.steps, time.monotonic() + HEALTH_SECONDS
        probe = make_sequence([0], SamplingParams(max_new_tokens=1), frozenset(), self.engine.runner.max_length)
        work = asyncio.wrap_future(self.engine.submit([probe]))
        while self.engine.steps == before and time.monotonic() < deadline:
            await asyncio.wait({work}, timeout=HEALTH_POLL_SECONDS)
        if work.done():
            work.result()
        else:
            work.cancel()
            self.engine.abort({probe}.__contains__)
        return self.engine.steps > before

    async def server_info(self, request: Request) -> Answer:
        running, queued = self.engine.load()
        engine = self.engine
        state = {"deterministic": engine.deterministic, "paused": engine.paused, "steps": engine.steps}
        return {"running": running, "queued": queued, **state}

    async def model_info(self, request: Request) -> Answer:
        return {"weight_version": self.engine.version}


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# ── streams ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def stream(engine: Engine, asked: list[Sequence]) -> Response:
    """Answer a request for one sample by events in SGLang's format: `data: {…}`, finally `data: [DONE]`.

    Each event repeats the content of earlier ones. Events are skipped if sending is slower than the engine. If the
    client disconnects, the sample is aborted.
    """
    release = BackgroundTask(engine.abort, set(asked).__contains__)  # runs after the last event, too
    return StreamingResponse(_events(engine, *asked), media_type="text/event-stream", background=release)


async def _events(engine: Engine, sequence: Sequence) -> AsyncIterator[bytes]:
    updates: asyncio.Queue[Sequence | BaseException] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def put(update: Sequence | BaseException) -> None:
        loop.call_soon_threadsafe(updates.put_nowait, update)

    sequence.listener = put
    engine.submit([sequence]).add_done_callback(lambda f: put(f.exception() or sequence))
    latest: Sequence | BaseException | None = None
    while latest is None or (isinstance(latest, Sequence) and latest.finish is None):
        latest = await updates.get()
        while not updates.empty():
            latest = updates.get_nowait()
        if isinstance(latest, Sequence):
            data = partial_answer(latest, engine.detokenizer, engine.version)
        else:
            data = orjson.dumps({"error": {"message": str(latest), "code": status_of(latest)}})
        yield b"data: " + data + b"\n\n"
    yield b"data: [DONE]\n\n"
