"""The flow's link to a rollout worker, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from aiohttp import web
from waiting import until

from areal_tasks.engines.access import Access
from areal_tasks.engines.sharing import Serving
from areal_tasks.rollout.link import Link, WorkerLost
from areal_tasks.rollout.orders import Part
from areal_tasks.rollout.rollouts import Rollouts


class Order:
    """What the flow has workers begin with."""

    serving = Serving(servers=(), versions_unknown=False, requests=1)

    def model_dump_json(self) -> str:
        return "{}"


class Flow:
    """What a link tells the flow."""

    def __init__(self) -> None:
        self.begins, self.losses, self.errors = 0, 0, list[BaseException]()

    def order(self) -> Any:
        return Order()

    def begun(self, link: Link) -> None:
        self.begins += 1

    def lost(self, link: Link) -> None:
        self.losses += 1

    def end(self, error: BaseException) -> None:
        self.errors.append(error)


async def while_a_worker_resets(path: str, ask: Callable[[Link], Awaitable[object]]) -> None:
    """Its session ends, and it begins again, although the connection by which it reports events is not reset."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/news":
            await asyncio.sleep(0.01)  # as a long poll without events does
        if request.path == path:
            assert request.transport is not None
            request.transport.abort()
        answers: dict[str, Any] = {"/begin": {"start": 3}, "/news": {"events": []}}
        return web.json_response(answers.get(request.path))

    app, flow = web.Application(), Flow()
    app.router.add_post("/{any}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    link = Link(f"http://127.0.0.1:{runner.addresses[0][1]}", Access(""), cast(Rollouts, flow))
    await until(lambda: flow.begins == 1)
    assert link.start == 3
    await ask(link)
    await until(lambda: flow.begins == 2)
    assert flow.losses == 1 and not flow.errors
    await link.drop()
    await runner.cleanup()


def test_a_worker_whose_connection_is_reset_while_it_writes_begins_again() -> None:
    """Its groups are lost, so that it would be of no use."""

    async def write(link: Link) -> None:
        with pytest.raises(WorkerLost):
            await link.write(Part(prefix="p", label="", numbers=()))

    asyncio.run(while_a_worker_resets("/write", write))


def test_a_worker_that_was_not_told_which_servers_generate_begins_again() -> None:
    """It would wait without end for weights that its servers hold: only the flow tells it of them, once."""
    serving = Serving(servers=(), versions_unknown=False, requests=2)
    asyncio.run(while_a_worker_resets("/serving", lambda link: link.follow(serving)))
