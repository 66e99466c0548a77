"""Weights broadcast to two servers in other processes, over gloo in NCCL's place."""

from __future__ import annotations

import inspect
import io
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
import torch
import torch.distributed as dist
from listeners import beyond_loopback, listening
from torch.distributed import distributed_c10d as c10d
from torch.multiprocessing import reductions
from waiting import LIMIT, wait_until
from warm_processes import Popen

from areal_tasks.engines.ports import HOST, group_interface
from areal_tasks.engines.trainer import transport
from areal_tasks.engines.trainer.commands import Receiver, Send
from areal_tasks.engines.trainer.ranks import lead, serve_store
from areal_tasks.engines.trainer.transport import Sender, Unanswered, WeightTransferRejected, handles_of

TOKEN = "secret"
UPDATE = "/update_weights_from_distributed"
SOON = 1.0  # seconds after which gloo gives up what cannot come to anything


#: The receivers' processes, by address. They are no children of this one.
PROCESSES: dict[str, int] = {}


@contextmanager
def receivers() -> Iterator[list[str]]:
    """The addresses of two servers."""
    command = [sys.executable, str(Path(__file__).with_name("receiver.py")), TOKEN]
    asked = {"env": {**os.environ, **group_interface()}, "stdout": subprocess.PIPE, "text": True}
    servers = [Popen(command, **asked) for _ in range(2)]
    found = {f"http://127.0.0.1:{int(s.stdout.readline())}": s.pid for s in servers if s.stdout}
    PROCESSES.update(found)
    yield list(found)
    for server in servers:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def urls() -> Iterator[list[str]]:
    with receivers() as found:
        yield found


@pytest.fixture
def failing(urls: list[str]) -> Iterator[list[str]]:
    """The same servers, of which the first answers 500 from now on."""
    fail(urls[0], "500")
    yield urls
    fail(urls[0], "")


def unused(failure: Exception) -> None:
    raise AssertionError(f"nothing is stuck here: {failure}")


def sending(urls: list[str], version: int, token: str = TOKEN) -> Send:
    receivers = tuple(Receiver(url=url) for url in urls)
    return Send(owner=1, version=version, transport="nccl", receivers=receivers, token=token)


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((2, 3), value), "b": torch.arange(4).to(torch.bfloat16) * value}


def test_every_server_holds_every_version_it_is_sent(urls: list[str]) -> None:
    sender = Sender(unused, "gloo", LIMIT, LIMIT)
    for version, value in ((1, 0.5), (2, -2.0)):
        sender.send(weights(value), sending(urls, version))
        for url in urls:
            held = held_by(url)
            assert held["version"] == str(version)
            assert held["tensors"] == {n: t.float().tolist() for n, t in weights(value).items()}


def test_the_group_listens_on_loopback_alone(urls: list[str]) -> None:
    sender = Sender(unused, "gloo", LIMIT, LIMIT)
    sender.send(weights(0.5), sending(urls, 1))
    members = [psutil.Process(), *(psutil.Process(PROCESSES[url]) for url in urls)]
    assert sum(map(len, listening(members).values())) >= 3 + 2, "each member's socket, and the servers'"
    assert beyond_loopback(members) == {}


def test_a_server_that_refuses_is_named_and_the_next_hand_over_starts_afresh(urls: list[str]) -> None:
    sender = Sender(unused, "gloo", SOON, LIMIT)
    with pytest.raises(WeightTransferRejected, match=r"refused the weights: 401"):
        sender.send(weights(1.0), sending(urls[:1], 1, token="wrong"))
    assert sender.group is None
    sender.timeout = timedelta(seconds=LIMIT)
    sender.send(weights(3.0), sending(urls, 1))
    assert [held_by(url)["version"] for url in urls] == ["1", "1"]


def fail(url: str, how: str) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    httpx.post(url + "/fail", json={"how": how}, headers=headers, timeout=LIMIT).raise_for_status()


def held_by(url: str) -> dict[str, Any]:
    """What a server holds, once it has ended what it is at."""
    held: dict[str, Any] = httpx.get(url, timeout=LIMIT).json()
    return held


def test_a_server_that_dies_is_named_and_those_that_take_its_place_are_met(urls: list[str]) -> None:
    sender = Sender(unused, "gloo", LIMIT, SOON)
    with receivers() as dying:
        assert not sender.send(weights(0.5), sending(dying, 1))
        fail(dying[0], "dies")
        assert "no answer" in sender.send(weights(1.0), sending(dying, 2))[dying[0]]
    assert not sender.send(weights(2.0), sending(urls, 3))
    assert [held_by(url)["version"] for url in urls] == ["3", "3"]


def test_a_server_that_fails_by_itself_has_refused_nothing(urls: list[str]) -> None:
    sender = Sender(unused, "gloo", LIMIT, LIMIT)
    sender.send(weights(0.5), sending(urls, 1))
    c10d._set_pg_timeout(timedelta(seconds=SOON), sender.group)  # gloo waits as long for who never joins in
    fail(urls[0], "500")
    assert "out of order" in sender.send(weights(1.0), sending(urls, 2))[urls[0]]
    fail(urls[0], "")


def test_on_a_shared_gpu_one_that_fails_does_not_keep_the_weights_from_the_others(
    failing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.multiprocessing, "get_sharing_strategy", lambda: "file_system")
    command = sending(failing, 7).model_copy(update={"transport": "tensor"})
    tensors = weights(0.5)
    assert list(Sender(unused).send(tensors, command, [handles_of(tensors)])) == failing[:1]
    held = held_by(failing[1])
    assert held["version"] == "7" and held["makers"] == [str(os.getpid())]
    assert held["tensors"] == {n: t.float().tolist() for n, t in weights(0.5).items()}


def test_handles_name_the_only_gpu_that_a_server_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """As its first, on whichever of the trainer's GPUs the tensor is. There is none here: torch's part is played."""
    given = (torch.Tensor, (2,), (1,), 0, "storage", torch.float32, 2, "handle")
    monkeypatch.setattr(reductions, "reduce_tensor", lambda _: (reductions.rebuild_cuda_tensor, given))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    rebuild, arguments = transport._Handles(io.BytesIO()).reducer_override(torch.zeros(2))
    named = dict(zip(inspect.signature(rebuild).parameters, arguments, strict=False))
    assert named["storage_device"] == 0 and named["storage_handle"] == "handle"
    assert tuple(arguments) == (*given[:6], 0, *given[7:])


def test_the_group_of_before_is_left_by_all_that_stay(urls: list[str]) -> None:
    sender = Sender(unused, "gloo", LIMIT, LIMIT)
    sender.send(weights(0.5), sending(urls, 1))
    before = sender.name
    sender.send(weights(0.5), sending(urls[1:], 2))
    groups = held_by(urls[1])["groups"]
    assert sender.name in groups and before not in groups


def test_the_group_of_before_is_left_by_a_server_that_gets_nothing_for_a_while(urls: list[str]) -> None:
    sender = Sender(unused, "gloo", LIMIT, LIMIT)
    sender.send(weights(0.5), sending(urls, 1))
    before = sender.name
    leaving = (Receiver(url=urls[0]),)
    for version in (2, 3):  # the second time it is in no group
        assert not sender.send(weights(1.0), sending(urls[1:], version).model_copy(update={"leaving": leaving}))
        assert before not in held_by(urls[0])["groups"] and held_by(urls[0])["version"] == "1"
    assert not sender.send(weights(2.0), sending(urls, 4))
    assert [held_by(url)["version"] for url in urls] == ["4", "4"]


def test_the_group_that_a_server_has_failed_in_is_left_by_all_that_stay(urls: list[str]) -> None:
    sender = Sender(unused, "gloo", LIMIT, LIMIT)
    with receivers() as others:
        sender.send(weights(0.5), sending([urls[0], others[0]], 1))
        before = sender.name
        fail(others[0], "dies")
        assert others[0] in sender.send(weights(1.0), sending([urls[0], others[0]], 2))
        assert before in held_by(urls[0])["groups"]
        assert not sender.send(weights(2.0), sending([urls[0], others[1]], 3))
    assert before not in held_by(urls[0])["groups"]


@pytest.fixture
def bound_default() -> Iterator[None]:
    """A default group of this process alone that is bound to a GPU, as a trainer's is (ranks.join_process_group)."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
    yield
    dist.destroy_process_group()


def test_the_group_is_not_derived_from_the_trainers_own(
    urls: list[str], bound_default: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(c10d, "_get_split_source", asked.append)
    Sender(unused, "gloo", LIMIT, LIMIT).send(weights(0.5), sending(urls, 1))
    assert [held_by(url)["version"] for url in urls] == ["1", "1"]
    assert not asked


def test_nccl_is_given_no_communicator_to_split(bound_default: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Nccl:
        """NCCL's place in torch where it is not built with it: notes the options, and is gloo of one rank."""

        class Options:
            split_from = None

        def __new__(cls, store: dist.Store, rank: int, size: int, options: Options) -> Any:
            asked.append(options)
            return c10d.ProcessGroupGloo(store, rank, size, timedelta(seconds=5))

    monkeypatch.setattr(c10d, "ProcessGroupNCCL", Nccl, raising=False)
    group = lead("weights", ("127.0.0.1", 0), 1, "nccl", timedelta(seconds=5))
    assert [(o.split_from, o.group_name, o._timeout) for o in asked] == [(None, "weights", timedelta(seconds=5))]
    assert group.size() == 1


def test_those_that_are_left_get_the_weights_when_one_fails_before_the_group_is_met(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL's members meet at the first broadcast: a server has long answered that it is in the group."""
    given: list[tuple[str, str]] = []

    def answer(url: str, token: str, body: dict[str, Any]) -> None:
        server, path = url.rsplit("/", 1)
        if server == "http://bad":
            raise Unanswered("500")
        given.append((server, path))

    group = SimpleNamespace(broadcast=lambda tensor, root: SimpleNamespace(wait=lambda: None), abort=lambda: None)
    monkeypatch.setattr("areal_tasks.engines.trainer.transport._post", answer)
    monkeypatch.setattr("areal_tasks.engines.trainer.transport.lead", lambda *named: group)
    gone = Sender(unused).send(weights(1.0), sending(["http://good", "http://bad"], 1))
    assert list(gone) == ["http://bad"]
    assert given[-1] == ("http://good", "update_weights_from_distributed")


def test_no_other_program_gets_the_port_where_servers_are_asked_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its choice and its use; then it is free again."""
    given: list[int] = []

    def fails(name: str, at: tuple[str, int], *more: object) -> None:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(at)
        given.append(serve_store(*at, 2).port)
        raise RuntimeError("no server came")

    monkeypatch.setattr(transport, "_post", lambda *asked: None)
    monkeypatch.setattr(transport, "lead", fails)
    with pytest.raises(RuntimeError, match="no server came"):
        Sender(unused).send(weights(1.0), sending(["http://good"], 1))
    with socket.create_server((HOST, given[0])) as free:
        assert free.getsockname()[1] == given[0]


@pytest.mark.parametrize(
    ("port", "token", "kind", "words"),
    [
        (0, "wrong", WeightTransferRejected, "refused the weights: 401.*transport=store"),
        (0, TOKEN, Unanswered, "answered 500.*out of order"),
        (1, TOKEN, Unanswered, "no answer"),
    ],
)
def test_an_end_that_a_failed_server_leaves_waiting_is_told_so(
    failing: list[str], port: int, token: str, kind: type[Exception], words: str
) -> None:
    """One that refuses would do the same another time; one that takes the place of one that failed may not."""
    told, released = [], threading.Event()

    def stuck(failure: Exception) -> None:
        told.append(failure)
        released.set()

    url = f"http://127.0.0.1:{port}" if port else failing[0]
    sender, command = Sender(stuck, stuck_seconds=0.2), sending([url], 1, token)
    with suppress(WeightTransferRejected):
        assert sender.run_collective(command, UPDATE, [{}], lambda: _wait_for(released)).keys() == {url}
    with pytest.raises(kind, match=words):
        raise told.pop()
    assert not told


def test_an_end_that_ends_is_left_alone(failing: list[str]) -> None:
    told: list[Exception] = []
    before = set(threading.enumerate())
    sender = Sender(told.append, stuck_seconds=LIMIT)
    assert sender.run_collective(sending(failing[:1], 1), UPDATE, [{}], lambda: None).keys() == {failing[0]}
    wait_until(lambda: set(threading.enumerate()) <= before, "the end of the watch")
    assert not told


def _wait_for(event: threading.Event) -> None:
    assert event.wait(LIMIT)
