"""The decoupled objective and the agreement of the engines: closed forms, laws, and when training is declined."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_builders import World, advantage, rlhf_recipe, rollout, weights_of, with_column

from areal_tasks.algorithms.behaviour import Bound
from areal_tasks.algorithms.log_ratios import k3
from areal_tasks.algorithms.losses import policy_terms
from areal_tasks.engines.trainer.checkpoint import Progress
from areal_tasks.engines.trainer.commands import Load, Logprobs
from areal_tasks.engines.trainer.fencing import Declined, Fence
from areal_tasks.engines.trainer.learner import Learned, Learner
from areal_tasks.engines.trainer.local import LocalBackend
from areal_tasks.engines.trainer.metrics import summary
from areal_tasks.engines.trainer.objective import (
    STATS,
    agreement,
    agreement_totals,
    check_agreement,
    differences,
    grpo_objective,
)
from areal_tasks.engines.trainer.plan import make_plan
from areal_tasks.engines.trainer.rows import grpo_batch
from areal_tasks.engines.trainer.service import Trainer
from areal_tasks.engines.trainer.settings import Settings, read_settings
from areal_tasks.store.shards import read_table
from schemas.errors import UserError

ROW = {name: k for k, name in enumerate(STATS)}
LENGTHS = [9, 4, 13, 6, 11, 3, 8, 5, 10, 7, 12, 5]
ROUNDS = {"deterministic": False}
NATS = st.floats(-12, 0, width=32)
TOKENS = st.lists(st.tuples(NATS, NATS, st.floats(-4, 4, width=32)), min_size=1, max_size=8)


def made(**changes: Any) -> Settings:
    return read_settings(rlhf_recipe(**changes))


def stats(
    columns: dict[str, list[float]], logprobs: list[float], chosen: Settings
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The objective's rows by name, and the gradient of the summed loss."""
    leaf = torch.tensor(logprobs, requires_grad=True)
    tensors = {name: torch.tensor(values) for name, values in columns.items()}
    rows = grpo_objective(tensors, chosen)(leaf, torch.zeros(len(logprobs)), torch.arange(len(logprobs)))
    (gradient,) = torch.autograd.grad(rows[0].sum(), leaf)
    return {name: rows[k].detach() for name, k in ROW.items()}, gradient


def test_three_tokens_by_hand() -> None:
    """π/π_prox is 1.5 (clipped), 0.9 and 1; π_prox/π_behav is 1.25, 0.5 and 4, which the cap makes 2."""
    chosen = replace(made(), clip_ratio=0.2, behaviour=Bound("cap", 2.0))
    columns = {
        "behaviour": [math.log(0.4), math.log(0.8), math.log(0.1)],
        "proximal": [math.log(0.5), math.log(0.4), math.log(0.4)],
        "advantages": [2.0, 1.0, -3.0],
    }
    found, gradient = stats(columns, [math.log(0.75), math.log(0.36), math.log(0.4)], chosen)
    torch.testing.assert_close(found["policy_loss"], torch.tensor([-1.25 * 2.4, -0.5 * 0.9, 2 * 3.0]))
    torch.testing.assert_close(gradient, torch.tensor([0.0, -0.5 * 0.9, 2 * 3.0]))
    torch.testing.assert_close(found["ratio"], torch.tensor([1.5, 0.9, 1.0]))
    assert found["clip_fraction"].tolist() == [1, 0, 0]
    torch.testing.assert_close(found["logprob_gap"], torch.tensor([1.25, 2.0, 4.0]).log())
    assert found["ratio_outside"].tolist() == [1, 1, 1]
    drift = torch.tensor([0.75 / 0.4, 0.36 / 0.8, 4.0])
    torch.testing.assert_close(found["approx_kl"], drift - 1 - drift.log())


@given(TOKENS, st.booleans())
@settings(deadline=None, max_examples=40)
def test_equal_policies_give_plain_ppo_to_the_bit(tokens: list[tuple[float, float, float]], listed: bool) -> None:
    logprobs, behaviour, advantages = (list(column) for column in zip(*tokens, strict=True))
    columns = {"behaviour": behaviour, "advantages": advantages, **({"proximal": behaviour} if listed else {})}
    chosen = made()
    found, gradient = stats(columns, logprobs, chosen)
    leaf = torch.tensor(logprobs, requires_grad=True)
    plain = policy_terms(leaf, torch.tensor(behaviour), torch.tensor(advantages), chosen.clip_ratio)
    (expected,) = torch.autograd.grad(plain.loss.sum(), leaf)
    assert torch.equal(found["loss"], plain.loss.detach()) and torch.equal(gradient, expected)
    assert torch.equal(found["ratio"], plain.ratio)
    assert torch.equal(found["approx_kl"], k3(torch.tensor(behaviour), leaf.detach()))


@given(TOKENS, st.floats(1, 8))
@settings(deadline=None, max_examples=40)
def test_the_first_pass_of_one_minibatch_is_the_weighted_policy_gradient(
    tokens: list[tuple[float, float, float]], cap: float
) -> None:
    """Its own forward pass is the proximal policy: every ratio is 1, and the gradient is -w · A, of w none."""
    logprobs, behaviour, advantages = (list(column) for column in zip(*tokens, strict=True))
    chosen = replace(made(), own_proximal=True, behaviour=Bound("cap", cap))
    found, gradient = stats({"behaviour": behaviour, "advantages": advantages}, logprobs, chosen)
    weight = (torch.tensor(logprobs) - torch.tensor(behaviour)).exp().clamp(max=cap)
    assert found["ratio"].eq(1).all() and not found["clip_fraction"].any()
    torch.testing.assert_close(gradient, -weight * torch.tensor(advantages))


def test_the_mask_of_the_behaviour_weights_is_of_the_policy_gradient_alone() -> None:
    """The first token is masked: what is left of its gradient is that of the KL term, 1 - π_reference / π."""
    columns = {"behaviour": [-9.0, -1.0], "proximal": [-1.0, -1.0], "reference": [-2.0, -2.0], "advantages": [2.0, 2.0]}
    chosen = replace(made(algorithm={"kl": "loss", "kl_coef": 0.5}), behaviour=Bound("mask", 5.0, 0.5))
    found, gradient = stats(columns, [-1.0, -1.0], chosen)
    assert found["policy_loss"].tolist() == [0.0, -2.0]
    kl = 0.5 * (1 - math.exp(-1.0))
    torch.testing.assert_close(gradient, torch.tensor([kl, -2.0 + kl]))


def test_tokens_with_a_log_ratio_above_the_bound_are_counted_once_each() -> None:
    """The policy above the proximal one, that above the behaviour policy, the reference above the policy; below is
    no matter."""
    columns = {
        "behaviour": [-1.0, -90.0, -1.0, -1.0, -1.0],
        "proximal": [-90.0, -1.0, -1.0, -1.0, -1.0],
        "reference": [-1.0, -1.0, -1.0, -1.0, -90.0],
        "advantages": [2.0, 2.0, 2.0, 2.0, 2.0],
    }
    logprobs = [-1.0, -1.0, -90.0, -1.0, -1.0]
    chosen = replace(made(algorithm={"kl": "loss", "kl_coef": 0.5}), behaviour=Bound("cap", 2.0))
    assert chosen.log_ratio_limit == 20.0
    found, gradient = stats(columns, logprobs, chosen)
    assert found["clamped"].tolist() == [1, 1, 1, 0, 0]
    assert all(row.isfinite().all() for row in found.values())
    torch.testing.assert_close(gradient, torch.tensor([0.0, -2.0 * 2.0, 0.0, -2.0, -2.0 + 0.5]))
    found, gradient = stats(columns, logprobs, replace(chosen, log_ratio_limit=math.inf))
    assert not found["clamped"].any() and gradient[0].isnan(), "what runs computed that were recorded before"


def test_what_the_recipe_says_reaches_the_objective() -> None:
    assert made(algorithm={"max_log_ratio": 0.0}).log_ratio_limit == math.inf
    assert not made().own_proximal and not made(algorithm={"minibatches": 1}).own_proximal
    one = made(algorithm={"minibatches": 1, "tis_cap": 3.0}, inference=ROUNDS)
    assert one.own_proximal and one.behaviour == Bound("cap", 3.0)
    assert not made(inference=ROUNDS).own_proximal


# ── whole iterations ────────────────────────────────────────────────────────────────────────────────────────────────


def tables(dropped: tuple[int, ...] = (), gap: float = 0.05) -> dict[str, pa.Table]:
    """A rollout and a proximal table `gap` above it where tokens count, NaN elsewhere."""
    table = rollout(LENGTHS)
    pairs = zip(table["logprobs"].to_pylist(), table["loss_mask"].to_pylist(), strict=True)
    lists = [[x + gap if m else math.nan for x, m in zip(*pair, strict=True)] for pair in pairs]
    proximal = pa.table({"sample_id": table["sample_id"], "prox_logprobs": lists})
    return {"rollout": table, "advantage": advantage(table, dropped=dropped), "proximal": proximal}


def learn(tiny: Path, given: dict[str, pa.Table], chosen: Settings) -> tuple[Learned, torch.Tensor]:
    """An iteration, and the weights after it."""
    backend = LocalBackend(chosen.trainer, chosen.model)
    backend.load(tiny, 0)
    batch = grpo_batch(given, 0)
    learned = Learner(backend, chosen, batch, make_plan(batch, chosen, 0)).learn(0, Progress())
    return learned, weights_of(backend)


def test_a_table_is_compared_in_every_minibatch_and_masked_nan_never_matters(tiny: Path) -> None:
    chosen = made(inference=ROUNDS)
    learned, moved = learn(tiny, tables(), chosen)
    for row in learned.train_steps.to_pylist():
        assert row["logprob_gap_mean"] == pytest.approx(0.05, rel=1e-4)
        assert row["logprob_gap_max"] == pytest.approx(0.05, rel=1e-4)
        assert row["ratio_outside"] == 0.0
    assert learned.train_samples["sample_logprob_gap"].to_pylist() == pytest.approx([0.05] * 12, rel=1e-4)
    assert learned.metrics["logprob_gap_mean"] == pytest.approx(0.05, rel=1e-4)
    assert torch.isfinite(moved).all()


def test_one_far_token_that_the_clip_cuts_off_spoils_no_step(tiny: Path) -> None:
    """Without the bound its gradient is NaN, and with it the step's, which is then skipped."""
    lists = tables()["rollout"]["logprobs"].to_pylist()
    lists[0][-1] = -100.0
    far = with_column(tables()["rollout"], "logprobs", lists)
    given = {"rollout": far, "advantage": advantage(far)}
    for limit, skipped in ((20.0, False), (0.0, True)):
        algorithm = {"max_log_ratio": limit, "max_logprob_gap": 100.0}
        learned, moved = learn(tiny, given, made(algorithm=algorithm))
        assert any(learned.train_steps["skipped"].to_pylist()) == skipped
        assert learned.metrics["clamped"] == sum(learned.train_steps["clamped"].to_pylist()) == (not skipped)
        assert moved.isfinite().all()


def test_rows_of_the_proximal_table_are_joined_by_sample(tiny: Path) -> None:
    chosen, given = made(inference=ROUNDS), tables()
    shuffled = {**given, "proximal": given["proximal"].take([*range(11, -1, -1)])}
    assert torch.equal(learn(tiny, given, chosen)[1], learn(tiny, shuffled, chosen)[1])


def test_a_wider_gap_is_counted_and_moves_the_weights_elsewhere(tiny: Path) -> None:
    chosen = made(inference=ROUNDS)
    near, far = learn(tiny, tables(), chosen), learn(tiny, tables(gap=-0.2), chosen)
    assert far[0].metrics["ratio_outside"] == 1.0
    assert far[0].metrics["logprob_gap_mean"] == pytest.approx(0.2, rel=1e-4)
    assert not torch.equal(near[1], far[1])


def test_without_a_table_only_the_first_minibatch_is_compared(tiny: Path) -> None:
    given = {name: table for name, table in tables().items() if name != "proximal"}
    learned, _ = learn(tiny, given, made())
    first, second = learned.train_steps.to_pylist()
    assert first["logprob_gap_max"] > first["logprob_gap_mean"] > 0
    assert math.isnan(second["logprob_gap_mean"]) and math.isnan(second["ratio_outside"])
    assert learned.metrics["logprob_gap_mean"] == first["logprob_gap_mean"]
    known = [(r["minibatch"] == 0) for r in learned.train_samples.to_pylist()]
    assert [not math.isnan(x) for x in learned.train_samples["sample_logprob_gap"].to_pylist()] == known


def test_the_summary_weighs_by_tokens_and_leaves_out_what_nobody_measured() -> None:
    keys = ("loss", "policy_loss", "kl", "approx_kl", "entropy", "clip_fraction", "ratio_mean", "ratio_max")
    others = dict.fromkeys((*keys, "clamped", "grad_norm", "lr", "total_tokens", "samples", "step_seconds"), 0.0)

    def row(tokens: int, mean: float, peak: float) -> dict[str, Any]:
        found = {"logprob_gap_mean": mean, "logprob_gap_max": peak, "ratio_outside": mean}
        return {**others, **found, "tokens": tokens, "compared": tokens, "skipped": False}

    found = summary([row(10, 0.1, 0.5), row(30, 0.3, 0.4), row(7, math.nan, math.nan)])
    assert found["logprob_gap_mean"] == found["ratio_outside"] == pytest.approx(0.25)
    assert found["logprob_gap_max"] == 0.5
    assert "logprob_gap_mean" not in summary([row(7, math.nan, math.nan)])


# ── the threshold ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_error_says_what_was_measured_and_what_to_do() -> None:
    pair = torch.tensor([-1.0, -1.0]), torch.tensor([-1.3, -1.02])
    found = agreement(*agreement_totals(differences(*pair)))
    assert found["ratio_outside"] == 0.5
    check_agreement(found, 0.17, 2)
    with pytest.raises(Declined) as caught:
        check_agreement(found, 0.1, 2)
    said = ("2 tokens", "0.16 nats on average", "0.3 at most", "50.0%", "max_logprob_gap allows 0.1", "temperature")
    assert all(words in str(caught.value) for words in (*said, "other weights", "dtype", "chat template", "BOS"))


@given(st.sampled_from(["proximal", "behaviour"]))
def test_a_gap_that_is_not_a_number_is_left_to_the_loss(which: str) -> None:
    pair = {"proximal": torch.zeros(2), "behaviour": torch.zeros(2), which: torch.tensor([0.0, math.nan])}
    found = agreement(*agreement_totals(differences(**pair)))
    assert all(math.isnan(value) for value in found.values())
    check_agreement(found, 0.1, 2)


def test_a_declined_change_leaves_the_fence_as_it_was() -> None:
    fence: Fence[str] = Fence()
    fence.restart(3)
    fence.change(3, "first", lambda: "made")

    def decline() -> str:
        raise Declined("no")

    with pytest.raises(Declined):
        fence.change(4, "second", decline)
    assert fence.version == 4 and fence.recall(3, "first") == "made"


CASES = [
    ({"algorithm": {"max_logprob_gap": 0.1}}, False),
    ({"algorithm": {"max_logprob_gap": 0.1, "minibatches": 1}, "inference": ROUNDS}, False),
    ({"algorithm": {"max_logprob_gap": 0.1}, "inference": ROUNDS}, True),
]


@pytest.mark.parametrize(("changes", "listed"), CASES, ids=["first minibatch", "only minibatch", "table"])
def test_a_shifted_rollout_is_declined_each_time_and_an_honest_one_trained_on(
    world: World, changes: dict[str, Any], listed: bool
) -> None:
    world.recipe = rlhf_recipe(**changes)
    trainer = world.trainer()
    table = rollout(LENGTHS)
    own = scored(world, trainer, table)
    honest = with_column(table, "logprobs", own["prox_logprobs"].to_pylist())
    pairs = zip(own["prox_logprobs"].to_pylist(), table["loss_mask"].to_pylist(), strict=True)
    shifted = with_column(table, "logprobs", [[x - 0.3 * m for x, m in zip(*pair, strict=True)] for pair in pairs])
    more = {"proximal": own} if listed else {}
    before = weights_of(trainer.backend)
    bad = world.train_command(0, {"rollout": shifted, "advantage": advantage(table), **more})
    for _ in range(2):
        with pytest.raises(UserError, match=r"differ by 0\.3 nats on average"):
            trainer.train(bad)
        assert trainer.health(False).version == 0 and trainer.health(False).step == 0
    assert torch.equal(weights_of(trainer.backend), before)
    good = world.train_command(0, {"rollout": honest, "advantage": advantage(table), **more})
    answer = trainer.train(good)
    assert answer.version == 1 and answer.metrics["logprob_gap_mean"] < 1e-5
    other = world.trainer(owner=2)
    other.train(good.model_copy(update={"owner": 2, "prefix": world.prefix()}))
    assert torch.equal(weights_of(trainer.backend), weights_of(other.backend))  # the declined one left no gradient


def test_a_replay_is_not_judged_again(world: World) -> None:
    world.recipe = rlhf_recipe()
    table = rollout(LENGTHS)
    command = world.train_command(0, {"rollout": table, "advantage": advantage(table)})
    answer = world.trainer().train(command)
    world.recipe = rlhf_recipe(algorithm={"max_logprob_gap": 1e-6})
    later = Trainer(world.spec(owner=2))
    later.load(Load(owner=2, version=0, weights=world.initial))
    with pytest.raises(UserError, match="disagree"):
        later.train(command.model_copy(update={"owner": 2, "prefix": world.prefix()}))
    replay = command.model_copy(update={"owner": 2, "plan": answer.tables["train_samples"], "prefix": None})
    assert later.train(replay).metrics["loss"] == answer.metrics["loss"]


def scored(world: World, trainer: Trainer, table: pa.Table) -> pa.Table:
    """The trainer's own logprobs of the rollout's tokens."""
    ref = world.write("rollout", table)
    body = {"owner": 1, "version": 0, "which": "policy", "table": ref, "prefix": world.prefix()}
    return read_table(world.store, trainer.logprobs(Logprobs.model_validate(body)).tables["proximal"])
