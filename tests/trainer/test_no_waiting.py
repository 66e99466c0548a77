"""A minibatch asks the device for numbers once, right before its step, and the host's work is done by then."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_builders import advantage, rlhf_recipe, rollout

from areal_tasks.data.batching import Layout, make_layout
from areal_tasks.engines.trainer.checkpoint import Progress
from areal_tasks.engines.trainer.head import TokenLoss
from areal_tasks.engines.trainer.learner import Learner
from areal_tasks.engines.trainer.local import LocalBackend
from areal_tasks.engines.trainer.metrics import SampleMeans, TokenStats, over_ranks, step_statistics, totals
from areal_tasks.engines.trainer.objective import STATS
from areal_tasks.engines.trainer.plan import make_plan
from areal_tasks.engines.trainer.policy import _Pick
from areal_tasks.engines.trainer.rows import grpo_batch
from areal_tasks.engines.trainer.settings import Settings, read_settings

LENGTHS = [9, 4, 13, 6, 11, 3, 8, 2, 10, 7, 12, 5]
#: Operations that wait for a device: a tensor's value, or a size that hangs on values.
WAITING = {torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.equal}


class Watch(TorchDispatchMode):
    """Counts the operations that would wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in WAITING or _selects(func, args):
            self.waited.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def _selects(func: Any, args: Any) -> bool:
    """Indexing by a mask, whose true places must be counted."""
    masks = args[1] if func.overloadpacket is torch.ops.aten.index else ()
    return any(isinstance(mask, Tensor) and mask.dtype == torch.bool for mask in masks)


class Watched(LocalBackend):
    """The local backend; `events` tells the order of passes and steps, `watch` what waits in a pass."""

    def __init__(self, settings: Settings, events: list[str]) -> None:
        super().__init__(settings.trainer, settings.model)
        self.events = events
        self.watch = Watch()

    def learn(self, layout: Layout, weights: Tensor, loss: TokenLoss, temperature: float, last: bool) -> Tensor:
        self.events.append("pass")
        with self.watch:
            return super().learn(layout, weights, loss, temperature, last)

    def step(self, lr: float, wanted: bool) -> float:
        self.events.append("step")
        return super().step(lr, wanted)


def _learn(model: Path, **trainer: Any) -> tuple[list[str], Watched]:
    events: list[str] = []
    settings = read_settings(rlhf_recipe(trainer={"layout": "padded", **trainer}))
    backend = Watched(settings, events)
    backend.load(model, 0)
    table = rollout(LENGTHS)
    batch = grpo_batch({"rollout": table, "advantage": advantage(table)}, 0)
    Learner(backend, settings, batch, make_plan(batch, settings, 0)).learn(0, Progress())
    return events, backend


def test_no_pass_waits_for_the_device(tiny: Path) -> None:
    events, backend = _learn(tiny, micro_batch_tokens=16)
    assert events.count("pass") > events.count("step") == 2
    assert backend.watch.waited == []


def test_no_score_waits_for_the_device(tiny: Path) -> None:
    backend = Watched(read_settings(rlhf_recipe()), [])
    backend.load(tiny, 0)
    table = rollout(LENGTHS)
    sequences = grpo_batch({"rollout": table, "advantage": advantage(table)}, 0).sequences
    layout = make_layout(sequences, torch.arange(len(LENGTHS)), "padded")
    with backend.watch:
        scores = backend.score(layout, 0.8, "policy")
    assert len(scores.logprobs) == len(layout.targets) > 0
    assert backend.watch.waited == []


def test_the_watch_sees_what_waits() -> None:
    values = torch.arange(3.0)
    with Watch() as watch:
        assert float(values.sum()) == 3.0
        assert len(values[values > 0]) == 2
    assert watch.waited == ["_local_scalar_dense", "index"]


def test_picked_rows_have_the_gradient_of_a_selection() -> None:
    matrix = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.tensor([5, 0, 6, 2])
    assert torch.autograd.gradcheck(lambda m: _Pick.apply(m, rows), (matrix,))
    assert torch.equal(_Pick.apply(matrix, rows), matrix[rows])


def _stats(tokens: int) -> tuple[TokenStats, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    values = torch.randn(len(STATS), tokens, generator=generator)
    owners = torch.randint(0, 4, (tokens,), generator=generator).sort().values * 2 + 1
    return TokenStats(values, owners), torch.rand(tokens, generator=generator)


def test_statistics_of_ranks_are_those_of_all_their_tokens() -> None:
    (one, first), (other, second) = _stats(11), _stats(5)
    parts = [totals(one.values, first), totals(other.values, second), totals(one.values[:, :0], first[:0])]
    found = step_statistics(over_ranks(torch.stack([part.flatten() for part in parts], 1)), 16, measured=True)
    values = torch.cat([one.values, other.values], 1).double()
    row = {name: values[k] for k, name in enumerate(STATS)}
    assert found["loss"] == pytest.approx(float(row["loss"] @ torch.cat([first, second]).double()))
    assert found["kl"] == pytest.approx(float(row["kl"].mean()))
    assert found["ratio_mean"] == pytest.approx(float(row["ratio"].mean()))
    assert found["ratio_max"] == float(row["ratio"].max())
    assert found["logprob_gap_max"] == float(row["logprob_gap"].max())
    assert found["ratio_outside"] == pytest.approx(float(row["ratio_outside"].mean()))
    assert found["tokens"] == 16


def test_a_number_that_is_none_reaches_every_statistic_of_its_row() -> None:
    stats, weights = _stats(6)
    stats.values[STATS.index("ratio"), 2] = torch.nan
    found = step_statistics(totals(stats.values, weights), 6, measured=False)
    assert np.isnan([found["ratio_mean"], found["ratio_max"], found["logprob_gap_mean"]]).all()
    assert np.isfinite([found["loss"], found["entropy"]]).all()


def test_samples_are_averaged_over_their_own_tokens() -> None:
    means = SampleMeans(10)
    stats, _ = _stats(40)
    means.add(stats, measured=True)
    means.add(TokenStats(torch.ones(len(STATS), 2), torch.tensor([0, 0])), measured=False)
    found = means.columns()
    for sample in (1, 3, 5, 7):
        wanted = stats.values[STATS.index("loss"), stats.samples == sample].double().mean()
        assert found["sample_loss"][sample] == pytest.approx(float(wanted), rel=1e-6)
    assert (found["sample_ratio"][0], found["sample_kl"][0], found["sample_ratio"][2]) == (1.0, 1.0, 1.0)
    assert found["sample_loss"][2] == 0.0
    assert np.isnan(found["sample_logprob_gap"][[0, 2]]).all() and np.isfinite(found["sample_logprob_gap"][1])
