"""Servers that run already: how they are named, and that a run starts and stops none."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from test_damaged_weights import VERSION, weights
from waiting import wait_until

from areal_tasks.engines.external import external_servers, external_token
from areal_tasks.engines.session import Engines
from areal_tasks.store.backend import open_store
from areal_tasks.store.opening import open_run
from schemas.errors import UserError
from schemas.recipe.load import load_recipe
from tests.inference.fake_server import Fake, serve


@pytest.mark.parametrize(
    ("text", "urls"),
    [
        ("", []),
        ("10.0.0.5:30000", ["http://10.0.0.5:30000"]),
        ("a:1, https://b.example/ ,http://c:2", ["http://a:1", "https://b.example", "http://c:2"]),
        ("[::1]:30000", ["http://[::1]:30000"]),
    ],
)
def test_addresses(text: str, urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", text)
    assert external_servers() == urls


@pytest.mark.parametrize("text", ["a", "a:b", "ftp://a:1", "http://:30000", ":30000"])
def test_what_is_no_address(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", text)
    with pytest.raises(UserError, match=r"AREAL_LLM_SERVER_ADDRS: .* should look like host:port"):
        external_servers()


def test_their_token_is_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AREAL_LLM_SERVER_TOKEN", raising=False)
    assert external_token() == ""
    monkeypatch.setenv("AREAL_LLM_SERVER_TOKEN", "t")
    assert external_token() == "t"


# ── how they were started ───────────────────────────────────────────────────────────────────────────────────────────


class Softmax(Fake):
    """Samples from four tokens whose logits are far apart; `original`: as with SGLANG_RETURN_ORIGINAL_LOGPROB=1."""

    original = False
    logits = (3.0, 1.0, -2.0, 0.5)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        temperature = body["sampling_params"]["temperature"]
        scaled = [logit / temperature for logit in self.logits]
        source = random.Random(1)
        tokens = [source.choices(range(4), [math.exp(x) for x in scaled])[0] for _ in body["input_ids"]]
        told = self.logits if self.original else scaled
        total = math.log(sum(map(math.exp, told)))
        return web.json_response([self.one(token, told[token] - total) for token in tokens])

    def one(self, token: int, logprob: float) -> dict[str, Any]:
        meta = {"finish_reason": {"type": "length"}, "weight_version": "0", "completion_tokens": 1}
        return {"text": "", "output_ids": [token], "meta_info": {**meta, "output_token_logprobs": [[logprob, token]]}}


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Engines, list[Softmax]]]:
    """Engines with two servers that others have started; version 3 is in force."""
    monkeypatch.setenv("AREAL_LLM_SERVER_TOKEN", "token")
    recipe = load_recipe("gsm8k")
    made = open_run(open_store(f"file://{tmp_path}/store"), "r", recipe)
    with Engines(made, recipe, tmp_path / "logs") as found:
        found.initial = found.servers.serving = found.servers.written = weights(made, tmp_path / "model")
        servers = [Softmax(), Softmax()]
        runners = [found.servers.call(serve(server)) for server in servers]
        found.servers.external = [server.url for server in servers]
        yield found, servers
        for runner in runners:
            found.servers.call(runner.cleanup())


def test_servers_whose_logprobs_are_those_after_the_temperature_are_taken(
    engines: tuple[Engines, list[Softmax]],
) -> None:
    found, servers = engines
    client = found.servers.inference()
    assert client.version == VERSION
    wait_until(lambda: len(client.healthy()) == 2)
    assert all(server.bodies and server.version == VERSION for server in servers)


def test_a_server_whose_logprobs_are_those_before_the_temperature_is_refused_with_the_switch(
    engines: tuple[Engines, list[Softmax]],
) -> None:
    found, servers = engines
    servers[1].original = True
    for _ in range(2):
        with pytest.raises(UserError, match=rf"{servers[1].url} gives .*without SGLANG_RETURN_ORIGINAL_LOGPROB"):
            found.servers.inference()
    servers[1].original = False
    assert found.servers.inference().version == VERSION


def test_servers_that_do_not_tell_the_weights_of_each_token_are_refused_if_these_change_in_place(
    engines: tuple[Engines, list[Softmax]],
) -> None:
    found, _ = engines
    found.servers.recipe = load_recipe("gsm8k", ["rollout.max_head_offpolicyness=2"])
    with pytest.raises(UserError, match=r"does not report which weights sampled each token.*abort or drain"):
        found.servers.inference()
    found.servers.recipe = load_recipe("gsm8k", ["rollout.max_head_offpolicyness=2", "rollout.interruption=abort"])
    assert found.servers.inference().version == VERSION


def test_one_that_others_start_again_in_that_way_is_not_let_in(
    engines: tuple[Engines, list[Softmax]],
) -> None:
    found, servers = engines
    client = found.servers.inference()
    wait_until(lambda: len(client.healthy()) == 2)
    asked = len(servers[1].bodies)
    servers[1].original = True
    found.servers.call(client.evict({servers[1].url: "it is started again"}))
    wait_until(lambda: len(servers[1].bodies) > asked + 1)
    assert client.healthy() == [servers[0].url]
