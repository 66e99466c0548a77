"""What the flow and the trainer say to each other, and a connection that is closed."""

from __future__ import annotations

import math

import pytest

from areal_tasks.engines.access import Access
from areal_tasks.engines.trainer.commands import Compared, Trained
from areal_tasks.engines.trainer_client import TrainerClient, TrainerDown
from areal_tasks.engines.watchdog import Watchdog
from schemas.recipe.launcher import Launcher


@pytest.mark.parametrize("value", [0.0, 0.25, math.inf, -math.inf, math.nan])
def test_every_number_that_the_trainer_answers_is_read_as_it_was(value: float) -> None:
    again = Compared.model_validate_json(Compared(difference=value).model_dump_json())
    assert again.difference == pytest.approx(value, abs=0, nan_ok=True)
    trained = Trained.model_validate_json(Trained(version=1, tables={}, metrics={"loss": value}).model_dump_json())
    assert trained.metrics["loss"] == pytest.approx(value, abs=0, nan_ok=True)


def test_a_connection_that_is_closed_counts_as_a_trainer_that_is_down() -> None:
    client = TrainerClient("http://127.0.0.1:9", Access("token"), Watchdog(Launcher(), lambda _name, _why: None), print)
    client.close()
    assert not client.is_free(1) and client.work() == (0, 0) and client.heartbeat().progress is None
    with pytest.raises(TrainerDown, match="closed"):
        client.health()
