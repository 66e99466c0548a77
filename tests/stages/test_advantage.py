"""What becomes of rewards: advantages of hand-made groups, and what dropping a sample costs its group and no other."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_tasks.algorithms.normalisation import EPS
from areal_tasks.engines.trainer.forward import one_thread
from areal_tasks.stages.advantage import advantage_table
from schemas.recipe.sections import Reward
from schemas.recipe.training import Grpo
from schemas.tables import ADVANTAGE, FLOATS, MASK

NAN = math.nan


@dataclass(frozen=True)
class Row:
    """A sample with two prompt tokens and `generated` generated ones."""

    group: int
    reward: float = 0.0
    verdict: str = "correct"
    generated: int = 2
    logprobs: tuple[float, ...] = ()
    reference: tuple[float, ...] = ()
    proximal: tuple[float, ...] = ()

    @property
    def mask(self) -> list[bool]:
        return [False, False] + [True] * self.generated


def tables(rows: list[Row]) -> dict[str, pa.Table]:
    """What the stage reads; `proximal` if a row has it. Prompt positions hold NaN, which must not matter."""
    ids = [f"s{i}" for i in range(len(rows))]

    def flat(values: list[tuple[float, ...]]) -> pa.Array:
        lists = [[NAN, NAN, *(given or (0.0,) * row.generated)] for row, given in zip(rows, values, strict=True)]
        return pa.array(lists, FLOATS)

    rollout = {
        "sample_id": ids,
        "group_id": [row.group for row in rows],
        "loss_mask": pa.array([row.mask for row in rows], MASK),
        "num_generated": pa.array([row.generated for row in rows], pa.int32()),
        "logprobs": flat([row.logprobs for row in rows]),
    }
    rewards = pa.array([row.reward for row in rows], pa.float32())
    found = {
        "rollout": rollout,
        "verify": {"sample_id": ids, "reward": rewards, "verdict": [row.verdict for row in rows]},
        "reference": {"sample_id": ids, "ref_logprobs": flat([row.reference for row in rows])},
    }
    if any(row.proximal for row in rows):
        found["proximal"] = {"sample_id": ids, "prox_logprobs": flat([row.proximal for row in rows])}
    return {name: pa.table(columns) for name, columns in found.items()}


def advantages(
    rows: list[Row], on_unverified: str = "drop_sample", kl: bool = False, **algorithm: Any
) -> list[dict[str, Any]]:
    how, reward = Grpo(kl="reward" if kl else "none", **algorithm), Reward(on_unverified=on_unverified)  # type: ignore[arg-type]
    table = advantage_table(tables(rows), how, reward)
    assert table.schema == ADVANTAGE
    return table.to_pylist()


def generated(row: dict[str, Any]) -> list[float]:
    """The advantages of the generated tokens; prompt tokens have none."""
    assert row["advantages"][:2] == [0.0, 0.0] == row["returns"][:2]
    return row["advantages"][2:]


@pytest.mark.parametrize("unbiased", [True, False])
def test_every_generated_token_has_its_samples_relative_reward(unbiased: bool) -> None:
    found = advantages([Row(0, 1.0, generated=3), Row(0, 0.0, generated=1), Row(0, 0.5)], std_unbiased=unbiased)
    deviation = math.sqrt((0.25 + 0.25 + 0.0) / (2 if unbiased else 3))
    expected = [0.5 / (deviation + EPS), -0.5 / (deviation + EPS), 0.0]
    for row, value, length in zip(found, expected, (3, 1, 2), strict=True):
        assert generated(row) == pytest.approx([value] * length)
        assert row["shaped_reward"] == pytest.approx(value)
        assert (row["kept"], row["dropped_reason"]) == (True, "")


def test_a_group_without_signal_has_no_advantage_where_the_batch_scales() -> None:
    """Whitening the advantages over the batch's tokens gives it one, since longer samples weigh more in their mean."""
    rows = [Row(0, 1.0, generated=9), Row(0, 0.0, generated=1), Row(1, 1.0), Row(1, 1.0)]
    found = advantages(rows, reward_norm="mean_batch_std")
    deviation = math.sqrt((3 * 0.25**2 + 0.75**2) / 3)  # of 1, 0, 1, 1
    assert [generated(row)[0] for row in found] == pytest.approx([0.5 / deviation, -0.5 / deviation, 0, 0], rel=1e-5)
    assert generated(found[2]) == [0.0, 0.0]
    whitened = advantages(rows, reward_norm="mean", advantage_norm="batch")
    assert generated(whitened[2])[0] < -0.5


def test_groups_are_found_by_id_not_by_place() -> None:
    mixed = advantages([Row(7, 1.0), Row(3, 5.0), Row(7, 0.0), Row(3, 9.0)], reward_norm="mean")
    assert [generated(row)[0] for row in mixed] == [0.5, -2.0, -0.5, 2.0]


def test_a_sample_that_was_not_verified_is_dropped_alone() -> None:
    rows = [Row(0, 1.0), Row(0, NAN, "timeout"), Row(0, 0.0), Row(1, 4.0), Row(1, 2.0)]
    found = advantages(rows, reward_norm="mean")
    assert [row["dropped_reason"] for row in found] == ["", "timeout", "", "", ""]
    assert [row["kept"] for row in found] == [True, False, True, True, True]
    assert [generated(row)[0] for row in found] == [0.5, 0.0, -0.5, 1.0, -1.0]


def test_a_group_can_be_dropped_with_its_unverified_sample() -> None:
    rows = [Row(0, 1.0), Row(0, NAN, "error"), Row(1, 4.0), Row(1, 2.0)]
    found = advantages(rows, "drop_group", reward_norm="mean")
    assert [row["dropped_reason"] for row in found] == ["group", "error", "", ""]
    assert [generated(row)[0] for row in found] == [0.0, 0.0, 1.0, -1.0]


def test_an_unverified_sample_can_have_a_stated_reward() -> None:
    found = advantages([Row(0, 1.0), Row(0, -1.0, "timeout")], "reward", reward_norm="mean")
    assert [row["kept"] for row in found] == [True, True]
    assert [generated(row)[0] for row in found] == [1.0, -1.0]


def test_a_timeout_with_a_reward_counts_in_its_group() -> None:
    found = advantages([Row(0, 1.0), Row(0, 0.0, "timeout")], reward_norm="mean")
    assert [row["kept"] for row in found] == [True, True]
    assert [generated(row)[0] for row in found] == [0.5, -0.5]


def test_an_unparseable_answer_is_a_verdict_like_any_other() -> None:
    found = advantages([Row(0, 1.0), Row(0, 0.0, "unparseable")], reward_norm="mean")
    assert [row["kept"] for row in found] == [True, True]


def test_a_group_all_of_whose_samples_are_dropped_has_no_advantage() -> None:
    found = advantages([Row(0, NAN, "timeout"), Row(0, NAN, "error"), Row(1, 1.0), Row(1, 0.0)])
    assert [generated(row) for row in found[:2]] == [[0.0, 0.0], [0.0, 0.0]]
    assert all(generated(row)[0] != 0 for row in found[2:])


def test_kl_in_the_reward_is_paid_by_every_token_from_it_on() -> None:
    rows = [
        Row(0, 1.0, logprobs=(-1.0, -2.0), reference=(-1.5, -2.25)),
        Row(0, 0.0, logprobs=(-1.0, -1.0), reference=(-1.0, -1.0)),
    ]
    first, second = advantages(rows, kl=True, reward_norm="mean", kl_coef=2.0)
    assert generated(first) == pytest.approx([0.5 - 2.0 * (0.5 + 0.25), 0.5 - 2.0 * 0.25])
    assert generated(second) == pytest.approx([-0.5, -0.5])
    assert [first["shaped_reward"], second["shaped_reward"]] == pytest.approx([-1.0, -0.5])


def test_the_trainers_own_logprobs_are_penalised_and_not_the_servers() -> None:
    """The server rounds otherwise than the trainer, who computes policy and reference: that is no KL."""
    rows = [Row(0, 1.0, logprobs=(-9.0, 9.0), reference=(-1.5, -2.25), proximal=(-1.0, -2.0)), Row(0, 0.0)]
    first, second = advantages(rows, kl=True, reward_norm="mean", kl_coef=2.0)
    assert generated(first) == pytest.approx([0.5 - 2.0 * (0.5 + 0.25), 0.5 - 2.0 * 0.25])
    assert generated(second) == pytest.approx([-0.5, -0.5])
    same = [replace(row, proximal=(-1.0, -2.0), reference=(-1.0, -2.0)) for row in rows]
    assert [generated(row) for row in advantages(same, kl=True, reward_norm="mean", kl_coef=2.0)] == [
        [0.5] * 2,
        [-0.5] * 2,
    ]


def test_a_dropped_sample_may_hold_any_logprobs() -> None:
    rows = [Row(0, NAN, "timeout", logprobs=(NAN, NAN)), Row(0, 1.0), Row(0, 0.0)]
    found = advantages(rows, kl=True, reward_norm="mean", kl_coef=1.0)
    assert [generated(row)[0] for row in found] == [0.0, 0.5, -0.5]


rewards = st.floats(-4, 4, width=32)
groups = st.lists(st.tuples(st.integers(0, 3), rewards), min_size=2, max_size=12)


@given(groups, st.data(), st.sampled_from(["drop_sample", "drop_group"]), st.sampled_from(["mean_std", "mean", "none"]))
def test_a_dropped_sample_changes_only_its_own_group(
    samples: list[tuple[int, float]], data: st.DataObject, how: str, norm: str
) -> None:
    whole = [Row(group, reward) for group, reward in samples]
    at = data.draw(st.integers(0, len(whole) - 1))
    without = [Row(row.group, NAN, "timeout") if i == at else row for i, row in enumerate(whole)]
    before, after = advantages(whole, how, reward_norm=norm), advantages(without, how, reward_norm=norm)
    for row, one, other in zip(whole, before, after, strict=True):
        if row.group != whole[at].group:
            assert one == other
    assert not after[at]["kept"] and not any(generated(after[at]))


def test_others_keep_their_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(ValueError, match="in between"), one_thread():
            assert torch.get_num_threads() == 1
            raise ValueError("in between")
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
