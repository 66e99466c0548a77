"""Callers that still ask a client that has been closed, as when restarted servers have a new one."""

from __future__ import annotations

import asyncio

import pytest

from areal_tasks.engines.access import Access
from areal_tasks.engines.client import InferenceClient
from areal_tasks.engines.server import ServerDown
from areal_tasks.engines.server_pool import NO_SERVER_SECONDS
from schemas.recipe.sections import Inference
from tests.inference.fake_server import Fake, requests, run, serve, until


@pytest.mark.parametrize("asked", ["before", "waiting", "after"])
def test_who_still_asks_is_told_at_once_that_servers_are_down(asked: str) -> None:
    """Which is repeated on what has taken their place; nothing is left behind that asks them."""

    async def test() -> None:
        fake = Fake(delay=0.2)
        runner = await serve(fake)
        client = InferenceClient([fake.url], Access("token"), Inference(max_concurrent_requests=1))
        await client.update_weights("zero", 0)
        if asked == "after":
            await client.close()
        work = asyncio.ensure_future(client.generate(requests(2 if asked == "waiting" else 1)))
        await until(lambda: asked == "after" or fake.bodies)
        closing = asyncio.ensure_future(client.close())
        with pytest.raises(ServerDown, match="client of the servers is closed"):
            await asyncio.wait_for(work, NO_SERVER_SECONDS / 2)
        await closing
        assert all(task.done() for task in client._tasks.values())
        await runner.cleanup()

    run(test)
