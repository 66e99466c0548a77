"""A trainer of two ranks and a server as the supervisor runs them: commands over HTTP, deaths, no process left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import recipe
from listeners import beyond_loopback, listening
from trainer_builders import World, advantage, check_scores, rollout
from waiting import LIMIT, alive, wait_until

from areal_tasks.engines.trainer.commands import Done, Keep, Load, Publish, Train, Trained, Written
from areal_tasks.engines.trainer_client import TrainerClient, TrainerDown
from areal_tasks.engines.watchdog import Watchdog
from areal_tasks.launchers.local import LocalHandle
from areal_tasks.launchers.supervisor import Supervisor
from areal_tasks.store.shards import read_table
from schemas.errors import UserError
from schemas.recipe.launcher import Launcher

LENGTHS = [9, 4, 13, 6, 11, 3, 8]


@pytest.fixture(scope="module")
def supervisor(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    settings = Launcher(type="local", startup_seconds=600, restarts=3)
    with Supervisor(world.store, settings, tmp_path_factory.mktemp("logs")) as started:
        world.recipe = recipe(backend="fsdp2", ranks=2)
        started.start("areal_tasks.engines.trainer", world.spec(), 1)
        server = world.spec().model_copy(update={"name": "inference-0"})
        started.start("areal_tasks.engines.embedded", server, 1)
        yield started


def _client(supervisor: Supervisor) -> TrainerClient:
    """The trainer; started again if it has ended."""
    [url], watchdog = supervisor.wait(["trainer"]), Watchdog(Launcher(), lambda _name, _why: None)
    return TrainerClient("trainer", url, supervisor.access, watchdog, print)


def _ranks(supervisor: Supervisor) -> list[psutil.Process]:
    first = psutil.Process(_process_id(supervisor, "trainer"))
    return [first, *first.children()]


def _process_id(supervisor: Supervisor, name: str) -> int:
    handle = supervisor.services[name].handle
    assert isinstance(handle, LocalHandle)
    return handle.process.pid


def _train(world: World, version: int, **changes: Any) -> Train:
    table = rollout(LENGTHS, seed=version, version=version)
    return world.train_command(version, {"rollout": table, "advantage": advantage(table)}, **changes)


def _published(world: World, client: TrainerClient, attempt: str, version: int = 1) -> list[str]:
    prefix = world.folder("weights", version, attempt)
    return [f.sha256 for f in client.run(Publish(owner=1, version=version, prefix=prefix), Written).files]


def test_commands_over_http(world: World, supervisor: Supervisor) -> None:
    client = _client(supervisor)
    assert client.health().version is None
    with pytest.raises(TrainerDown, match="nothing is loaded"):
        client.run(_train(world, 0), Trained)
    client.run(Load(owner=1, version=0, weights=world.initial), Done)
    command = _train(world, 0)
    answer = client.run(command, Trained)
    [peaks] = read_table(world.store, answer.tables["train_steps"])["peak_bytes"].to_pylist()
    assert len(peaks) == 2 and min(peaks) > 50e6, "of each rank, in one step"
    weights = _published(world, client, "one")
    assert client.run(command, Trained) == answer
    with pytest.raises(TrainerDown, match="version 1 is held"):
        client.run(_train(world, 0, digest="another"), Trained)
    assert _published(world, client, "two") == weights
    assert client.run(_train(world, 1), Trained).version == 2
    assert client.health().step == 2
    assert _published(world, client, "three") == weights, "they are kept, by the first rank"
    client.run(Keep(owner=1, version=2), Done)
    assert client.health().kept == 2
    with pytest.raises(TrainerDown, match="version 1 was expected"):
        _published(world, client, "four")
    assert _published(world, client, "five", 2) != weights
    client.close()


def test_what_servers_have_to_score_is_scored_by_both_ranks(world: World, supervisor: Supervisor) -> None:
    client = _client(supervisor)
    client.run(Load(owner=1, version=0, weights=world.initial), Done)
    ahead = recipe(backend="fsdp2", ranks=2) | {"rollout": {**world.recipe["rollout"], "max_head_offpolicyness": 1}}
    table = rollout(LENGTHS)
    answer = client.run(_train(world, 0, recipe=ahead), Trained)
    scored = read_table(world.store, answer.tables["scored"])
    assert scored["sample_id"].to_pylist() == table["sample_id"].to_pylist()
    _published(world, client, "scored")
    folder = world.store.local(world.folder("weights", 1, "scored"))
    assert folder is not None
    check_scores(scored, folder, 1)
    client.close()


def test_neither_rank_shows_the_token_in_its_environment(supervisor: Supervisor) -> None:
    _client(supervisor).close()
    shown = [Path(f"/proc/{rank.pid}/environ").read_text() for rank in _ranks(supervisor)]
    assert len(shown) == 2 and all("TMPDIR" in one and supervisor.token not in one for one in shown)


def test_nothing_listens_beyond_loopback(world: World, supervisor: Supervisor) -> None:
    """Neither an engine nor a rank of one, not for the commands between ranks, collectives or handed-over weights."""
    client = _client(supervisor)
    supervisor.wait(["inference-0"])
    client.run(Load(owner=1, version=0, weights=world.initial), Done)
    client.run(_train(world, 0), Trained)
    roots = [psutil.Process(_process_id(supervisor, name)) for name in supervisor.services]
    assert len(listening(roots)) >= 3 and all(listening(roots).values())  # two ranks and the server
    assert beyond_loopback(roots) == {}
    client.close()


def test_input_that_cannot_be_read_is_an_answer_and_the_group_lives_on(world: World, supervisor: Supervisor) -> None:
    client = _client(supervisor)
    ranks = _ranks(supervisor)
    client.run(Load(owner=1, version=0, weights=world.initial), Done)
    broken = _train(world, 0)
    shard = world.store.local(broken.tables["advantage"].shards[0].path)
    assert shard is not None
    good = shard.read_bytes()
    shard.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(UserError, match=shard.name):
        client.run(broken, Trained)
    shard.write_bytes(good)
    assert client.run(broken, Trained).version == 1
    assert _ranks(supervisor) == ranks
    client.close()


def test_a_trainer_that_loses_a_rank_ends_and_starts_again(world: World, supervisor: Supervisor) -> None:
    client = _client(supervisor)
    client.run(Load(owner=1, version=0, weights=world.initial), Done)
    ranks = _ranks(supervisor)
    assert len(ranks) == 2
    ranks[1].kill()
    wait_until(lambda: not any(map(alive, ranks)), "the end of all ranks")
    with pytest.raises(TrainerDown):
        client.health()
    client.close()
    assert _exit_code(supervisor) not in (None, 0)
    again = _client(supervisor)
    assert again.health().version is None
    again.run(Load(owner=1, version=0, weights=world.initial), Done)
    assert again.run(_train(world, 0), Trained).version == 1
    again.close()


def test_no_rank_outlives_rank_0(supervisor: Supervisor) -> None:
    _client(supervisor).close()
    ranks = _ranks(supervisor)
    assert len(ranks) == 2
    ranks[0].kill()
    wait_until(lambda: not any(map(alive, ranks)), "the end of all ranks")


def _exit_code(supervisor: Supervisor) -> int | None:
    handle = supervisor.services["trainer"].handle
    assert isinstance(handle, LocalHandle)
    return handle.process.wait(LIMIT)
