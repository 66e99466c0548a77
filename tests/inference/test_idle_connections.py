"""A server that closes unused connections, while the client is away: no request is sent into a closing one."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from waiting import LIMIT, wait_until

from areal_tasks.engines import server as server_module
from areal_tasks.engines import server_pool
from areal_tasks.engines.access import Access
from areal_tasks.engines.client import GenerateRequest, InferenceClient
from schemas.recipe.sections import Inference


async def generate(request: Request) -> JSONResponse:
    meta: dict[str, Any] = {"finish_reason": {"type": "length"}, "weight_version": "0", "completion_tokens": 1}
    meta["output_token_logprobs"] = [[-0.5, 7, None]]
    prompts = (await request.json())["input_ids"]
    return JSONResponse([{"text": "", "output_ids": [7], "meta_info": meta} for _ in prompts])


async def info(request: Request) -> JSONResponse:
    return JSONResponse({"weight_version": "0"})


@contextmanager
def serving() -> Iterator[uvicorn.Server]:
    """A uvicorn, as SGLang has one, in a thread of its own."""
    routes = [Route("/generate", generate, methods=["POST"])]
    routes += [Route(path, info) for path in ("/model_info", "/health", "/health_generate")]
    server = uvicorn.Server(
        uvicorn.Config(Starlette(routes=routes), port=0, log_level="warning", timeout_keep_alive=int(LIMIT))
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield server
    finally:
        server.should_exit = True
        thread.join(LIMIT)


def close_connections(server: uvicorn.Server) -> None:
    """What the server does with connections that have been unused for too long. The client may have been faster."""
    connections = server.server_state.connections
    for connection in list(connections):
        connection.loop.call_soon_threadsafe(connection.transport.close)  # type: ignore[union-attr]
    wait_until(lambda: not connections, "connections that are closed")


def test_a_connection_that_the_server_has_closed_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "IDLE_SECONDS", 1e-6)  # any connection has been unused for longer

    async def work(server: uvicorn.Server) -> list[list[int]]:
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        client = InferenceClient([url], Access(), Inference())
        try:
            outputs = []
            for _ in range(3):
                [result] = await client.generate([GenerateRequest([1, 2], 1)])
                outputs.append(result.output_ids)
                close_connections(server)  # in a training step: this loop does not see it
            return outputs
        finally:
            await client.close()

    with caplog.at_level(logging.WARNING, logger=server_pool.__name__), serving() as server:
        assert asyncio.run(work(server)) == [[7]] * 3
    assert not caplog.messages, "it was evicted"


def test_connections_are_given_up_before_any_server_closes_them() -> None:
    assert uvicorn.Config("app").timeout_keep_alive > server_module.IDLE_SECONDS
