"""What the flow and the trainer say to each other, and a connection that is closed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_tasks.engines.access import Access
from areal_tasks.engines.trainer.commands import Command, Compared, Trained
from areal_tasks.engines.trainer_client import TrainerClient, TrainerDown
from areal_tasks.engines.trainers import restore
from areal_tasks.engines.watchdog import Watchdog
from areal_tasks.store.backend import open_store
from areal_tasks.store.runs import Run
from schemas.manifest import IterationCommit, RunRecord, WeightsRef
from schemas.recipe.launcher import Launcher


@pytest.fixture
def client() -> Iterator[TrainerClient]:
    """Of a trainer that does not run."""
    watchdog = Watchdog(Launcher(), lambda _name, _why: None)
    client = TrainerClient("trainer", "http://127.0.0.1:9", Access("token"), watchdog, print)
    yield client
    client.close()
    watchdog.close()


@pytest.mark.parametrize("value", [0.0, 0.25, math.inf, -math.inf, math.nan])
def test_every_number_that_the_trainer_answers_is_read_as_it_was(value: float) -> None:
    again = Compared.model_validate_json(Compared(difference=value).model_dump_json())
    assert again.difference == pytest.approx(value, abs=0, nan_ok=True)
    trained = Trained.model_validate_json(Trained(version=1, tables={}, metrics={"loss": value}).model_dump_json())
    assert trained.metrics["loss"] == pytest.approx(value, abs=0, nan_ok=True)


def test_a_connection_that_is_closed_counts_as_a_trainer_that_is_down(client: TrainerClient) -> None:
    client.close()
    assert not client.is_free(1) and client.work() == (0, 0) and client.heartbeat().progress is None
    with pytest.raises(TrainerDown, match="closed"):
        client.health()


def test_a_checkpoint_of_a_replay_is_loaded_without_the_run_that_it_replays(
    client: TrainerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That run is needed only to train again what it has trained: a replay goes on although it is damaged."""
    ref = WeightsRef(version=3, attempt="a", path="r/checkpoint.json", sha256="", digest="")
    commands: list[Command] = []
    monkeypatch.setattr(client, "run", lambda command, answer: commands.append(command))
    monkeypatch.setattr(Run, "commit", lambda self, iteration: IterationCommit.model_construct(checkpoint=ref))
    replay = RunRecord.model_construct(parent="damaged", replay_until=9)
    run = Run(open_store(tmp_path.as_uri()), "r", replay, owner=1, segments=())
    assert restore(run, client, ref, version=3) is None
    assert [(command.name, command.version) for command in commands] == [("load", 3)]
