"""How ranks agree, without processes: each rank is a thread, and they share a store in memory."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from torch.distributed import DistNetworkError, HashStore, Store, TCPStore
from trainer_builders import World
from waiting import LIMIT, wait_until

from areal_tasks.engines.trainer import group as group_module
from areal_tasks.engines.trainer import ranks
from areal_tasks.engines.trainer.commands import Load, Receiver, Send
from areal_tasks.engines.trainer.fencing import StaleCommand
from areal_tasks.engines.trainer.group import Group, GroupBroken, Outcome, disagreement
from areal_tasks.engines.trainer.process import make_app
from areal_tasks.engines.trainer.ranks import Place, cpu_threads, end_group, environment, find_place, join
from areal_tasks.store.backend import Unavailable
from schemas.errors import UserError
from schemas.recipe.training import Trainer

Work = Callable[[], Any]


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed rank waits for the others as long as a busy machine may take."""
    monkeypatch.setattr(group_module, "GRACE_SECONDS", LIMIT)


def _groups(world: int = 2) -> tuple[list[Group], HashStore]:
    store = HashStore()
    return [Group(rank, world, store) for rank in range(world)], store


def _command(groups: list[Group], works: list[Work], states: list[str] | None = None) -> list[Any]:
    """Every rank does its part of one command; what each returned or raised."""
    states = states or ["same"] * len(groups)

    def run(rank: int) -> Any:
        try:
            if rank == 0:
                return groups[0].lead("go", works[0], lambda: states[0])
            return groups[rank].follow(lambda text: works[rank](), lambda: states[rank])
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(run, range(len(groups))))


def _raises(error: Exception) -> Work:
    def work() -> None:
        raise error

    return work


def test_all_ranks_hear_the_command_and_rank_0_returns_its_own_result() -> None:
    groups, _ = _groups(3)
    heard: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        followers = [pool.submit(g.follow, heard.append, lambda: "same") for g in groups[1:]]
        assert groups[0].lead('train {"a": 1}', lambda: 7, lambda: "same") == 7
        assert [f.result() for f in followers] == [None, None]
    assert heard == ['train {"a": 1}'] * 2


@pytest.mark.parametrize("error", [UserError("no such table"), StaleCommand("superseded")])
def test_an_error_that_all_ranks_share_is_raised_and_survived(error: Exception) -> None:
    groups, _ = _groups()
    assert _command(groups, [_raises(error)] * 2) == [error, None]
    assert _command(groups, [lambda: 1, lambda: 2]) == [1, None]


def test_a_harmless_error_of_another_rank_is_raised_on_rank_0() -> None:
    groups, _ = _groups()
    found, _ = _command(groups, [lambda: 1, _raises(UserError("the store is full"))])
    assert isinstance(found, UserError)
    assert str(found) == "rank 1: the store is full"
    assert _command(groups, [lambda: 1, lambda: 2])[0] == 1


def test_ranks_that_hold_different_things_break_up() -> None:
    groups, _ = _groups()
    found = _command(groups, [lambda: 1, _raises(UserError("no memory"))], ["version 1", "version None"])
    assert [type(f) for f in found] == [GroupBroken, GroupBroken]
    assert str(found[0]) == "the ranks differ: rank 0 holds version 1; rank 1 holds version None no memory"
    assert found[0].by_user, "a person can change it, though it broke the group"


def test_an_unexpected_error_breaks_the_group_even_if_all_share_it() -> None:
    groups, _ = _groups()
    found = _command(groups, [_raises(RuntimeError("NCCL")), _raises(RuntimeError("NCCL"))])
    assert [type(f) for f in found] == [GroupBroken, GroupBroken]
    assert re.fullmatch("rank 0: RuntimeError: NCCL .*; rank 1: RuntimeError: NCCL .*", str(found[0]))
    assert not found[0].by_user


def test_a_rank_that_fails_alone_says_why_while_the_others_are_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits in a collective that never ends: rank 1 gives up after its grace, and rank 0 can read its words."""
    groups, _ = _groups()
    monkeypatch.setattr(group_module, "GRACE_SECONDS", 0.3)
    stuck = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(groups[0].lead, "go", stuck.wait, lambda: "same")
        with pytest.raises(GroupBroken, match="rank 1: no memory") as broken:
            groups[1].follow(lambda text: _raises(UserError("no memory"))(), lambda: "same")
        assert broken.value.by_user
        assert groups[0].failure_of(1) == Outcome(1, "same", "no memory")
        assert not leading.done()
        stuck.set()
        assert isinstance(leading.exception(LIMIT), UserError)


def test_a_rank_that_dies_without_a_word_has_none() -> None:
    groups, _ = _groups()
    assert groups[0].failure_of(1) is None
    assert Group().failure_of(0) is None


class OneCallAtATime(TCPStore):
    """A client of torch's store, which keeps its second caller waiting as long as its first; says when one waits."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1", 0, 2, True, wait_for_workers=False)
        self.waits = threading.Event()

    def wait(self, *given: Any) -> None:
        self.waits.set()
        super().wait(*given)


def test_a_rank_that_waits_forever_keeps_none_of_its_other_threads_waiting() -> None:
    """They can say that the other rank's process has ended, which is why it waits forever."""
    store = OneCallAtATime()
    group, other = Group(0, 2, store), Group(1, 2, store.clone())
    with ThreadPoolExecutor(2) as pool:
        leading = pool.submit(group.lead, "go", lambda: 7, lambda: "same")
        try:
            assert store.waits.wait(LIMIT)
            assert pool.submit(group.failure_of, 1).result(LIMIT) is None
            assert not leading.done()
        finally:
            other.follow(lambda text: None, lambda: "same")
        assert leading.result(LIMIT) == 7


def test_a_rank_that_waits_for_others_to_join_can_hear_that_one_failed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Group] = []

    def join_process_group(rank: int, size: int, store: Store, device: object) -> None:
        waits, other = threading.Event(), store.clone()
        with ThreadPoolExecutor(2) as pool:
            joining = pool.submit(lambda: (waits.set(), store.wait(["joined"])))
            try:
                assert waits.wait(LIMIT)
                assert pool.submit(made[0].store.check, ["any"]).result(LIMIT) is False
                assert pool.submit(made[0].failure_of, 1).result(LIMIT) is None
                assert not joining.done()
            finally:
                other.set("joined", "")

    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr(ranks, "_start_others", lambda *given: made.append(given[-1]))
    monkeypatch.setattr(ranks, "join_process_group", join_process_group)
    assert join(world.spec(), Trainer(backend="fsdp2", ranks=2)) is made[0]


def test_what_rank_0_finds_is_found_by_all() -> None:
    groups, _ = _groups()
    found: list[str] = []
    works = [
        lambda g=g, n=n: found.extend(g.from_first_here(w) for w in (lambda: f"a{n}", lambda: f"b{n}"))
        for n, g in enumerate(groups)
    ]
    _command(groups, works)
    assert sorted(found) == ["a0", "a0", "b0", "b0"]
    failing = [lambda g=g: g.from_first_here(_raises(UserError("it is damaged"))) for g in groups]
    error, _ = _command(groups, failing)
    assert isinstance(error, UserError)
    assert str(error) == "it is damaged"


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("error", [UserError("its disk is full"), OSError(errno.ENOSPC, "its disk is full", "/tmp/x")])
def test_the_error_of_one_rank_reaches_every_rank(failing: int, error: Exception) -> None:
    """Also that of rank 0, which collects what the others say."""
    store = HashStore()
    groups = [Group(rank, 4, store, local_world=2) for rank in range(4)]

    def work(group: Group) -> None:
        with pytest.raises(type(error) if group.rank == failing else UserError, match="its disk is full"):
            group.together(_raises(error) if group.rank == failing else lambda: "")
        assert group.together(lambda: group.rank) == group.rank

    assert _command(groups, [lambda g=g: work(g) for g in groups]) == [None] * 4


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("shared", [True, False])
def test_a_store_that_is_away_is_no_error_of_the_user(failing: int, shared: bool) -> None:
    """The caller asks again: see `worth_retrying`."""
    groups, _ = _groups()
    works: list[Work] = [lambda: 1, lambda: 2]
    works[failing] = _raises(Unavailable("no answer"))
    found, _ = _command(
        groups, [lambda g=g, w=w: g.together(w) if shared else w() for g, w in zip(groups, works, strict=True)]
    )
    assert type(found) is Unavailable and "no answer" in str(found)
    assert _command(groups, [lambda: 1, lambda: 2])[0] == 1


@pytest.mark.parametrize("failing", [0, 1])
def test_a_disk_that_fails_ends_the_group_as_it_ends_a_single_trainer(failing: int) -> None:
    groups, _ = _groups()
    works: list[Work] = [lambda: 1, lambda: 2]
    works[failing] = _raises(OSError(errno.EIO, "it is broken", "/tmp/x"))
    found = _command(groups, [lambda g=g, w=w: g.together(w) for g, w in zip(groups, works, strict=True)])
    assert [type(f) for f in found] == [GroupBroken, GroupBroken]
    assert f"rank {failing}: OSError" in str(found[0]) and not found[0].by_user


def test_the_first_rank_of_each_machine_tells_the_others_there() -> None:
    store = HashStore()
    groups = [Group(rank, 4, store, local_world=2) for rank in range(4)]

    def work(group: Group) -> None:
        first = group.rank // 2 * 2
        assert group.from_first_here(lambda: f"from {group.rank}") == f"from {first}"

    assert _command(groups, [lambda g=g: work(g) for g in groups]) == [None] * 4


class Counting(HashStore):
    """A store that counts the keys that it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def get(self, key: str) -> bytes:
        self.asked += 1
        return super().get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.asked += len(keys)
        return super().multi_get(keys)

    def wait(self, keys: list[str], *limit: Any) -> None:
        self.asked += len(keys)
        super().wait(keys, *limit)


def test_what_the_store_is_asked_for_grows_like_the_number_of_ranks() -> None:
    def asked(ranks: int) -> int:
        store = Counting()
        groups = [Group(rank, ranks, store, local_world=1) for rank in range(ranks)]
        _command(groups, [lambda g=g: g.together(int) for g in groups])
        return store.asked

    few, more, many = (asked(ranks) for ranks in (2, 4, 8))
    assert 0 < more - few == (many - more) // 2


def test_keys_of_past_commands_are_dropped() -> None:
    groups, store = _groups()
    counts = []
    for _ in range(6):
        _command(groups, [lambda g=g: g.from_first_here(lambda: "x") for g in groups])
        counts.append(store.num_keys())
    assert counts[-1] == counts[2] <= 8


def test_one_rank_exchanges_nothing() -> None:
    alone = Group()
    assert alone.lead("go", lambda: 3, lambda: "x") == 3
    assert alone.from_first_here(lambda: "text") == "text"
    error = RuntimeError("as it is")
    with pytest.raises(RuntimeError) as caught:
        alone.lead("go", _raises(error), lambda: "x")
    assert caught.value is error


def test_disagreement() -> None:
    same = [Outcome(0, "v1"), Outcome(1, "v1", "refused")]
    assert disagreement(same) is None
    assert disagreement([Outcome(0, "v1"), Outcome(1, "v2")]) == "the ranks differ: rank 0 holds v1; rank 1 holds v2"
    assert disagreement([Outcome(0, "v1"), Outcome(1, "v1", "crash", harmless=False)]) == "rank 1: crash"


class Cut(HashStore):
    """A store whose connection breaks before an outcome is posted."""

    def set(self, key: str, value: str) -> None:
        if key.startswith("outcome/"):
            raise DistNetworkError("Connection reset by peer")
        super().set(key, value)


def test_a_rank_that_loses_the_store_says_so() -> None:
    store = Cut()
    store.set("command/1", "go")
    with pytest.raises(DistNetworkError, match="Connection reset by peer"):
        Group(1, 2, store).follow(lambda command: None, lambda: "v1")


def test_a_place_is_rank_0_unless_it_is_started_as_another() -> None:
    settings = Trainer(backend="fsdp2", ranks=2)
    place = find_place(settings, {})
    assert (place.rank, place.world, place.spawned) == (0, 2, False)
    assert find_place(settings, {"RANK": "3", "WORLD_SIZE": "8"}) == place, "of the job that started the flow"
    started = Place(1, 1, 2, 2, True)
    assert find_place(settings, environment(started, "127.0.0.1", 1234)) == started


def test_the_first_rank_of_each_machine_leads_there() -> None:
    settings = Trainer(backend="fsdp2", ranks=4, nodes=2)
    places = [find_place(settings, {}, node) for node in range(2)]
    assert [(place.rank, place.local_rank, place.local_world) for place in places] == [(0, 0, 2), (2, 0, 2)]
    other = Place(3, 1, 4, 2, True)
    assert find_place(settings, environment(other, "127.0.0.1", 1234), 1) == other
    groups = [Group(rank, 4, HashStore(), local_world=2) for rank in range(4)]
    assert [group.first_here for group in groups] == [0, 0, 2, 2]


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert cpu_threads(Trainer()) == 8
    assert cpu_threads(Trainer(backend="fsdp2", ranks=4)) == 2
    assert cpu_threads(Trainer(backend="fsdp2", ranks=16)) == 1
    assert cpu_threads(Trainer(backend="fsdp2", ranks=4, threads=3)) == 3


def test_rank_0_answers_with_why_the_group_ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own command is stuck; the reason comes from the rank that failed alone. Then all processes are killed."""
    ended: list[tuple[int, int]] = []
    monkeypatch.setattr("os.killpg", lambda *call: ended.append(call))
    monkeypatch.setattr("areal_tasks.engines.trainer.ranks.ANSWER_SECONDS", 0.0)
    store = HashStore()
    group = Group(0, 2, store)
    app = make_app(world.spec(), group)

    def end() -> None:
        wait_until(lambda: store.check(["shared/1/1/0"]), "rank 0, which has done its part")
        end_group(group, GroupBroken("rank 1: out of memory"))

    ending = threading.Thread(target=end)
    ending.start()
    body = Load(owner=1, version=0, weights=world.initial).model_dump_json()
    try:
        answer = asyncio.run(_post(app, "/load", body))
    finally:
        ending.join()  # before `killpg` is the real one again
        _let_go(store)
    assert answer.status_code == 500
    assert answer.json() == {"error": "rank 1: out of memory"}
    assert ended == [(0, signal.SIGKILL)]


class Recording(HashStore):
    """A store that remembers what was put into it."""

    def __init__(self) -> None:
        super().__init__()
        self.put: list[str] = []

    def set(self, key: str, value: str) -> None:
        self.put.append(value)
        super().set(key, value)


def test_the_token_of_the_servers_does_not_reach_the_store_of_the_ranks(world: World) -> None:
    """Any process of the machine can read that store."""
    store = Recording()
    app = make_app(world.spec(), Group(0, 2, store))
    send = Send(owner=1, version=2, transport="nccl", receivers=(Receiver(url="http://server"),), token="s3cr3t")
    heard: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(Group(1, 2, store).follow, heard.append, lambda: "version None, step 0, owner 1")
        answer = asyncio.run(_post(app, "/send", send.model_dump_json()))
        other.result(LIMIT)
    assert answer.status_code == 409 and "nothing is loaded" in answer.text
    name, _, body = heard[0].partition(" ")
    assert (name, Send.model_validate_json(body)) == ("send", send.model_copy(update={"token": ""}))
    assert store.put and not [value for value in store.put if "s3cr3t" in value]


def _let_go(store: HashStore) -> None:
    """End the waits for rank 1: the thread in them would outlive the tests."""
    store.set("shared/1/1/1", json.dumps({"error": "out of memory", "away": False}))
    mine = json.loads(store.get("outcome/1/0"))
    store.set("outcome/1/1", json.dumps({**mine, "rank": 1}))


async def _post(app: Starlette, path: str, body: str) -> httpx.Response:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://trainer") as client:
        return await client.post(path, content=body)
