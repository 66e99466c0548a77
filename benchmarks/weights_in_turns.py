"""Weights through the store: tokens that servers generate meanwhile, loading all at once and half of them at a time.

    python -m benchmarks.weights_in_turns [--servers 2 4] [--publications 6] [--load-seconds 0.5]

Embedded servers in one process, each of which makes a step of its 8 slots every 50 ms, whatever the others do, as
servers on accelerators of their own. New weights come every `--every` seconds, while requests of 10 to 100 tokens keep
all slots full; each begins on weights that are not older than those that the servers hold. Loading takes
`--load-seconds` by itself. On `own` links it takes this long beside other loads, too; on a `shared` one, such as a
store or a disk that all wait for, loads slow each other down.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
import uvicorn

from areal_tasks.engines.access import Access
from areal_tasks.engines.client import GenerateRequest, InferenceClient
from areal_tasks.engines.embedded import process
from areal_tasks.engines.embedded.engine import Engine
from areal_tasks.engines.service import ServiceSpec
from areal_tasks.store.backend import open_store
from areal_tasks.store.commit import new_attempt
from areal_tasks.store.objects.files import commit_weights, upload
from areal_tasks.store.paths import weights_attempt
from areal_tasks.store.provenance import make_provenance, now
from benchmarks.bare_loop import machine
from benchmarks.embedded import make_model
from schemas.recipe.sections import Inference

SLOTS: Final = 8
MAX_LENGTH: Final = 128
STEP_SECONDS: Final = 0.05
SLICE_SECONDS: Final = 0.01  # for which a load has a shared link to itself


@dataclass
class Pace:
    """How long steps and loads take, and the tokens that were generated."""

    load_seconds: float
    shared: bool
    tokens: int = 0

    def __post_init__(self) -> None:
        self._link = threading.Lock()
        self._turn, self._advance, self._read = Engine._turn, Engine._advance, process.Server._read

    def turn(self, engine: Engine) -> None:
        ends = time.monotonic() + STEP_SECONDS
        self._turn(engine)
        time.sleep(max(ends - time.monotonic(), 0.0))

    def advance(self, engine: Engine, rows: Any, *values: Any) -> None:
        self.tokens += len(rows)
        self._advance(engine, rows, *values)

    def read(self, server: process.Server, source: str) -> dict[str, Any]:
        if not self.shared:
            time.sleep(self.load_seconds)
        for _ in range(round(self.load_seconds / SLICE_SECONDS) if self.shared else 0):
            with self._link:
                time.sleep(SLICE_SECONDS)
            time.sleep(0)  # others have the link
        return self._read(server, source)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """While inside, all embedded servers of this process keep it."""
        with (
            patch.object(Engine, "_turn", lambda engine: self.turn(engine)),
            patch.object(Engine, "_advance", lambda engine, *values: self.advance(engine, *values)),
            patch.object(process.Server, "_read", lambda server, source: self.read(server, source)),
        ):
            yield


@contextmanager
def server(spec: ServiceSpec) -> Iterator[str]:
    """While inside, an embedded server runs in a thread; gives its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    running = uvicorn.Server(uvicorn.Config(process.make_app(spec), log_level="error", access_log=False))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    running.should_exit = True
    thread.join()


@asynccontextmanager
async def servers(n: int, work: Path) -> AsyncIterator[tuple[InferenceClient, str]]:
    """A client of `n` servers, for η > 0, and the URL of weights that they can load."""
    store, attempt = open_store(f"file://{work}/store"), new_attempt()
    files = upload(store, weights_attempt("b", 0, attempt), make_model(work / "model", MAX_LENGTH))
    weights = commit_weights(store, "b", 0, attempt, "weights", files, make_provenance(1, now()))
    settings = Inference(slots=SLOTS, max_concurrent_requests=SLOTS, groups_per_request=1, threads=1)
    recipe = {"model": {"max_length": MAX_LENGTH}, "inference": settings.model_dump()}
    spec = ServiceSpec(name="b", restart=0, store_url=store.url, run="b", owner=1, recipe=recipe, weights=weights)
    async with AsyncExitStack() as stack:
        urls = [stack.enter_context(server(spec)) for _ in range(n)]
        client = InferenceClient(urls, Access(), settings, interruption="in_place")
        stack.push_async_callback(client.close)
        yield client, store.uri(weights.path)


async def generate(client: InferenceClient, seed: int) -> None:
    """Requests one after the other, each on the newest weights that servers generate with."""
    source = random.Random(seed)
    for number in count():
        floor, tokens = client.version or 0, source.randint(10, 100)
        await client.generate([GenerateRequest([5, 6, 7], tokens, seed=number, group=seed, floor=floor)])


@dataclass(frozen=True)
class Measured:
    """Of one publication: seconds until the last server had the version, and tokens until the next publication."""

    last: float
    during: int  # tokens until the last server had the version
    tokens: int


async def publications(client: InferenceClient, uri: str, pace: Pace, times: int, every: float) -> list[Measured]:
    """Publish so often while all servers generate; the first, during which they warm up, is left out."""
    work = [asyncio.ensure_future(generate(client, seed)) for seed in range(SLOTS * len(client.servers))]
    measured = []
    await asyncio.sleep(1.0)
    for version in range(1, times + 2):
        began, before = time.monotonic(), pace.tokens
        assert len(await client.update_weights(uri, version)) == len(client.servers)
        last, during = time.monotonic() - began, pace.tokens - before
        await asyncio.sleep(every - last)
        measured.append(Measured(last, during, pace.tokens - before))
    for one in work:
        one.cancel()
    await asyncio.gather(*work, return_exceptions=True)
    return measured[1:]


async def measure(n: int, shared: bool, in_turns: bool, options: argparse.Namespace) -> list[Measured]:
    pace = Pace(options.load_seconds, shared)
    with tempfile.TemporaryDirectory() as work, pace.kept():
        async with servers(n, Path(work)) as (client, uri):
            client._loading = replace(client._loading, in_turns=in_turns)
            await client.update_weights(uri, 0)
            return await publications(client, uri, pace, options.publications, options.every)


def line(name: str, measured: list[Measured], every: float, n: int) -> str:
    """A row of the table: means over the publications."""
    full, times = SLOTS * n / STEP_SECONDS, len(measured)
    last = sum(one.last for one in measured) / times
    during = sum(one.during for one in measured) / times / last / full
    tokens = sum(one.tokens for one in measured) / times
    return f"{name:34} {last:8.2f} {during:10.0%} {tokens:10.0f} {tokens / full / every:10.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--publications", type=int, default=6)
    parser.add_argument("--load-seconds", type=float, default=0.5)
    parser.add_argument("--every", type=float, default=4.0, help="seconds between two publications")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    print(f"{'servers, link, loading':34} {'last, s':>8} {'of full':>10} {'tokens':>10} {'of full':>10}")
    for n in options.servers:
        for shared in (False, True):
            for in_turns in (False, True):
                name = f"{n}, {'shared' if shared else 'own'}, {'half at a time' if in_turns else 'all at once'}"
                found = asyncio.run(measure(n, shared, in_turns, options))
                print(line(name, found, options.every, n), flush=True)


if __name__ == "__main__":
    main()
