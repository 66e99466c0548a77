"""What the inference client itself costs: tokens a second against a server that answers at once, on one event loop.

    python -m benchmarks.client [--concurrency 64] [--group 8] [--tokens 256]

The server is another process; its answers are SGLang's in shape and size, made once. So the figure is an upper bound
of what one client can take from any number of servers, and must stay well above what a server generates.
"""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import typer

from areal_tasks.engines.client import GenerateRequest, InferenceClient
from benchmarks.instant import PROMPT_TOKENS, answer, instant_server
from schemas.recipe.sections import Inference


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
    with instant_server([[answer(tokens)] * group]) as address:
        seconds, used = asyncio.run(measure(f"http://{address}", concurrency, group, groups))
    count = groups * group * tokens
    print(
        f"{count} tokens in {groups} requests of {group} samples, {concurrency} at a time: {count / seconds:,.0f} "
        f"tokens/s; the client used {1e6 * used / count:.2f} µs of processor time a token"
    )


if __name__ == "__main__":
    typer.run(main)
