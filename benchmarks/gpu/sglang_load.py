"""A bare SGLang server and a bare client: as fast as the engine gets, with nothing of this project in between."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import orjson

from areal_tasks.engines.ports import probe_port
from areal_tasks.engines.service import ServiceSpec
from areal_tasks.engines.sglang.command import arguments, environment
from benchmarks.gpu.results import end_tree
from schemas.recipe.load import load_recipe


@contextlib.contextmanager
def server(model: Path, recipe: str, overrides: Sequence[str], log: Path, seconds: float = 300) -> Iterator[str]:
    """A server with exactly the flags that the recipe's own would get; its URL once it generates."""
    port = probe_port()
    command = [sys.executable, "-m", "sglang.launch_server", *server_flags(model, recipe, overrides, port)]
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"$ {' '.join(command)}", flush=True)
    with log.open("wb") as sink:
        own = environment(os.environ, Path(tempfile.mkdtemp(prefix="rendezvous-")))
        process = subprocess.Popen(command, env=own, stdout=sink, stderr=subprocess.STDOUT)
    try:
        _wait(process, f"http://127.0.0.1:{port}", log, seconds)
        yield f"http://127.0.0.1:{port}"
    finally:
        end_tree(process)


def server_flags(model: Path, recipe: str, overrides: Sequence[str], port: int) -> list[str]:
    """The recipe's command line for its first server, for the weights in `model`."""
    values = load_recipe(recipe, overrides).model_dump(mode="json")
    spec = ServiceSpec(name="inference-0", restart=0, store_url="", run="raw", owner=1, recipe=values, weights=None)
    return arguments(spec, model, port)


def _wait(process: subprocess.Popen[Any], url: str, log: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health_generate", timeout=30).status_code == 200:
                return
        time.sleep(0.5)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
    raise SystemExit(f"SGLang was not ready within {seconds:.0f} s; its log ends:\n{tail}")


def generate(
    url: str, prompts: Sequence[Sequence[int]], new_tokens: int, concurrency: int, rounds: int
) -> list[dict[str, float]]:
    """Complete all prompts, `concurrency` at a time, `rounds` times over: {tokens, seconds} of each round."""
    return asyncio.run(_rounds(url, prompts, new_tokens, concurrency, rounds))


async def _rounds(
    url: str, prompts: Sequence[Sequence[int]], new_tokens: int, concurrency: int, rounds: int
) -> list[dict[str, float]]:
    async with bare_client() as session:
        found = []
        for _ in range(rounds):
            await flush_cache(session, url)
            found.append(await one_round(session, url, prompts, new_tokens, concurrency))
        return found


def bare_client(headers: Mapping[str, str] = {}) -> aiohttp.ClientSession:
    """As many connections as there are requests."""
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=900)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)


async def flush_cache(session: aiohttp.ClientSession, url: str) -> None:
    """So that no round finds what another has left."""
    await _post(session, f"{url}/flush_cache", {})


async def one_round(
    session: aiohttp.ClientSession, url: str, prompts: Sequence[Sequence[int]], new_tokens: int, concurrency: int
) -> dict[str, float]:
    """Complete all prompts, `concurrency` at a time: {tokens, seconds}."""
    gate, sampling = asyncio.Semaphore(concurrency), {"max_new_tokens": new_tokens, "temperature": 1.0}

    async def one(ids: Sequence[int]) -> int:
        async with gate:
            body = {"input_ids": list(ids), "sampling_params": sampling, "return_logprob": True}
            answer = orjson.loads(await _post(session, f"{url}/generate", body))
            return len(answer["meta_info"]["output_token_logprobs"])

    started = time.perf_counter()
    counts = await asyncio.gather(*(one(ids) for ids in prompts))
    return {"tokens": float(sum(counts)), "seconds": time.perf_counter() - started}


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> bytes:
    kind = {"Content-Type": "application/json"}
    async with session.post(url, data=orjson.dumps(body), headers=kind) as response:
        answer = await response.read()
        if response.status != 200:
            raise RuntimeError(f"{url} answered {response.status}: {answer[:500]!r}")
        return answer


def reload_seconds(url: str, folder: Path, repeats: int = 5) -> list[float]:
    """Seconds of `/update_weights_from_disk` from a folder (memory-backed, if it is to be fast)."""
    times = []
    with httpx.Client(timeout=300) as client:
        for number in range(repeats):
            started = time.perf_counter()
            body = {"model_path": str(folder), "weight_version": f"raw-{number}"}
            answer = client.post(f"{url}/update_weights_from_disk", json=body).raise_for_status().json()
            if not answer["success"]:
                raise SystemExit(f"SGLang refused the weights: {json.dumps(answer)}")
            times.append(time.perf_counter() - started)
    return times


def cache_of(*logs: Path) -> dict[str, Any]:
    """Tokens that the cache of the server started last holds, and how often requests were put back; None: not said.

    Servers are comparable if their caches have one size and neither was full.
    """
    said = [log.read_text(errors="replace") for log in sorted(logs) if log.exists()]
    sizes = [int(size) for text in said for size in re.findall(r"max_total_num_tokens=(\d+)", text)]
    full = sum(text.count("KV cache pool is full. Retract requests") for text in said)
    return {"cache_tokens": sizes[-1] if sizes else None, "retractions": full if sizes else None}
