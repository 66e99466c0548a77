"""The trainer's service writes weights that it keeps while it obeys another command."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from trainer_builders import World, advantage, rlhf_recipe, rollout
from waiting import LIMIT, held_back

from areal_tasks.engines.trainer.commands import Command, Keep, Load, Publish
from areal_tasks.engines.trainer.process import make_app
from areal_tasks.engines.trainer.service import Trainer


@pytest.fixture
def held() -> Iterator[threading.Event]:
    """Training does not end before it is set."""
    with held_back(Trainer, "train") as go_on:
        yield go_on


def test_weights_that_are_kept_are_published_while_it_trains(world: World, held: threading.Event) -> None:
    world.recipe = rlhf_recipe()
    app, table = make_app(world.spec()), rollout([9, 4, 13, 6])

    async def scene() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://trainer") as client:

            async def post(name: str, command: Command) -> httpx.Response:
                answer = await client.post(f"/{name}", content=command.model_dump_json(), timeout=LIMIT)
                assert answer.status_code == 200, answer.text
                return answer

            await post("load", Load(owner=1, version=0, weights=world.initial))
            await post("keep", Keep(owner=1, version=0))
            command = world.train_command(0, {"rollout": table, "advantage": advantage(table)})
            training = asyncio.ensure_future(post("train", command))
            await post("publish", Publish(owner=1, version=0, prefix=world.folder("weights", 0, "a")))
            assert not training.done()
            held.set()
            assert (await training).json()["version"] == 1
            late = Publish(owner=1, version=0, prefix=world.folder("weights", 0, "b"))
            await post("publish", late)
            await post("keep", Keep(owner=1, version=1))
            refused = await client.post("/publish", content=late.model_dump_json())
            assert refused.status_code == 409 and "version 0 was expected" in refused.text

    asyncio.run(scene())


def test_no_rank_changes_its_copy_before_the_first_has_the_lock(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may still read the copy of another rank, which does not wait for the first as it gathers weights.

    Each exchange of the ranks is a meeting: none goes on before all are there.
    """
    world.recipe = rlhf_recipe()
    trainer = Trainer(world.spec().model_copy(update={"sending": (0,)}))
    trainer.load(Load(owner=1, version=0, weights=world.initial))
    trainer.keep(Keep(owner=1, version=0))
    table = rollout([9, 4, 13, 6])
    trainer.train(world.train_command(0, {"rollout": table, "advantage": advantage(table)}))
    name, first = next(iter(trainer.snapshot.tensors.items()))
    before, met = first.clone(), list[tuple[bool, bool, bool]]()

    def meet(mine: str) -> list[str]:
        see(bool(mine))
        return [mine]

    def see(given: bool) -> None:
        with ThreadPoolExecutor(1) as other:
            free = other.submit(trainer.snapshot.lock.acquire, blocking=False).result()
        met.append((free, torch.equal(trainer.snapshot.tensors[name], before), given))

    monkeypatch.setattr(trainer.group, "together", lambda _work: see(False))
    monkeypatch.setattr("areal_tasks.engines.trainer.service.gather", meet)
    trainer.keep(Keep(owner=1, version=1))
    assert met == [(False, True, False), (False, False, True)]
