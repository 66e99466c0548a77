"""The trainer's service writes weights that it keeps while it obeys another command."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest
from trainer_builders import World, advantage, rlhf_recipe, rollout
from waiting import LIMIT

from areal_tasks.engines.trainer.commands import Command, Keep, Load, Publish, Train
from areal_tasks.engines.trainer.process import make_app
from areal_tasks.engines.trainer.service import Trainer


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Training does not end before it is set."""
    go_on, train = threading.Event(), Trainer.train

    def slowly(trainer: Trainer, command: Train) -> Any:
        assert go_on.wait(LIMIT)
        return train(trainer, command)

    monkeypatch.setattr(Trainer, "train", slowly)
    return go_on


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
