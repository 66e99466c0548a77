"""An inference server that answers at once, in another process: answers made beforehand, in SGLang's shape and size."""

from __future__ import annotations

import multiprocessing
import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PROMPT_TOKENS = 64


def answer(tokens: int) -> dict[str, Any]:
    """One completion as SGLang answers it."""
    source = random.Random(0)
    output = [source.randrange(150_000) for _ in range(tokens)]
    meta = {
        "id": "0" * 32,
        "finish_reason": {"type": "length", "length": tokens},
        "prompt_tokens": PROMPT_TOKENS,
        "weight_version": "0",
        "completion_tokens": tokens,
        "cached_tokens": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": [(-source.random() * 5, token, None) for token in output],
        "e2e_latency": 0.1,
    }
    return {"text": "word " * tokens, "output_ids": output, "meta_info": meta}


def serve(listener: socket.socket, made: Sequence[list[dict[str, Any]]]) -> None:
    """Answer requests with the answers `made`, in turn."""
    encoded = cycle([orjson.dumps(body) for body in made])

    async def generate(request: Request) -> Response:
        await request.body()
        return Response(next(encoded), media_type="application/json")

    routes = [Route("/generate", generate, methods=["POST"])]
    uvicorn.Server(
        uvicorn.Config(Starlette(routes=routes), log_level="error", access_log=False, timeout_keep_alive=600)
    ).run(sockets=[listener])


@contextmanager
def instant_server(made: Sequence[list[dict[str, Any]]]) -> Iterator[str]:
    """While inside, such a server runs; gives its address, host:port."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    server = multiprocessing.get_context("fork").Process(target=serve, args=(listener, made), daemon=True)
    server.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.terminate()
        server.join()
