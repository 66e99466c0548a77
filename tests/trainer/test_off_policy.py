"""Training on samples of several versions: what the weights do, what is measured, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from trainer_builders import Recorder, World, advantage, rlhf_recipe, rollout, with_column

from areal_tasks.algorithms.behaviour import Bound, effective_sample_size
from areal_tasks.engines.trainer.checkpoint import Progress
from areal_tasks.engines.trainer.fencing import Declined
from areal_tasks.engines.trainer.learner import Learned, Learner
from areal_tasks.engines.trainer.metrics import over_ranks, step_statistics, totals
from areal_tasks.engines.trainer.objective import STATS, grpo_objective, stat_names
from areal_tasks.engines.trainer.plan import make_plan
from areal_tasks.engines.trainer.rows import LEAST_COMPARED, grpo_batch, make_table
from areal_tasks.engines.trainer.settings import Settings, read_settings
from schemas.errors import UserError

VERSION = 7
LENGTHS = [9, 4, 13, 6, 11, 3, 8, 5, 10, 7, 12, 5]
MANY = [16] * 24  # 336 generated tokens
AGES = ("lag_mean", "lag_max", "stale_kv")
WEIGHTS = ("effective_sample_size", "behaviour_clipped")
MASK = {"tis_bound": "mask", "tis_low": 0.9, "tis_high": 1.1}


def made(eta: int = 4, **algorithm: Any) -> Settings:
    chosen = {"minibatches": 1, "max_logprob_gap": 100.0, **algorithm}
    return read_settings(rlhf_recipe(rollout={"max_head_offpolicyness": eta}, algorithm=chosen))


def proximal(table: pa.Table, lists: list[list[float]]) -> pa.Table:
    return make_table("proximal", {"sample_id": table["sample_id"].combine_chunks(), "prox_logprobs": lists})


def tables(lengths: list[int] = LENGTHS, gap: float | None = None, lags: tuple[int, ...] = (0,)) -> dict[str, pa.Table]:
    """Samples with tokens of `lags` versions ago, in turn; with `gap`, proximal logprobs: alternately so far above and
    below those of the servers where tokens count, NaN elsewhere.
    """
    table = rollout(lengths, version=VERSION)
    masks = table["loss_mask"].to_pylist()
    versions = [[VERSION - lags[i % len(lags)] if m else -1 for i, m in enumerate(mask)] for mask in masks]
    table = with_column(table, "versions", versions)
    found = {"rollout": table, "advantage": advantage(table)}
    if gap is None:
        return found
    pairs = zip(table["logprobs"].to_pylist(), masks, strict=True)
    lists = [
        [x + gap * (-1) ** i if m else math.nan for i, (x, m) in enumerate(zip(*pair, strict=True))] for pair in pairs
    ]
    return found | {"proximal": proximal(table, lists)}


def learn(
    model: Path, given: dict[str, pa.Table], chosen: Settings, rank: int = 0, world: int = 1
) -> tuple[Learned, torch.Tensor]:
    """An iteration without steps, and the gradient of each minibatch."""
    backend = Recorder(chosen)
    backend.load(model, 0)
    backend.rank, backend.world = rank, world
    batch = grpo_batch(given, VERSION, chosen.max_lag)
    learned = Learner(backend, chosen, batch, make_plan(batch, chosen, 0)).learn(VERSION, Progress())
    return learned, torch.stack(backend.gradients)


def small(**changes: Any) -> Settings:
    """Settings whose micro-batches hold a few samples."""
    chosen = made(**changes)
    return replace(chosen, trainer=chosen.trainer.model_copy(update={"micro_batch_tokens": 24}))


# ── the objective ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("bound", [{}, MASK])
def test_equal_versions_on_identical_engines_give_plain_ppo_to_the_bit(
    tiny: Path, level: str, bound: dict[str, Any]
) -> None:
    """The proximal policy is the one that has sampled: every weight is 1."""
    given = tables(gap=0.0)
    decoupled, gradient = learn(tiny, given, made(minibatches=2, tis_level=level, **bound))
    plain = {name: table for name, table in given.items() if name != "proximal"}
    expected, wanted = learn(tiny, plain, made(minibatches=2, decoupled=False))
    synchronous, same = learn(tiny, plain, made(eta=0, minibatches=2))
    assert torch.equal(gradient, wanted) and torch.equal(gradient, same)
    for name in ("loss", "policy_loss", "ratio_mean", "clip_fraction", "grad_norm"):
        rows = [found.train_steps[name].to_pylist() for found in (decoupled, expected, synchronous)]
        assert rows[0] == rows[1] == rows[2]
    assert [decoupled.metrics[name] for name in WEIGHTS] == [1.0, 0.0]


def test_one_minibatch_whose_own_pass_repeats_the_server_is_plain_ppo_to_the_bit() -> None:
    logprobs, gain = torch.tensor([-1.5, -0.25, -3.0]), torch.tensor([1.0, -2.0, 0.5])
    found = []
    for chosen in (made(), made(decoupled=False)):
        columns = {"behaviour": logprobs, "advantages": gain, "comparable": torch.ones(3)}
        leaf = logprobs.clone().requires_grad_()
        rows = grpo_objective(columns, chosen)(leaf, torch.zeros(3), torch.arange(3))
        found.append((rows[: len(STATS)].detach(), *torch.autograd.grad(rows[0].sum(), leaf)))
        assert len(rows) == len(stat_names(columns, chosen))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def test_a_token_outside_the_band_has_no_gradient() -> None:
    """Weights 6, .4, 1.2 and 5 · 10⁸: only the third is within .5 and 5."""
    proximal = torch.tensor([6.0, 0.4, 1.2, 5e8]).log() - 25
    columns = {
        "behaviour": torch.full((4,), -25.0),
        "proximal": proximal,
        "advantages": torch.tensor([1.0, -1.0, 2.0, 1.0]),
        "comparable": torch.ones(4),
    }
    chosen = replace(made(), behaviour=Bound("mask", 5.0, 0.5))
    leaf = proximal.clone().requires_grad_()
    rows = grpo_objective(columns, chosen)(leaf, torch.zeros(4), torch.arange(4))
    (gradient,) = torch.autograd.grad(rows[0].sum(), leaf)
    assert gradient[[0, 1, 3]].tolist() == [0, 0, 0] and rows[0].detach()[[0, 1, 3]].tolist() == [0, 0, 0]
    torch.testing.assert_close(gradient[2], torch.tensor(-1.2 * 2))


def test_a_sample_whose_product_is_outside_the_band_has_no_gradient(tiny: Path) -> None:
    """The tokens of sample 0 have weights e^±.01, but one of e^2; the samples left out of training give the same."""
    given = tables(gap=0.01)
    lists = given["proximal"]["prox_logprobs"].to_pylist()
    lists[0][-1] = given["rollout"]["logprobs"].to_pylist()[0][-1] + 2.0
    given["proximal"] = proximal(given["rollout"], lists)
    chosen = made(minibatches=1, tis_level="sequence", **MASK)
    learned, gradient = learn(tiny, given, chosen)
    silent = [
        [0.0] * n if i == 0 else row
        for i, (n, row) in enumerate(zip(LENGTHS, given["advantage"]["advantages"].to_pylist(), strict=True))
    ]
    _, without = learn(tiny, given | {"advantage": with_column(given["advantage"], "advantages", silent)}, chosen)
    assert torch.equal(gradient, without) and gradient.any()
    counted = [n - 2 for n in LENGTHS]
    assert learned.metrics["behaviour_clipped"] == pytest.approx(counted[0] / sum(counted))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_nan_at_masked_positions_has_no_influence(tiny: Path, level: str) -> None:
    given, chosen = tables(gap=0.1), made(minibatches=2, tis_level=level)
    clean = [[0.0 if math.isnan(x) else x for x in row] for row in given["proximal"]["prox_logprobs"].to_pylist()]
    other = given | {"proximal": proximal(given["rollout"], clean)}
    (found, gradient), (wanted, expected) = learn(tiny, given, chosen), learn(tiny, other, chosen)
    assert torch.equal(gradient, expected) and gradient.isfinite().all()
    assert all(math.isfinite(value) for value in found.metrics.values())
    assert [found.metrics[name] for name in WEIGHTS] == [wanted.metrics[name] for name in WEIGHTS]


@pytest.mark.parametrize("algorithm", [{}, MASK, {"tis_cap": 1.05}])
def test_weights_of_sequences_do_not_depend_on_passes_chunks_layout_or_ranks(
    tiny: Path, algorithm: dict[str, Any]
) -> None:
    """The head sees 16 tokens at a time, which cuts samples in two."""
    given, chosen = tables(gap=0.2), made(tis_level="sequence", **algorithm)
    whole = replace(chosen, trainer=chosen.trainer.model_copy(update={"micro_batch_tokens": 10_000}))
    expected, gradient = learn(tiny, given, whole)
    for changes in ({"micro_batch_tokens": 24}, {"head_chunk_tokens": 16}, {"layout": "packed"}):
        settings = replace(whole, trainer=whole.trainer.model_copy(update=changes))
        found, other = learn(tiny, given, settings)
        torch.testing.assert_close(other, gradient, atol=1e-6, rtol=1e-4)
        for name in ("loss", *WEIGHTS):
            assert found.metrics[name] == pytest.approx(expected.metrics[name], abs=1e-6)
    shares = [
        learn(
            tiny, given, replace(chosen, trainer=chosen.trainer.model_copy(update={"micro_batch_tokens": 24})), rank, 2
        )[1]
        for rank in range(2)
    ]
    torch.testing.assert_close(shares[0] + shares[1], gradient, atol=1e-6, rtol=1e-4)


# ── what is measured ────────────────────────────────────────────────────────────────────────────────────────────────


def test_lag_and_stale_caches_are_those_of_the_tokens_trained_on(tiny: Path) -> None:
    given = tables(lags=(0, 1, 3))
    table = given["rollout"]
    stale = [[True] * len(mask) for mask in table["loss_mask"].to_pylist()]  # of the prompt too, which does not count
    stale[1] = [False] * len(stale[1])
    given = {"rollout": with_column(table, "stale_kv", stale), "advantage": advantage(table, dropped=(0, 1))}
    learned, _ = learn(tiny, given, small())
    ages = [(0, 1, 3)[i % 3] for n in LENGTHS[2:] for i in range(2, n)]
    assert [learned.metrics[name] for name in AGES] == [pytest.approx(sum(ages) / len(ages)), 3.0, 1.0]


def test_weights_are_measured_over_all_minibatches(tiny: Path) -> None:
    """e^±.2 in turn, of which the cap 1.1 changes the greater."""
    given = tables(gap=0.2)
    learned, _ = learn(tiny, given, small(minibatches=2, tis_cap=1.1))
    weights = [1.1 if i % 2 == 0 else math.exp(-0.2) for n in LENGTHS for i in range(2, n)]
    expected = effective_sample_size(sum(weights), sum(w * w for w in weights), len(weights))
    assert learned.metrics["effective_sample_size"] == pytest.approx(expected, rel=1e-5)
    assert learned.metrics["behaviour_clipped"] == pytest.approx(sum(w > 1 for w in weights) / len(weights))


def test_a_synchronous_run_reports_and_computes_nothing_more(tiny: Path) -> None:
    sync = made(eta=0)
    assert sync.max_lag is None
    learned, _ = learn(tiny, tables(), sync)
    assert not learned.metrics.keys() & {*AGES, *WEIGHTS}
    plain, _ = learn(tiny, tables(), made(decoupled=False))
    assert plain.metrics.keys() - learned.metrics.keys() == set(AGES), "and plain PPO has no behaviour weights"


@pytest.mark.parametrize("gap", [None, 0.0])
def test_engines_are_compared_at_tokens_of_the_trainers_version_alone(tiny: Path, gap: float | None) -> None:
    """Of 336 tokens 288 are comparable; the others are 5 nats off, older, or sampled over a stale cache."""
    given = tables(MANY, gap)
    table = given["rollout"]
    wrong = {name: table[name].to_pylist() for name in ("logprobs", "versions", "stale_kv")}
    for row in range(len(MANY)):
        for place in (5, 9):
            wrong["logprobs"][row][place] -= 5.0
        wrong["versions"][row][5] -= 1
        wrong["stale_kv"][row][9] = True
    for name, values in wrong.items():
        table = with_column(table, name, values)
    chosen = small(minibatches=1 if gap is None else 2)
    honest, _ = learn(tiny, tables(MANY, gap), chosen)
    found, _ = learn(tiny, given | {"rollout": table}, chosen)
    assert 0 <= found.metrics["logprob_gap_max"] < 4 and found.metrics["ratio_outside"] <= 1
    assert found.metrics["logprob_gap_mean"] == pytest.approx(honest.metrics["logprob_gap_mean"], rel=0.1, abs=1e-9)
    assert max(found.train_samples["sample_logprob_gap"].to_pylist()) < 4
    if gap is not None:
        assert found.metrics["logprob_gap_max"] == found.metrics["ratio_outside"] == 0.0
        learn(tiny, given | {"rollout": table}, replace(chosen, max_logprob_gap=0.1))  # is not refused


@pytest.mark.parametrize(("gap", "enough"), [(None, True), (0.3, True), (None, False), (0.3, False)])
def test_with_too_few_comparable_tokens_their_distance_is_unknown(tiny: Path, gap: float | None, enough: bool) -> None:
    given = tables(MANY, gap)
    versions, comparable = given["rollout"]["versions"].to_pylist(), LEAST_COMPARED - (not enough)
    for number in range(comparable, 14 * len(MANY)):
        versions[number // 14][2 + number % 14] -= 1
    given["rollout"] = with_column(given["rollout"], "versions", versions)
    chosen = small(max_logprob_gap=0.01, minibatches=1 if gap is None else 2)
    if enough:
        with pytest.raises(Declined, match=f"over {LEAST_COMPARED} tokens"):
            learn(tiny, given, chosen)
        return
    learned, _ = learn(tiny, given, chosen)
    assert not learned.metrics.keys() & {"logprob_gap_mean", "logprob_gap_max", "ratio_outside"}
    assert all(math.isnan(x) for x in learned.train_steps["logprob_gap_mean"].to_pylist())
    assert all(math.isnan(x) for x in learned.train_samples["sample_logprob_gap"].to_pylist())


# ── the bound ───────────────────────────────────────────────────────────────────────────────────────────────────────


def aged(world: World, lag: int, **changes: Any) -> pa.Table:
    """A rollout for version 7 of which one token of sample 1-2 is `lag` versions old; the recipe's η is 2."""
    section = {"groups": 4, "group_size": 3, "temperature": 0.8, "max_new_tokens": 8, "max_head_offpolicyness": 2}
    world.recipe = rlhf_recipe(rollout=section | changes)
    table = rollout(LENGTHS, version=VERSION)
    versions = table["versions"].to_pylist()
    versions[5][2] = VERSION - lag
    return with_column(table, "versions", versions)


def train(world: World, table: pa.Table) -> Any:
    trainer = world.trainer()
    trainer.fence.restart(VERSION)
    try:
        return trainer.train(world.train_command(VERSION, {"rollout": table, "advantage": advantage(table)}))
    finally:
        assert trainer.fence.version in (VERSION, VERSION + 1)


def test_a_token_older_than_the_bound_is_refused_by_name(world: World) -> None:
    assert train(world, aged(world, 2)).metrics["lag_max"] == 2
    message = r"sample 1-2 has a token of version 4, 3 versions older than version 7, .*\(η\) allows 2\. No step was"
    with pytest.raises(UserError, match=message):
        train(world, aged(world, 3))


def test_under_admission_nothing_is_too_old(world: World) -> None:
    assert train(world, aged(world, 6, bound="admission")).metrics["lag_max"] == 6


def test_the_recipe_of_the_command_decides(world: World) -> None:
    """A later recipe allows what the one that the trainer was started with does not."""
    table = aged(world, 3)
    trainer = world.trainer()
    trainer.fence.restart(VERSION)
    command = world.train_command(VERSION, {"rollout": table, "advantage": advantage(table)})
    wider = rlhf_recipe(rollout={**world.recipe["rollout"], "max_head_offpolicyness": 3})
    with pytest.raises(UserError, match="allows 2"):
        trainer.train(command)
    assert trainer.train(command.model_copy(update={"recipe": wider})).metrics["lag_max"] == 3


def test_a_token_of_the_future_is_refused_whatever_the_bound(world: World) -> None:
    table = aged(world, 0, bound="admission")
    newer = with_column(table, "version_max", [VERSION + 1] * len(LENGTHS))
    with pytest.raises(UserError, match="tokens of version 8, but version 7 trains on it"):
        train(world, newer)


def test_what_ranks_measure_is_what_one_measures() -> None:
    """Of 14 rows, on three ranks of which one has no token."""
    generator = torch.Generator().manual_seed(3)
    values, shares = torch.rand(14, 9, generator=generator), torch.rand(9, generator=generator)
    values[10] = torch.tensor([1.0, 0, 1, 1, 0, 1, 0, 1, 1])
    parts = [totals(values[:, a:b], shares[a:b]).flatten() for a, b in ((0, 4), (4, 4), (4, 9))]
    found = step_statistics(over_ranks(torch.stack(parts, 1)), 9, measured=True)
    assert found == pytest.approx(step_statistics(totals(values, shares), 9, measured=True))
    assert found["compared"] == 6
    assert found["logprob_gap_mean"] == pytest.approx(float(values[STATS.index("logprob_gap")].sum()) / 6)
