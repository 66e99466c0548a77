"""The process of a rollout worker and its HTTP API.

/begin, /orders, /serving, /busy, /news, /write, /flush, /leave, /close, and /end, which ends the process. Errors are
JSON, {"error": "..."}; the status tells their kind (`areal_tasks.rollout.orders.STATUSES`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from areal_tasks.engines.lifeline import DUTIES
from areal_tasks.engines.service import ServiceSpec, exit_with_reason, read_spec, serve
from areal_tasks.engines.sharing import Serving
from areal_tasks.rollout.orders import STATUSES, Begin, Orders, Part
from areal_tasks.rollout.worker.service import WorkerService

log = logging.getLogger(__name__)

FAREWELL_SECONDS: Final = 60.0  # to write finished groups when the flow is gone

Handler = Callable[[Request], Awaitable[Any]]


def make_app(spec: ServiceSpec) -> Starlette:
    """The HTTP application of a worker that has no orders yet."""
    worker = WorkerService(spec)

    async def begin(request: Request) -> None:
        await worker.begin(Begin.model_validate_json(await request.body()))

    async def orders(request: Request) -> None:
        worker.apply(Orders.model_validate_json(await request.body()))

    async def serving(request: Request) -> None:
        await worker.follow(Serving.model_validate_json(await request.body()))

    async def busy(request: Request) -> dict[str, int]:
        return worker.busy()

    async def news(request: Request) -> BaseModel:
        return await worker.news(int(request.query_params["known"]))

    async def write(request: Request) -> BaseModel:
        return await worker.write(Part.model_validate_json(await request.body()))

    async def flush(request: Request) -> None:
        await worker.flush()

    async def leave(request: Request) -> None:
        worker.leave()

    async def close(request: Request) -> None:
        await worker.close()

    async def end(request: Request) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        duty = lambda: asyncio.run_coroutine_threadsafe(worker.close(), loop).result(FAREWELL_SECONDS)  # noqa: E731
        DUTIES.append(duty)
        try:
            yield
        finally:
            DUTIES.remove(duty)
            await worker.close()

    handlers: tuple[Handler, ...] = (begin, orders, serving, busy, news, write, flush, leave, close, end)
    routes = [Route(f"/{handler.__name__}", _endpoint(handler), methods=["POST"]) for handler in handlers]
    return Starlette(routes=routes, lifespan=lifespan)


def _endpoint(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            found = await handler(request)
        except Exception as error:
            return _failure(error)
        if isinstance(found, BaseModel):
            return Response(found.model_dump_json(), media_type="application/json")
        return JSONResponse(found)

    return endpoint


def _failure(error: Exception) -> Response:
    status = next((status for kind, status in STATUSES if isinstance(error, kind)), 500)
    if status == 500:
        log.error("a request failed", exc_info=error)
    return JSONResponse({"error": str(error) or type(error).__name__}, status)


def main() -> None:
    """Serve until asked to end."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with suppress(OSError):  # out of memory, Linux ends users' code rather than a trainer or the flow
        Path("/proc/self/oom_score_adj").write_text("500")
    with exit_with_reason():
        spec = read_spec()
        serve(make_app(spec), spec)
