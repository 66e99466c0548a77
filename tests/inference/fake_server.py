"""A server for tests of the client: it dies, dawdles, lies and forgets as the test sets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from waiting import until

from areal_tasks.engines.access import Access
from areal_tasks.engines.client import GenerateRequest, GenerateResult, InferenceClient
from areal_tasks.engines.sharing import Followers
from schemas.recipe.derived import Interruption
from schemas.recipe.sections import Inference
from tests.inference.virtual_time import run

__all__ = ["Fake", "Told", "check", "requests", "run", "serve", "serving", "until"]


class Fake:
    """A server that answers each prompt with `tokens` tokens: the prompt's length, counting up."""

    def __init__(self, version: int = 0, delay: float = 0.0, per_sample: float = 0.0, tokens: int = 3) -> None:
        self.version, self.delay, self.per_sample, self.tokens = version, delay, per_sample, tokens
        self.bodies: list[dict[str, Any]] = []
        self.updates: list[str] = []
        self.broken = False  # answers 500
        self.deaf = False  # closes the connection
        self.stuck = False  # accepts updates without taking them
        self.interrupt = 0  # requests answered with two tokens and `abort`
        self.broken_health = False
        self.name = ""  # of the weights, until it gets others
        self.update_bodies: list[dict[str, Any]] = []
        self.store = ""  # the one it fetches weights from; plain SGLang has none
        self.fetches: list[str] = []
        self.on_generate = self.generate
        self.on_update = self.update
        self.deaf_to_prompts = False  # closes the connection, and seems well otherwise
        self.ended = asyncio.Event()
        self.busy = asyncio.Lock()
        self.url = ""

    @property
    def samples(self) -> int:
        return sum(len(body["input_ids"]) for body in self.bodies)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        version = self.version
        async with self.busy:
            await asyncio.sleep(self.delay + self.per_sample * len(body["input_ids"]))  # as a server takes its time
        if self.deaf or self.deaf_to_prompts:
            assert request.transport is not None
            request.transport.close()
        if self.broken:
            return web.json_response({"error": "out of order"}, status=500)
        if any(999 in prompt for prompt in body["input_ids"]):
            return web.json_response({"error": "token id 999 is outside"}, status=400)
        self.interrupt -= 1
        params = body["sampling_params"]
        each = [params] * len(body["input_ids"]) if isinstance(params, dict) else params
        pairs = zip(body["input_ids"], each, strict=True)
        interrupted = self.interrupt >= 0
        return web.json_response(
            [self.answer(prompt, p["max_new_tokens"], interrupted, version) for prompt, p in pairs]
        )

    def answer(
        self, prompt: list[int], most: int, interrupted: bool, version: int, tokens: int | None = None
    ) -> dict[str, Any]:
        n = min(2 if interrupted else self.tokens if tokens is None else tokens, most)
        output = [len(prompt) + i for i in range(n)]
        meta = {
            "finish_reason": {"type": "abort" if interrupted else "length"},
            "weight_version": str(version),
            "completion_tokens": n,
            "output_token_logprobs": [[-0.1 * token, token, None] for token in output],
        }
        return {"text": "".join(f"<{t}>" for t in output), "output_ids": output, "meta_info": meta}

    async def update(self, request: web.Request) -> web.Response:
        if self.broken:
            return web.json_response({"error": "out of order"}, status=500)
        body = await request.json()
        self.updates.append(body["model_path"])
        self.update_bodies.append(body)
        if not self.stuck:
            self.name = ""
            self.version = int(body["weight_version"])
        return web.json_response({"success": True, "message": ""})

    async def fetch(self, request: web.Request) -> web.Response:
        self.fetches.append((await request.json())["model_path"])
        return web.json_response({"success": True})

    async def store_of(self, request: web.Request) -> web.Response:
        return web.json_response({"url": self.store} if self.store else {}, status=200 if self.store else 404)

    async def check_weights(self, request: web.Request) -> web.Response:
        """As SGLang 0.5.17; there are no tensors here, so that they are always the same."""
        ranks = [{"checksums": {"w": "0"}}] if (await request.json())["action"] == "checksum" else None
        return web.json_response({"success": True, "message": "Success."} | ({"ranks": ranks} if ranks else {}))

    async def health(self, request: web.Request) -> web.Response:
        down = self.broken or self.deaf or self.broken_health
        return web.json_response({}, status=503 if down else 200)

    async def info(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer token"
        return web.json_response({"weight_version": self.name or str(self.version)})

    async def command(self, request: web.Request) -> web.Response:
        self.ended.set()
        return web.Response()  # SGLang answers an abort with nothing


class Told(Followers):
    """Another client, which the managing one (`leader`) tells at once which weights the servers hold."""

    def __init__(self, leader: InferenceClient, client: InferenceClient) -> None:
        super().__init__()
        self.leader, self.client = leader, client

    def changed(self) -> None:
        self.telling = asyncio.ensure_future(self.acknowledged())

    async def acknowledged(self) -> None:
        await self.client.follow(self.leader.serving)

    async def busy(self) -> dict[str, int]:
        return {server.url: server.requests for server in self.client.servers}


@asynccontextmanager
async def serving(
    *fakes: Fake, interruption: Interruption | None = None, **settings: Any
) -> AsyncIterator[InferenceClient]:
    runners = [await serve(fake) for fake in fakes]
    client = InferenceClient(
        [fake.url for fake in fakes], Access("token"), Inference(**settings), interruption=interruption
    )
    client.clock = asyncio.get_running_loop().time
    try:
        yield client
    finally:
        await client.close()
        for runner in runners:
            await runner.cleanup()


async def serve(fake: Fake, port: int = 0) -> web.AppRunner:
    app = web.Application()
    commands = ["/pause_generation", "/continue_generation"]
    commands += ["/release_memory_occupation", "/resume_memory_occupation"]
    app.add_routes([web.post(path, fake.command) for path in commands])
    app.add_routes([web.get(path, fake.health) for path in ("/health_generate",)])
    app.add_routes([web.get(path, fake.info) for path in ("/model_info", "/server_info")])
    app.add_routes([web.post("/update_weights_from_disk", lambda request: fake.on_update(request))])
    app.add_routes([web.post("/fetch_weights", fake.fetch), web.get("/weights_store", fake.store_of)])
    app.add_routes([web.post("/weights_checker", fake.check_weights)])
    app.add_routes([web.post("/generate", lambda request: fake.on_generate(request))])
    runner = web.AppRunner(app, shutdown_timeout=0.1)  # its answers are cut short, as of a server that dies
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    return runner


def requests(groups: int, size: int = 2, new: int = 3) -> list[GenerateRequest]:
    return [
        GenerateRequest([7] * (1 + g % 5), new, seed=g * 100 + i, group=g) for g in range(groups) for i in range(size)
    ]


def check(asked: list[GenerateRequest], results: list[GenerateResult], version: int = 0) -> None:
    for request, result in zip(asked, results, strict=True):
        n = len(request.input_ids)
        assert result.output_ids == [n, n + 1, n + 2]
        assert result.logprobs == [pytest.approx(-0.1 * t) for t in result.output_ids]
        assert result.versions == [version] * 3
        assert result.stop_reason == "length"
