"""The bare client of the raw SGLang baseline, and that its server gets the flags that a run's own would get."""

from __future__ import annotations

import argparse
import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web
from waiting import LIMIT, until

from areal_tasks.workflows import Prompt, Sample, SingleTurn, WorkflowContext
from benchmarks.gpu.baseline_sglang import RECIPE, completed
from benchmarks.gpu.iteration import prepare_raw_rounds
from benchmarks.gpu.raw_rounds import RawRounds, read_rounds
from benchmarks.gpu.settings import recipe_of_shape
from benchmarks.gpu.sglang_load import generate, reload_seconds, server_flags


@dataclass
class FakeServer:
    """Answers as SGLang does, and keeps what it was asked."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    under_way: int = 0
    most: int = 0
    together: int = 1  # so many have been under way at once before any is answered
    status: int = 200

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await until(lambda: self.most >= self.together, "the others")
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
    assert ready.wait(LIMIT)
    yield found
    loop.call_soon_threadsafe(loop.stop)
    thread.join(LIMIT)


def test_every_prompt_is_asked_in_every_round_and_no_more_at_once_than_told(fake: FakeServer) -> None:
    prompts = [[i, i + 1] for i in range(12)]
    fake.together = 3
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


def test_raw_rounds_of_an_iteration_follow_its_rollout_and_ask_for_the_same(
    fake: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rollout bears what follows new weights, as in any run."""
    order: list[int] = []

    async def rollout(workflow: SingleTurn, prompt: Prompt, context: WorkflowContext) -> list[Sample]:
        await asyncio.sleep(0)  # until all have begun
        order.append(len(fake.bodies))
        return []

    monkeypatch.setattr(SingleTurn, "run", rollout)
    prompts = [Prompt(0, 6, 0, "", "", [1]), Prompt(1, 7, 0, "", "", [2, 3])]
    access = SimpleNamespace(headers={"Authorization": "B"})
    client = SimpleNamespace(healthy=lambda: [fake.url], access=access)
    context = WorkflowContext(
        client=cast(Any, client), seed=0, group_size=3, max_new_tokens=5, temperature=1.0, max_length=9
    )
    told = tmp_path / "rounds.jsonl"

    later = [Prompt(2, 8, 0, "", "", [4]), Prompt(3, 9, 0, "", "", [5])]

    async def two_iterations() -> list[list[Sample]]:
        rounds = RawRounds(str(told))  # a worker keeps its workflow for the whole run
        first = await asyncio.gather(*(rounds.run(prompt, context) for prompt in prompts))
        return first + await asyncio.gather(*(rounds.run(prompt, context) for prompt in later))

    assert asyncio.run(two_iterations()) == [[]] * 4 and order == [0, 0, 6, 6]
    assert sorted(body["input_ids"] for body in fake.bodies) == [[1]] * 3 + [[2, 3]] * 3 + [[4]] * 3 + [[5]] * 3
    row, second = read_rounds(told)
    assert (row["iteration"], row["raw_tokens"]) == (3, 30.0) and 0 < row["raw_seconds"] <= row["raw_spent"]
    assert (second["iteration"], second["raw_tokens"]) == (4, 30.0)
    assert read_rounds(tmp_path / "none") == []


def test_raw_rounds_are_of_one_run_and_of_rollouts_alone(tmp_path: Path) -> None:
    told = tmp_path / "rounds.jsonl"
    told.write_text("{}\n")
    prepare_raw_rounds(recipe_of_shape("1.5b"), told, fresh=False)
    assert told.exists()
    prepare_raw_rounds(recipe_of_shape("1.5b"), told, fresh=True)
    assert not told.exists()
    evaluated = ["evaluation.every=2", "data.source=/data/{split}.jsonl"]
    with pytest.raises(SystemExit, match=r"evaluation\.every=0"):
        prepare_raw_rounds(recipe_of_shape("1.5b", evaluated), told, fresh=True)
