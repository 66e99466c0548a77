"""A trainer that a failed server leaves waiting in NCCL, which nothing can call back: what it says before it ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from threading import Event
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from trainer_builders import World
from waiting import LIMIT, wait_until

from areal_tasks.engines.ports import HOST
from areal_tasks.engines.trainer import ranks, transport
from areal_tasks.engines.trainer.commands import Load, Receiver, Send
from areal_tasks.engines.trainer.process import make_app
from areal_tasks.engines.trainer.transport import Unanswered, WeightTransferRejected
from schemas.record import Record

SERVER = "http://server"


@pytest.fixture
def answered() -> Event:
    """To be set when the trainer's answer is there, for which it has a while."""
    return Event()


@pytest.fixture
def ended(answered: Event, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """How the process was to end. The group's broadcast lasts until then, and so does the test."""
    over, found = Event(), []

    def end(*how: Any) -> None:
        found.append(how)
        over.set()

    monkeypatch.setattr(os, "killpg", end)
    monkeypatch.setattr(ranks, "time", SimpleNamespace(sleep=lambda _seconds: answered.wait(LIMIT)))
    monkeypatch.setattr(transport.Sender.__init__, "__defaults__", ("nccl", LIMIT, LIMIT, 0.1, HOST))
    met = SimpleNamespace(broadcast=lambda *_, **__: SimpleNamespace(wait=lambda: over.wait(LIMIT)), abort=lambda: None)
    monkeypatch.setattr(transport, "lead", lambda *_: met)
    yield found
    assert over.wait(LIMIT), "nothing ended it"  # before these calls are the real ones again


def fails_with(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server joins the group, and does not take the weights."""

    def post(url: str, _token: str, _body: dict[str, Any]) -> None:
        if url.endswith("/update_weights_from_distributed"):
            raise error

    monkeypatch.setattr(transport, "_post", post)


def sent(world: World) -> httpx.Response:
    """The trainer's answer to a first hand-over."""
    receivers = (Receiver(url=SERVER),)
    send = Send(owner=1, version=0, transport="nccl", receivers=receivers, token="t")
    commands: dict[str, Record] = {"/load": Load(owner=1, version=0, weights=world.initial), "/send": send}

    async def ask() -> httpx.Response:
        door = httpx.ASGITransport(app=make_app(world.spec()))
        async with httpx.AsyncClient(transport=door, base_url="http://trainer") as client:
            answers = [await client.post(path, content=body.model_dump_json()) for path, body in commands.items()]
        return answers[-1]

    return asyncio.run(ask())


def test_a_refusal_is_the_answer_before_the_trainer_ends(
    world: World, ended: list[tuple[Any, ...]], answered: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 is a UserError for the caller, and no trainer is restarted for the same to happen."""
    fails_with(WeightTransferRejected(f"{SERVER} refused the weights: 400 no such group"), monkeypatch)
    answer = sent(world)
    assert (answer.status_code, answer.json()) == (400, {"error": f"{SERVER} refused the weights: 400 no such group"})
    assert not ended, "it answers first"
    answered.set()
    wait_until(lambda: ended == [(0, signal.SIGKILL)])


def test_for_a_server_that_died_the_trainer_says_that_it_failed(
    world: World, ended: list[tuple[Any, ...]], answered: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """500: the flow has a new trainer started, and asks that one."""
    fails_with(Unanswered("no answer: ReadError"), monkeypatch)
    assert sent(world).status_code == 500
    answered.set()
    wait_until(lambda: ended == [(0, signal.SIGKILL)])
