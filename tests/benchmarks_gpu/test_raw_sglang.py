"""The bare client of the raw SGLang baseline, and that its server gets the flags that a run's own would get."""

from __future__ import annotations

import argparse
import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from benchmarks.gpu.baseline_sglang import RECIPE, completed
from benchmarks.gpu.sglang_load import generate, reload_seconds, server_flags


@dataclass
class FakeServer:
    """Answers as SGLang does, and keeps what it was asked."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    under_way: int = 0
    most: int = 0
    status: int = 200

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0.01)
        self.under_way -= 1
        tokens = [[-1.0, 7, None]] * body["sampling_params"]["max_new_tokens"]
        return web.json_response({"meta_info": {"output_token_logprobs": tokens}}, status=self.status)

    async def done(self, request: web.Request) -> web.Response:
        return web.json_response({"success": True})


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    """A server in a thread of its own."""
    found, ready, loop = FakeServer(), threading.Event(), asyncio.new_event_loop()

    async def serve() -> None:
        app = web.Application()
        app.add_routes([web.post("/generate", found.generate), web.post("/{other}", found.done)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        found.url = "http://{}:{}".format(*runner.addresses[0])
        ready.set()

    def run() -> None:
        loop.run_until_complete(serve())
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(10)
    yield found
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


def test_every_prompt_is_asked_in_every_round_and_no_more_at_once_than_told(fake: FakeServer) -> None:
    prompts = [[i, i + 1] for i in range(12)]
    rounds = generate(fake.url, prompts, 5, concurrency=3, rounds=2)
    assert [r["tokens"] for r in rounds] == [60.0, 60.0] and all(r["seconds"] > 0 for r in rounds)
    assert sorted(b["input_ids"] for b in fake.bodies) == sorted(prompts * 2)
    assert fake.most == 3 and all(b["return_logprob"] for b in fake.bodies)


def test_a_refusal_ends_the_measurement(fake: FakeServer) -> None:
    fake.status = 400
    with pytest.raises(RuntimeError, match="answered 400"):
        generate(fake.url, [[1]], 5, concurrency=1, rounds=1)


def test_each_reload_is_timed(fake: FakeServer) -> None:
    assert len(reload_seconds(fake.url, Path("/weights"), repeats=2)) == 2


def test_what_the_command_does_not_say_is_as_in_the_recipe_for_the_shape() -> None:
    asked = argparse.Namespace(overrides=[], recipe=RECIPE, groups=0, size=0, new_tokens=0, concurrency=0)
    found = [completed(argparse.Namespace(**vars(asked) | {"shape": shape})) for shape in ("135m", "1.5b")]
    numbers = [(f.groups, f.size, f.new_tokens, f.concurrency) for f in found]
    assert numbers == [(32, 8, 512, 256), (64, 8, 512, 512)]
    given = completed(argparse.Namespace(**vars(asked) | {"shape": "1.5b", "groups": 3, "new_tokens": 16}))
    assert (given.groups, given.size, given.new_tokens) == (3, 8, 16)


def test_the_server_gets_the_recipes_flags() -> None:
    words = server_flags(Path("/model"), RECIPE, ["inference.memory_fraction=0.25"], 30000)
    pairs = dict(pairwise(words))
    assert pairs["--model-path"] == "/model" and pairs["--port"] == "30000"
    assert pairs["--attention-backend"] == "triton" and pairs["--mem-fraction-static"] == "0.25"
    assert "--disable-prefill-cuda-graph" in words and "True" not in words
