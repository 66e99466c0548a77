"""Schedules in closed form, clipping, and AdamW against its paper's formulas."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import save
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from areal_tasks.engines.trainer import checkpoint, checkpoint_files
from areal_tasks.engines.trainer.checkpoint import Progress
from areal_tasks.engines.trainer.optimizer import (
    clip_gradients,
    learning_rate,
    local_share,
    make_optimizer,
    prepare_state,
    step_at,
    whole,
)
from areal_tasks.engines.trainer.ranks import join_process_group
from schemas.recipe.training import Trainer


@pytest.fixture
def one_rank() -> Iterator[DeviceMesh]:
    """A process group of this process alone."""
    join_process_group(0, 1, dist.HashStore(), torch.device("cpu"))
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def _rates(total: int, **settings: Any) -> list[float]:
    return [learning_rate(step, total, Trainer(lr=0.1, **settings)) for step in range(total)]


def test_constant() -> None:
    assert _rates(4, lr_schedule="constant") == pytest.approx([0.1] * 4)


def test_linear_ends_at_its_share() -> None:
    assert _rates(5, lr_schedule="linear", lr_final=0.2) == pytest.approx([0.1, 0.08, 0.06, 0.04, 0.02])


def test_cosine() -> None:
    expected = [0.1 * (0.1 + 0.9 * (1 + math.cos(math.pi * s / 4)) / 2) for s in range(5)]
    assert _rates(5, lr_schedule="cosine", lr_final=0.1) == pytest.approx(expected)
    assert expected[-1] == pytest.approx(0.01)


def test_warm_up_then_decay() -> None:
    found = _rates(7, lr_schedule="linear", lr_final=0.0, warmup_steps=4)
    assert found == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.05, 0.0])


def test_beyond_the_end_the_rate_stays() -> None:
    assert learning_rate(50, 5, Trainer(lr=0.1, lr_schedule="cosine", lr_final=0.3)) == pytest.approx(0.03)


@given(st.integers(1, 50), st.integers(0, 60), st.sampled_from(["constant", "linear", "cosine"]), st.floats(0, 1))
def test_rates_stay_within_bounds(total: int, warmup: int, schedule: str, final: float) -> None:
    found = _rates(total, lr_schedule=schedule, lr_final=final, warmup_steps=warmup)
    assert all(0 <= lr <= 0.1 * (1 + 1e-9) for lr in found)
    after = found[warmup:]
    assert all(a >= b - 1e-12 for a, b in pairwise(after))


def test_clipping_scales_to_the_norm_and_reports_what_it_was() -> None:
    one, two = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))
    one.grad, two.grad = torch.tensor([2.0, 3.0]), torch.tensor([6.0])
    assert clip_gradients([one, two], 3.5) == pytest.approx(7.0)
    assert one.grad.tolist() == pytest.approx([1.0, 1.5], rel=1e-5)
    assert clip_gradients([one, two], 100.0) == pytest.approx(3.5, rel=1e-5)
    assert two.grad.tolist() == pytest.approx([3.0], rel=1e-5)


def test_a_sharded_parameter_is_clipped_and_stepped_as_a_whole_one_is(one_rank: DeviceMesh) -> None:
    settings = Trainer(lr=0.1, weight_decay=0.1)
    start, gradient = torch.randn(5, 3), torch.randn(5, 3)
    whole = torch.nn.Parameter(start.clone())
    shares = torch.nn.Parameter(distribute_tensor(start.clone(), one_rank, [Shard(0)]))
    whole.grad, shares.grad = gradient.clone(), distribute_tensor(gradient.clone(), one_rank, [Shard(0)])
    norms, results = [], []
    for parameter in (whole, shares):
        optimizer = make_optimizer([("weight", parameter)], settings)
        norms.append(clip_gradients([parameter], 0.5))
        step_at(optimizer, 0.1)
        step_at(optimizer, 0.05)
        results.append(local_share(parameter.detach()))
        assert local_share(prepare_state(optimizer, parameter)["step"]) == 2.0
    assert norms == pytest.approx([float(gradient.norm())] * 2, rel=1e-6)
    assert torch.equal(*results) and not torch.equal(results[0], start)


def test_the_share_of_a_lone_rank_is_the_whole_tensor_and_no_copy(one_rank: DeviceMesh) -> None:
    shares = distribute_tensor(torch.randn(5, 3), one_rank, [Shard(0)])
    assert whole(shares).data_ptr() == local_share(shares).data_ptr()
    assert torch.equal(whole(shares), shares.full_tensor())
    assert whole(plain := torch.randn(2)) is plain


def test_adamw_is_what_its_paper_says() -> None:
    settings = Trainer(lr=0.5, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.1)
    weight = torch.nn.Parameter(torch.tensor([[1.0, -2.0]]))
    optimizer = make_optimizer([("weight", weight)], settings)
    m = v = torch.zeros(1, 2, dtype=torch.float64)
    expected = weight.detach().double()
    for t, lr in enumerate((0.5, 0.25), 1):
        gradient = torch.tensor([[0.3, -0.7]]) * t
        weight.grad = gradient.clone()
        step_at(optimizer, lr)
        m, v = 0.8 * m + 0.2 * gradient, 0.9 * v + 0.1 * gradient**2
        update = (m / (1 - 0.8**t)) / ((v / (1 - 0.9**t)).sqrt() + 1e-3)
        expected = expected - lr * (update + 0.1 * expected)
    assert weight[0].tolist() == pytest.approx(expected[0].tolist(), rel=1e-5)


def test_a_large_state_is_written_to_several_files_and_read_back_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(scale: float) -> tuple[torch.nn.Module, torch.optim.AdamW]:
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(6)))
        optimizer = make_optimizer(model.named_parameters(), Trainer(lr=0.1))
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter) * scale
        step_at(optimizer, 0.1)
        return model, optimizer

    monkeypatch.setattr(checkpoint_files, "FILE_BYTES", 100)
    model, optimizer = made(1.0)
    save(checkpoint.Saving(tmp_path / "some", checkpoint.held_parameters(model, optimizer), Progress(7, 1)))
    assert len(list((tmp_path / "some").glob("*.distcp"))) > 2
    other, others = made(2.0)
    held = checkpoint.held_parameters(other, others)
    assert checkpoint.load_parameters(tmp_path / "some", held, lambda names: None) == Progress(7, 1)
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        kept, found = prepare_state(optimizer, one), prepare_state(others, two)
        assert torch.equal(one, two) and all(torch.equal(kept[key], found[key]) for key in kept), name
