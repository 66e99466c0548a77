"""What a report says limits a run, of synthetic times of its services."""

from __future__ import annotations

import pytest

from areal_tasks.report.cost import TimeSpent, bottleneck, time_payload


def trainer(train: float, **waits: float) -> TimeSpent:
    return TimeSpent({"train": train}, waits)


BUSY = TimeSpent({"generate": 95}, {"rule": 5}, full=0.9)


@pytest.mark.parametrize(
    ("spent", "eta", "said"),
    [
        ({}, 0, "none stands out"),
        ({"trainer": trainer(90, groups=10), "inference": BUSY}, 2, "none stands out"),
        (
            {"trainer": trainer(38, groups=62), "inference": BUSY},
            2,
            "inference.servers). The trainer waits for groups 62",
        ),
        ({"trainer": trainer(38, groups=62), "inference": BUSY, "rollout": TimeSpent(cpu=0.95)}, 2, "rollout.workers"),
        (
            {"trainer": trainer(50, groups=50), "inference": TimeSpent({"generate": 60}, {"rule": 40})},
            2,
            "a larger rollout.max_head_offpolicyness",
        ),
        (
            {"trainer": trainer(50, groups=50), "inference": TimeSpent({"generate": 95}, {"rule": 5}, full=0.1)},
            2,
            "a larger rollout.max_head_offpolicyness",
        ),
        (
            {"trainer": trainer(50, groups=50), "inference": TimeSpent({"generate": 50}, {"rule": 50})},
            0,
            "let it run ahead (rollout.max_head_offpolicyness)",
        ),
        (
            {"trainer": trainer(95, groups=5), "inference": TimeSpent({"generate": 50}, {"rule": 50})},
            4,
            "trainer.ranks",
        ),
        ({"trainer": trainer(95, flow=5)}, 0, "trainer.micro_batch_tokens). Nothing else takes long"),
        ({"trainer": trainer(60, verdicts=40)}, 0, "reward.workers"),
        ({"trainer": trainer(60, store=40)}, 0, "store.url"),
        ({"trainer": trainer(60, evaluation=40)}, 0, "evaluation.every"),
        ({"trainer": trainer(60, servers=20, publish=20)}, 0, "publication (inference.transport)"),
    ],
)
def test_what_limits_a_run(spent: dict[str, TimeSpent], eta: int, said: str) -> None:
    assert said in bottleneck(spent, eta)


def test_the_page_has_shares_or_nothing() -> None:
    assert time_payload({}, 0) is None
    shown = time_payload({"trainer": trainer(30, groups=70)}, 0)
    assert shown is not None and shown["table"][1] == ["trainer", "train 30.0 %", "groups 70.0 %"]
