"""What all resident services share: specification, bearer token and registration.

A service is `python -m <module>`. It reads its specification from the environment, listens on a free loopback port,
registers its address in the store, and ends with the process that started it (`lifeline`).
"""

from __future__ import annotations

import hmac
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from types import FrameType
from typing import Any, Final

import uvicorn
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from areal_tasks.engines.ports import HOST, host_and_port, listen, url_host
from areal_tasks.engines.tls import CERTIFICATE, KEY
from areal_tasks.processes import keep_loopback_direct
from areal_tasks.secret import TOKEN, secret
from areal_tasks.store.backend import Missing, Store, Unavailable, open_store
from areal_tasks.store.commit import read_record
from areal_tasks.store.paths import service as service_path
from areal_tasks.store.runs import Run
from schemas.errors import UserError
from schemas.manifest import ServiceRecord, WeightsRef
from schemas.recipe.recipe import Recipe
from schemas.record import Record

log = logging.getLogger(__name__)

SPEC: Final = "AREAL_SERVICE_SPEC"
KEEP_ALIVE_SECONDS: Final = 120  # how long a service keeps an idle connection: longer than clients do
FIND_SECONDS: Final = 0.2  # between two polls for a record
UNAVAILABLE: Final = 75  # EX_TEMPFAIL: exit code of a service that cannot start because store or cluster do not answer


class ModelFolder(Record):
    """The source folder of a model that is being copied into the store: sizes and modification times of its files."""

    path: str
    files: dict[str, tuple[int, int]]  # by name: bytes, and nanoseconds since the epoch


class ServiceSpec(Record):
    """What a service receives at its start. Contains no secret."""

    name: str
    restart: int
    store_url: str
    run: str
    owner: int
    recipe: dict[str, Any]
    weights: WeightsRef | None = None
    folder: ModelFolder | None = None  # what a server starts on, as version 0, while the store has no weights
    node: int = 0  # the number of its machine, of a trainer or a server on several
    gpus: tuple[str, ...] = ()  # the GPUs it may use, as in CUDA_VISIBLE_DEVICES; empty: none is assigned
    sending: tuple[int, ...] = ()  # the trainer's ranks whose weights servers read on their GPUs
    gpu_users: int = 1  # services that share its most crowded GPU, itself included
    address: str = HOST  # of the interface that it listens on
    tls: str = ""  # a folder with the key and the certificate that it shows; empty: it speaks plain HTTP


def spec_of(run: Run, recipe: Recipe, name: str, **more: Any) -> ServiceSpec:
    """The specification of the first start of a service of `run`; `more`: further fields of `ServiceSpec`."""
    written = recipe.model_dump(mode="json")
    return ServiceSpec(
        name=name, restart=0, store_url=run.store.url, run=run.name, owner=run.owner, recipe=written, **more
    )


def read_spec() -> ServiceSpec:
    secret(TOKEN)  # takes all that this process was handed, before it can start another
    return ServiceSpec.model_validate_json(os.environ[SPEC])


@contextmanager
def as_service() -> Iterator[None]:
    """Log as services do. Inside, a UserError ends the process with its reason, or UNAVAILABLE for the store."""
    keep_loopback_direct()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # below that it names each request
    try:
        yield
    except Unavailable as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(UNAVAILABLE)
    except UserError as error:
        sys.exit(f"error: {error}")


def exit_at_sigterm() -> None:
    """Have the first SIGTERM raise SystemExit in the main thread, so that it cleans up; further ones are ignored."""
    signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + number)


class BearerAuth:
    """ASGI middleware: refuses every request and every websocket that does not carry the service's token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app = app
        self.expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or hmac.compare_digest(given, self.expected):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await JSONResponse({"error": "missing or wrong bearer token"}, status_code=401)(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})


def status_in(statuses: Iterable[tuple[type[Exception], int]], error: BaseException) -> int:
    """The HTTP status of the first kind in this table that the error is of; 500, which is unexpected, for any other."""
    return next((status for kind, status in statuses if isinstance(error, kind)), 500)


def endpoint(
    handle: Callable[[Request], Awaitable[Any]],
    status_of: Callable[[Exception], int],
    text_of: Callable[[Exception], str] = str,
) -> Callable[[Request], Awaitable[Response]]:
    """Answers with the response of `handle`, its result as JSON, or `{"error": …}` and a status; logs status 500."""

    async def answer(request: Request) -> Response:
        """The response to one request."""
        try:
            found = await handle(request)
        except Exception as error:
            if (status := status_of(error)) == 500:
                log.error("%s failed", request.url.path, exc_info=error)
            return JSONResponse({"error": text_of(error) or type(error).__name__}, status)
        if isinstance(found, Response):
            return found
        if isinstance(found, BaseModel):
            return Response(found.model_dump_json(), media_type="application/json")
        return JSONResponse(found)

    return answer


#: For each request, by its name: what is called with its body, and what that is (None: it has none).
Handlers = Mapping[str, tuple[Callable[..., Awaitable[Any]], type[BaseModel] | None]]


def routes_of(
    handlers: Handlers, status_of: Callable[[Exception], int], text_of: Callable[[Exception], str] = str
) -> list[Route]:
    """A route for each request, by POST. Errors are answered as by `endpoint`."""

    def route(name: str, handle: Callable[..., Awaitable[Any]], body: type[BaseModel] | None) -> Route:
        async def parsed(request: Request) -> Any:
            return await (handle() if body is None else handle(body.model_validate_json(await request.body())))

        return Route(f"/{name}", endpoint(parsed, status_of, text_of), methods=["POST"])

    return [route(name, *one) for name, one in handlers.items()]


def uvicorn_server(app: Starlette, tls: str, **more: Any) -> uvicorn.Server:
    """A server for `app` that shows the certificate in the folder `tls`, if any; `more`: settings of uvicorn."""
    config = uvicorn.Config(
        app,
        log_config=None,  # uvicorn's would first flush all handlers: 5 s for Prefect's, which needs the same lock
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=2,
        ssl_keyfile=f"{tls}/{KEY}" if tls else None,
        ssl_certfile=f"{tls}/{CERTIFICATE}" if tls else None,
        **more,
    )
    return uvicorn.Server(config)


def make_server(app: Starlette, spec: ServiceSpec, token: str) -> tuple[uvicorn.Server, socket.socket]:
    """A server for `app` behind `token`, with its socket on a free port, registered in the store."""
    app.add_middleware(BearerAuth, token=token)
    listener = listen(spec.address)
    register(spec, url_at(spec, listener.getsockname()[1]))
    return uvicorn_server(app, spec.tls), listener


def serve(app: Starlette, spec: ServiceSpec) -> None:
    """Serve `app` until a signal ends it, behind the token that this process was handed."""
    server, listener = make_server(app, spec, secret(TOKEN))
    with listener:
        server.run(sockets=[listener])


def url_at(spec: ServiceSpec, port: int) -> str:
    return f"{'https' if spec.tls else 'http'}://{url_host(spec.address)}:{port}"


def register(spec: ServiceSpec, url: str) -> None:
    """Record in the store that the service listens at `url`: from here on it is ready."""
    record = ServiceRecord(
        name=spec.name,
        restart=spec.restart,
        url=url,
        host=socket.gethostname(),
        pid=os.getpid(),
        started=datetime.now(UTC).isoformat(),
    )
    path = service_path(spec.run, spec.owner, spec.name, spec.restart)
    open_store(spec.store_url).create(path, record.encode(path))


def part_name(server: str, node: int) -> str:
    """The name of a server's service on its machine number `node`: on the first that of the server."""
    return f"{server}.{node}" if node else server


def server_of(part: str) -> str:
    """The server to which a service of this name belongs."""
    return part.partition(".")[0]


def await_meeting(spec: ServiceSpec, name: str) -> tuple[str, int]:
    """Host and port that another service of this start has registered as `name`. The supervisor limits the time."""
    records, meeting = open_store(spec.store_url), spec.model_copy(update={"name": name})
    while (url := registered(records, meeting)) is None:
        time.sleep(FIND_SECONDS)
    return host_and_port(url.removeprefix("tcp://"))


def register_meeting(spec: ServiceSpec, name: str, host: str, port: int) -> None:
    """Register as `name` where the services of one start meet, for `await_meeting`."""
    register(spec.model_copy(update={"name": name}), f"tcp://{url_host(host)}:{port}")


def registered(store: Store, spec: ServiceSpec) -> str | None:
    """The address that this start of a service has registered; None: it is not ready."""
    with suppress(Missing):
        return read_record(store, service_path(spec.run, spec.owner, spec.name, spec.restart), ServiceRecord).url
    return None
