"""What the inference client itself costs: tokens a second against a server that answers at once, on one event loop.

    python -m benchmarks.client [--concurrency 64] [--group 8] [--tokens 256]

The server is another process; its answers are SGLang's in shape and size, made once. So the figure is an upper bound
of what one client can take from any number of servers, and must stay well above what a server generates.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import socket
import time
from typing import Annotated, Any

import orjson
import typer
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from areal_tasks.engines.client import GenerateRequest, InferenceClient
from schemas.recipe.sections import Inference

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


def serve(listener: socket.socket, group: int, tokens: int) -> None:
    """Answer every request with the same bytes."""
    body = orjson.dumps([answer(tokens)] * group)

    async def generate(request: Request) -> Response:
        await request.body()
        return Response(body, media_type="application/json")

    async def info(request: Request) -> Response:
        return Response(b'{"weight_version": "0"}', media_type="application/json")

    app = Starlette(routes=[Route("/generate", generate, methods=["POST"]), Route("/model_info", info)])
    uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False)).run(sockets=[listener])


async def measure(url: str, concurrency: int, group: int, groups: int) -> tuple[float, float]:
    """Seconds and processor seconds for `groups` groups, after as many to warm up."""
    client = InferenceClient([url], "", Inference(max_concurrent_requests=concurrency))
    prompt = list(range(1000, 1000 + PROMPT_TOKENS))
    asked = [GenerateRequest(prompt, 512, seed=i, group=i // group) for i in range(groups * group)]
    try:
        for _ in range(2):
            started, used = time.perf_counter(), time.process_time()
            await client.generate(asked)
        return time.perf_counter() - started, time.process_time() - used
    finally:
        await client.close()


def main(
    concurrency: Annotated[int, typer.Option(help="Requests under way at once.")] = 64,
    group: Annotated[int, typer.Option(help="Samples a request.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens a sample.")] = 256,
    groups: Annotated[int, typer.Option(help="Requests in all.")] = 512,
) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    server = multiprocessing.get_context("fork").Process(target=serve, args=(listener, group, tokens), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    seconds, used = asyncio.run(measure(url, concurrency, group, groups))
    server.terminate()
    count = groups * group * tokens
    print(
        f"{count} tokens in {groups} requests of {group} samples, {concurrency} at a time: {count / seconds:,.0f} "
        f"tokens/s; the client used {1e6 * used / count:.2f} µs of processor time a token"
    )


if __name__ == "__main__":
    typer.run(main)
