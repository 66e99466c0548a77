"""The optimizer steps of one iteration: closed forms, independence of the layout, and what must not matter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from trainer_builders import (
    Recorder,
    advantage,
    demonstrations,
    rlhf_recipe,
    rollout,
    sft_recipe,
    weights_of,
    with_column,
)

from areal_tasks.algorithms.log_ratios import k3
from areal_tasks.data.batching import LEFT_OUT, make_layout
from areal_tasks.engines.trainer.checkpoint import Progress
from areal_tasks.engines.trainer.learner import Learned, Learner
from areal_tasks.engines.trainer.local import LocalBackend
from areal_tasks.engines.trainer.plan import Plan, make_plan
from areal_tasks.engines.trainer.rows import Batch, grpo_batch, logprobs_table, text_batch, text_samples
from areal_tasks.engines.trainer.settings import Settings, read_settings
from schemas.errors import UserError

LENGTHS = [9, 4, 13, 6, 11, 3, 8, 2, 10, 7, 12, 5]  # the one of length 2 is all prompt


def _settings(**changes: Any) -> Settings:
    return read_settings(rlhf_recipe(**changes))


def _run(
    model: Path, tables: Mapping[str, pa.Table], settings: Settings, plan: Plan | None = None
) -> tuple[Learned, torch.Tensor]:
    """Train without stepping: what is recorded, and the gradient of every minibatch (a row each)."""
    backend = Recorder(settings)
    backend.load(model, 0)
    batch = _batch(tables)
    learned = Learner(backend, settings, batch, plan or make_plan(batch, settings, 0)).learn(0, Progress())
    return learned, torch.stack(backend.gradients)


def _batch(tables: Mapping[str, pa.Table]) -> Batch:
    if "batch" in tables:
        return text_batch(tables["batch"], text_samples(tables["batch"]))
    return grpo_batch(tables, 0)


def _tables(dropped: tuple[int, ...] = ()) -> dict[str, pa.Table]:
    table = rollout(LENGTHS)
    return {"rollout": table, "advantage": advantage(table, dropped=dropped), "reference": _reference(table)}


def _reference(table: pa.Table) -> pa.Table:
    batch = grpo_batch({"rollout": table, "advantage": advantage(table)}, 0)
    sequences = batch.sequences
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(len(sequences.input_ids), generator=generator) * 0.2 - 2.7
    return logprobs_table("reference", batch.ids, batch.lengths, noise * sequences.counted)


@pytest.mark.parametrize("loss", ["token_mean", "sequence_mean"])
def test_loss_and_gradient_do_not_depend_on_micro_batches_or_layout(tiny: Path, loss: str) -> None:
    algorithm = {"loss": loss, "kl": "loss", "kl_coef": 0.3, "minibatches": 2}
    whole = _settings(algorithm=algorithm, trainer={"micro_batch_tokens": 10_000, "layout": "padded"})
    expected, gradient = _run(tiny, _tables(), whole)
    for layout in ("padded", "packed"):
        for budget in (16, 33, 10_000):
            other = _settings(algorithm=algorithm, trainer={"micro_batch_tokens": budget, "layout": layout})
            found, other_gradient = _run(tiny, _tables(), other)
            for name in ("loss", "policy_loss", "kl", "approx_kl", "entropy", "clip_fraction", "ratio_mean"):
                wanted = expected.train_steps[name].to_pylist()
                assert found.train_steps[name].to_pylist() == pytest.approx(wanted, abs=1e-6), (layout, budget, name)
            torch.testing.assert_close(other_gradient, gradient, atol=1e-6, rtol=1e-4)
            batches = found.train_steps["micro_batches"].to_pylist()
            assert (max(batches) > 1) == (budget < 10_000)


def test_ranks_that_share_the_micro_batches_add_up_to_one(tiny: Path) -> None:
    settings = _settings(trainer={"micro_batch_tokens": 16})
    _, whole = _run(tiny, _tables(), settings)
    shares = []
    for rank in range(3):
        backend = Recorder(settings)
        backend.load(tiny, 0)
        backend.rank, backend.world = rank, 3
        batch = _batch(_tables())
        Learner(backend, settings, batch, make_plan(batch, settings, 0)).learn(0, Progress())
        shares.append(torch.stack(backend.gradients))
    assert all(share.abs().sum() > 0 for share in shares)
    torch.testing.assert_close(torch.stack(shares).sum(0), whole, atol=1e-6, rtol=1e-4)


def test_loss_in_closed_form(tiny: Path) -> None:
    """PPO's clipped loss and k3, token by token, from logprobs computed apart."""
    settings = _settings(algorithm={"minibatches": 1, "kl": "loss", "kl_coef": 0.3})
    tables = _tables()
    learned, _ = _run(tiny, tables, settings)
    batch = _batch(tables)
    backend = LocalBackend(settings.trainer, settings.model)
    backend.load(tiny, 0)
    layout = make_layout(batch.sequences, torch.arange(12), "padded")
    new = backend.score(layout, 0.8, "policy").logprobs
    old, gain, reference = (batch.columns[n][layout.where] for n in ("behaviour", "advantages", "reference"))
    terms, clipped = [], 0
    for n, o, a in zip(new.tolist(), old.tolist(), gain.tolist(), strict=True):
        ratio = torch.tensor(n - o).exp().item()
        bounded = min(max(ratio, 0.8), 1.2)
        terms.append(-min(ratio * a, bounded * a))
        clipped += bounded * a < ratio * a
    row = learned.train_steps.to_pylist()[0]
    count = len(terms)
    assert 0 < clipped < count == row["tokens"] == sum(max(n - 2, 0) for n in LENGTHS)
    assert row["policy_loss"] == pytest.approx(sum(terms) / count, abs=1e-6)
    assert row["kl"] == pytest.approx(k3(new, reference).mean().item(), abs=1e-6)
    assert row["loss"] == pytest.approx(row["policy_loss"] + 0.3 * row["kl"], abs=1e-6)
    assert row["clip_fraction"] == pytest.approx(clipped / count)
    assert row["ratio_mean"] == pytest.approx((new - old).exp().mean().item(), rel=1e-5)
    assert row["ratio_max"] == pytest.approx((new - old).exp().max().item(), rel=1e-5)
    assert row["approx_kl"] == pytest.approx(((new - old).exp() - 1 - (new - old)).mean().item(), abs=1e-6)
    assert (row["samples"], row["total_tokens"], row["skipped"]) == (12, sum(LENGTHS) - 12, False)


def test_kl_in_the_reward_is_measured_and_not_minimised(tiny: Path) -> None:
    """The advantages have it already: no bit of the step depends on the reference, which `kl` and `sample_kl` show."""
    settings, tables = _settings(algorithm={"minibatches": 1, "kl": "reward", "kl_coef": 0.3}), _tables()
    measured, gradient = _run(tiny, tables, settings)
    blind, same = _run(tiny, {name: table for name, table in tables.items() if name != "reference"}, settings)
    [row], [other] = measured.train_steps.to_pylist(), blind.train_steps.to_pylist()
    assert row["kl"] > 0 and other["kl"] == 0.0
    assert measured.metrics["kl"] == row["kl"]
    assert row["loss"] == row["policy_loss"] == other["loss"] and torch.equal(gradient, same)
    counted = [n > 2 for n in LENGTHS]
    assert [kl > 0 for kl in measured.train_samples["sample_kl"].to_pylist()] == counted


def test_sequence_mean_weighs_sequences_alike(tiny: Path) -> None:
    settings = _settings(algorithm={"minibatches": 1, "loss": "sequence_mean"})
    learned, _ = _run(tiny, _tables(), settings)
    samples = learned.train_samples.to_pylist()
    with_tokens = [s["sample_loss"] for s, n in zip(samples, LENGTHS, strict=True) if n > 2]
    assert learned.train_steps["loss"][0].as_py() == pytest.approx(sum(with_tokens) / len(with_tokens), abs=1e-6)


def test_samples_are_described_one_by_one(tiny: Path) -> None:
    settings = _settings(algorithm={"minibatches": 3})
    learned, _ = _run(tiny, _tables(dropped=(4,)), settings)
    rows = learned.train_samples.to_pylist()
    assert [r["sample_id"] for r in rows] == [f"{i // 3}-{i % 3}" for i in range(12)]
    assert sorted(r["minibatch"] for r in rows) == [LEFT_OUT, *[0] * 4, *[1] * 4, *[2] * 3]
    for left_out in (rows[4], rows[7]):  # dropped; without tokens
        assert (left_out["sample_ratio"], left_out["sample_loss"], left_out["sample_kl"]) == (1.0, 0.0, 0.0)
    assert rows[4]["micro_batch"] == LEFT_OUT
    assert all(r["sample_kl"] > 0 and r["sample_ratio"] != 1.0 for i, r in enumerate(rows) if i not in (4, 7))
    total = sum(r["sample_loss"] * max(n - 2, 0) for r, n in zip(rows, LENGTHS, strict=True) if r["minibatch"] == 1)
    step = learned.train_steps.to_pylist()[1]
    assert total / step["tokens"] == pytest.approx(step["loss"], abs=1e-6)


def _nan_where_masked(table: pa.Table, name: str, masks: list[list[bool]]) -> pa.Table:
    values = table[name].to_pylist()
    poisoned = [
        [v if m else float("nan") for v, m in zip(*row, strict=True)] for row in zip(values, masks, strict=True)
    ]
    return with_column(table, name, poisoned)


def _text(table: pa.Table) -> str:
    """All of a table, bitwise and with NaN equal to itself."""
    return repr(table.to_pylist())


def test_masked_positions_and_dropped_samples_have_no_influence(tiny: Path) -> None:
    settings = _settings(algorithm={"kl": "loss", "kl_coef": 0.3})
    tables = _tables(dropped=(2, 9))
    expected, gradient = _run(tiny, tables, settings)
    masks = [
        m if i not in (2, 9) else [False] * len(m) for i, m in enumerate(tables["rollout"]["loss_mask"].to_pylist())
    ]
    poisoned = {
        "rollout": _nan_where_masked(tables["rollout"], "logprobs", masks),
        "advantage": _nan_where_masked(tables["advantage"], "advantages", masks),
        "reference": _nan_where_masked(tables["reference"], "ref_logprobs", masks),
    }
    found, other = _run(tiny, poisoned, settings)
    assert torch.equal(gradient, other)
    volatile = ["step_seconds", "peak_bytes"]
    assert _text(found.train_steps.drop(volatile)) == _text(expected.train_steps.drop(volatile))
    assert _text(found.train_samples) == _text(expected.train_samples)
    assert torch.isfinite(gradient).all() and gradient.abs().sum() > 0


def test_dropping_is_like_not_having_had_the_sample(tiny: Path) -> None:
    settings = _settings(algorithm={"minibatches": 1})
    dropped, gradient = _run(tiny, _tables(dropped=(2, 9)), settings)
    kept = [i for i in range(12) if i not in (2, 9)]
    fewer, other = _run(tiny, {name: t.take(kept) for name, t in _tables().items()}, settings)
    assert dropped.train_steps["loss"].to_pylist() == pytest.approx(fewer.train_steps["loss"].to_pylist(), abs=1e-6)
    torch.testing.assert_close(gradient, other, atol=1e-6, rtol=1e-4)


def test_tables_are_joined_by_sample_not_by_position(tiny: Path) -> None:
    tables = _tables()
    shuffled = {**tables, "advantage": tables["advantage"].take([*range(11, -1, -1)])}
    settings = _settings()
    assert torch.equal(_run(tiny, tables, settings)[1], _run(tiny, shuffled, settings)[1])
    with pytest.raises(UserError, match="no row for sample 1-0"):
        _batch({**tables, "advantage": tables["advantage"].take([0, 1, 2])})


def test_lists_of_another_length_are_refused() -> None:
    tables = _tables()
    short = [v[:-1] if i == 5 else v for i, v in enumerate(tables["advantage"]["advantages"].to_pylist())]
    with pytest.raises(UserError, match="advantages"):
        _batch({**tables, "advantage": with_column(tables["advantage"], "advantages", short)})


def test_tokens_newer_than_the_trainer_are_refused() -> None:
    table = rollout(LENGTHS, version=3)
    with pytest.raises(UserError, match="tokens of version 3, but version 2"):
        grpo_batch({"rollout": table, "advantage": advantage(table)}, 2)


def test_sft_is_transformers_own_cross_entropy(tiny: Path) -> None:
    settings = read_settings(sft_recipe(algorithm={"batch_size": 12, "steps": 1}))
    table = demonstrations(LENGTHS, 1)
    learned, gradient = _run(tiny, {"batch": table}, settings)
    backend = Recorder(settings)
    backend.load(tiny, 0)
    width = max(LENGTHS)
    rows = table.to_pylist()
    ids = torch.tensor([r["input_ids"] + [0] * (width - r["num_tokens"]) for r in rows])
    labels = torch.tensor(
        [
            [t if m else -100 for t, m in zip(r["input_ids"], r["loss_mask"], strict=True)]
            + [-100] * (width - r["num_tokens"])
            for r in rows
        ]
    )
    loss = backend.models["policy"].model(input_ids=ids, labels=labels).loss
    loss.backward()
    backend.step(0.0, wanted=False)
    assert learned.train_steps["loss"][0].as_py() == pytest.approx(loss.item(), abs=1e-6)
    torch.testing.assert_close(gradient, torch.stack(backend.gradients), atol=1e-6, rtol=1e-4)


def test_rates_and_steps_are_recorded(tiny: Path) -> None:
    settings = _settings(trainer={"lr_schedule": "linear", "lr_final": 0.0}, schedule={"iterations": 3})
    backend = LocalBackend(settings.trainer, settings.model)
    backend.load(tiny, 0)
    batch = _batch(_tables())
    learned = Learner(backend, settings, batch, make_plan(batch, settings, 1)).learn(1, Progress(step=2))
    rows = learned.train_steps.to_pylist()
    assert [r["lr"] for r in rows] == pytest.approx([1e-3 * 3 / 5, 1e-3 * 2 / 5])
    assert [(r["version"], r["step"], r["minibatch"]) for r in rows] == [(2, 3, 0), (2, 4, 1)]
    assert learned.progress == Progress(step=4)


def _poisoned(indices: list[int]) -> dict[str, pa.Table]:
    tables = _tables()
    values = [
        [float("inf")] * len(v) if i in indices else v
        for i, v in enumerate(tables["advantage"]["advantages"].to_pylist())
    ]
    return {**tables, "advantage": with_column(tables["advantage"], "advantages", values)}


def test_a_non_finite_step_is_skipped_recorded_and_counted(tiny: Path) -> None:
    settings = _settings()
    tables = _poisoned([0])
    batch = _batch(tables)
    plan = make_plan(batch, settings, 0)
    bad = int(plan.minibatch[0])
    backend = LocalBackend(settings.trainer, settings.model)
    backend.load(tiny, 0)
    learned = Learner(backend, settings, batch, plan).learn(0, Progress())
    rows = learned.train_steps.to_pylist()
    assert [r["skipped"] for r in rows] == [number == bad for number in range(2)]
    assert learned.metrics["skipped_steps"] == 1
    assert learned.metrics["optimizer_steps"] == 1
    assert all(map(torch.isfinite, torch.tensor(list(learned.metrics.values()))))
    assert learned.progress == Progress(step=2, skipped_in_row=1 if bad == 1 else 0)
    good = LocalBackend(settings.trainer, settings.model)
    good.load(tiny, 0)
    alone = Plan(torch.where(plan.minibatch == bad, LEFT_OUT, plan.minibatch), plan.micro_batch)
    Learner(good, settings, batch, alone).learn(0, Progress())
    assert torch.equal(weights_of(backend), weights_of(good))  # as if the bad minibatch had been empty


def test_skipped_steps_in_a_row_are_bounded_also_across_iterations(tiny: Path) -> None:
    settings = _settings(trainer={"max_skipped_steps": 2})
    batch = _batch(_poisoned(list(range(12))))
    backend = LocalBackend(settings.trainer, settings.model)
    backend.load(tiny, 0)
    before = weights_of(backend)
    learner = Learner(backend, settings, batch, make_plan(batch, settings, 0))
    learned = learner.learn(0, Progress())
    assert learned.progress == Progress(step=2, skipped_in_row=2)
    with pytest.raises(UserError, match="3 optimizer steps in a row"):
        learner.learn(1, learned.progress)
    assert torch.equal(weights_of(backend), before)


def test_a_minibatch_without_tokens_makes_no_step(tiny: Path) -> None:
    settings = _settings(algorithm={"minibatches": 4})
    batch = _batch(_tables(dropped=tuple(range(3, 12))))
    backend = LocalBackend(settings.trainer, settings.model)
    backend.load(tiny, 0)
    learned = Learner(backend, settings, batch, make_plan(batch, settings, 0)).learn(0, Progress())
    rows = learned.train_steps.to_pylist()
    assert sorted(r["samples"] for r in rows) == [0, 1, 1, 1]
    empty = next(r for r in rows if not r["samples"])
    assert (empty["tokens"], empty["loss"], empty["grad_norm"], empty["skipped"]) == (0, 0.0, 0.0, False)
    assert learned.metrics["optimizer_steps"] == 3
    assert learned.progress.step == 4


def test_a_recipe_that_trains_nothing_is_named() -> None:
    recipe = rlhf_recipe()
    with pytest.raises(UserError, match="evaluate"):
        read_settings({**recipe, "flow": "evaluate"})
    assert _settings(schedule={"iterations": 3}).total_steps == 6
