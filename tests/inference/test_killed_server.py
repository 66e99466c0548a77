"""Two real servers, one of which is killed in the middle of a rollout."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest
from stage_driver import store_in, tiny_evaluation

from areal_tasks.data.scratch import make_scratch
from areal_tasks.engines.client import GenerateRequest, GenerateResult, InferenceClient
from areal_tasks.engines.server import Server
from areal_tasks.engines.session import Engines
from areal_tasks.launchers.local import LocalHandle
from areal_tasks.store.commit import new_attempt
from areal_tasks.store.objects.files import commit_weights, upload
from areal_tasks.store.opening import open_run
from areal_tasks.store.paths import weights_attempt
from areal_tasks.store.provenance import make_provenance, now
from schemas.recipe.recipe import EvaluateRecipe
from schemas.recipe.sections import ScratchModel
from tests.inference.fake_server import until

GROUPS, SIZE = 16, 4


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    """Engines with two embedded servers, as processes, and no trainer."""
    recipe = tiny_evaluation("not-read")
    changes = {"launcher": {"type": "local"}, "inference": {"servers": 2, "slots": 16, "threads": 1}}
    recipe = EvaluateRecipe.model_validate(recipe.model_dump(mode="json") | changes)
    run = open_run(store_in(tmp_path), "r", recipe)
    attempt = new_attempt()
    folder = make_scratch(ScratchModel(layers=1, hidden=16, heads=2, intermediate=16), 0, 12, tmp_path / "model")
    files = upload(run.store, weights_attempt("r", 0, attempt), folder)
    weights = commit_weights(run.store, "r", 0, attempt, "weights", files, make_provenance(1, now()))
    with Engines(run, recipe, tmp_path / "logs") as found:
        found.begin()
        found.start(weights, weights, weights)
        yield found


def send(engines: Engines, url: str, number: signal.Signals) -> None:
    handle = engines.supervisor.services[engines.supervisor.name_at(url)].handle
    assert isinstance(handle, LocalHandle)
    os.killpg(handle.process.pid, number)


def test_the_rest_goes_on_and_the_dead_one_comes_back_within_the_rollout(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, str]] = []
    generate = Server.generate

    def noted(server: Server, body: dict[str, Any]) -> AsyncGenerator[list[dict[str, Any]]]:
        sent.append((body["sampling_params"][0]["sampling_seed"] // SIZE, server.url))
        return generate(server, body)

    monkeypatch.setattr(Server, "generate", noted)
    client = engines.servers.inference()
    engines.servers.call(until(lambda: len(client.healthy()) == 2))
    victim, other = client.healthy()
    send(engines, victim, signal.SIGSTOP)  # what it gets now is under way until it dies

    async def rollout() -> list[GenerateResult]:
        work = asyncio.ensure_future(client.generate(asked(range(GROUPS))))
        await until(lambda: sum(server.done for server in client.servers) == GROUPS * SIZE // 2)
        assert Counter(url for _, url in sent) == {victim: GROUPS // 2, other: GROUPS // 2}
        send(engines, victim, signal.SIGKILL)
        results = await work
        assert {result.server for result in results} == {other}, "nothing has waited for the new start"
        await until(lambda: len(client.healthy()) == 2)
        return results + await client.generate(asked(range(GROUPS, 2 * GROUPS)))

    results = engines.servers.call(rollout(), generates=client)
    assert len(results) == 2 * GROUPS * SIZE
    assert all(r.stop_reason != "abort" and r.versions == [0] * len(r.output_ids) for r in results)
    times = Counter(group for group, _ in sent)
    lost = {group for group, url in sent if url == victim}
    assert times == {group: 1 + (group in lost) for group in range(2 * GROUPS)}, "what had finished is not repeated"
    back = {result.server for result in results} - {other}
    assert len(back) == 1 and victim not in back
    assert [engines.supervisor.services[name].spec.restart for name in engines.servers.names] in ([1, 0], [0, 1])
    repeated(engines, client, results)


def asked(groups: range) -> list[GenerateRequest]:
    """Requests whose seeds tell their group."""
    return [
        GenerateRequest([4 + group % 10, 5], 3, 1.0, group * SIZE + i, group=group)
        for group in groups
        for i in range(SIZE)
    ]


def repeated(engines: Engines, client: InferenceClient, results: list[GenerateResult]) -> None:
    """Whichever server generated it: the bits are the same."""
    again = engines.servers.call(client.generate(asked(range(2 * GROUPS))), generates=client)
    assert [(r.output_ids, r.logprobs) for r in again] == [(r.output_ids, r.logprobs) for r in results]
