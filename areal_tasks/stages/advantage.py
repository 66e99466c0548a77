"""advantage: GRPO's advantages of every generated token, from rewards relative to their group."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch

from areal_tasks.algorithms.advantages import Advantages, grpo_advantages, kl_penalty
from areal_tasks.data.ragged import Flat, flat, lengths, ragged, spread
from areal_tasks.data.threads import one_thread
from areal_tasks.stages.context import Context
from areal_tasks.stages.stage import Inputs, Kind, Output, Stage, columns
from schemas.recipe.recipe import RlhfRecipe
from schemas.recipe.sections import Grpo, Reward
from schemas.tables import ADVANTAGE


def advantage(recipe: RlhfRecipe) -> Stage:
    """Per token `advantages` and `returns`; per sample what became of its reward and whether it is trained on."""
    in_reward = recipe.algorithm.kl == "reward"
    return Stage(
        name="advantage",
        kind=Kind.PURE,
        version=1,
        run=run,
        reads=(
            *columns("rollout", "sample_id", "group_id", "loss_mask", "num_generated"),
            *(columns("rollout", "logprobs") + columns("reference", "sample_id", "ref_logprobs") if in_reward else ()),
            *columns("verify", "sample_id", "reward", "verdict"),
        ),
        writes=("advantage",),
        fields=(
            "algorithm.reward_norm",
            "algorithm.advantage_norm",
            "reward.on_unverified",
            *(("algorithm.kl", "algorithm.kl_coef") if in_reward else ()),
        ),
    )


def run(context: Context, inputs: Inputs, prefix: str) -> Output:
    recipe = context.recipe
    assert isinstance(recipe, RlhfRecipe)
    rollout, verdicts = inputs.read(context, "rollout"), inputs.read(context, "verify")
    reference = inputs.read(context, "reference") if recipe.algorithm.kl == "reward" else None
    for other in (verdicts, reference):
        if other is not None and not rollout["sample_id"].equals(other["sample_id"]):
            raise ValueError("the input tables do not hold the same samples in the same order")
    with one_thread():
        table = advantage_table(rollout, verdicts, reference, recipe.algorithm, recipe.reward)
    return Output({"advantage": table}, {"kept": float(np.mean(table["kept"].to_numpy()))})


def advantage_table(
    rollout: pa.Table, verdicts: pa.Table, reference: pa.Table | None, algorithm: Grpo, reward: Reward
) -> pa.Table:
    """The rows of `ADVANTAGE` for samples given in the same order in every table."""
    mask, sizes = flat(rollout["loss_mask"]), lengths(rollout["loss_mask"])
    reasons = dropped_reasons(rollout, verdicts, reward)
    kept = np.asarray([reason == "" for reason in reasons])
    penalty = None if reference is None else _penalty(rollout, reference, mask, algorithm.kl_coef)
    result = _advantages(rollout, verdicts, kept, penalty, algorithm)
    return pa.table(
        {
            "sample_id": rollout["sample_id"],
            "advantages": ragged(spread(result.advantages.numpy(), mask), sizes, ADVANTAGE.field("advantages").type),
            "returns": ragged(spread(result.returns.numpy(), mask), sizes, ADVANTAGE.field("returns").type),
            "shaped_reward": pa.array(result.shaped_reward.numpy(), pa.float32()),
            "kept": pa.array(kept),
            "dropped_reason": pa.array(reasons, pa.string()),
        },
        schema=ADVANTAGE,
    )


def _advantages(
    rollout: pa.Table, verdicts: pa.Table, kept: Flat, penalty: torch.Tensor | None, how: Grpo
) -> Advantages:
    return grpo_advantages(
        torch.tensor(verdicts["reward"].to_numpy()),
        torch.tensor(rollout["group_id"].to_numpy()),
        torch.from_numpy(rollout["num_generated"].to_numpy().astype(np.int64)),
        torch.from_numpy(kept),
        how.reward_norm,
        how.advantage_norm,
        penalty,
    )


def _penalty(rollout: pa.Table, reference: pa.Table, mask: Flat, kl_coef: float) -> torch.Tensor:
    behaviour, base = flat(rollout["logprobs"])[mask], flat(reference["ref_logprobs"])[mask]
    return kl_penalty(torch.from_numpy(behaviour), torch.from_numpy(base), kl_coef)


def dropped_reasons(rollout: pa.Table, verdicts: pa.Table, reward: Reward) -> list[str]:
    """Why a sample is not trained on: its verdict, where that gave it no reward (NaN), or "" where it is trained on.

    `drop_group` also drops the groups of such samples.
    """
    failed = np.isnan(verdicts["reward"].to_numpy())
    kinds = verdicts["verdict"].to_pylist()
    reasons = [kinds[i] if failed[i] else "" for i in range(len(kinds))]
    if reward.on_unverified == "drop_group":
        groups = rollout["group_id"].to_numpy()
        beside = np.isin(groups, groups[failed]) & ~failed
        reasons = ["group" if beside[i] else reasons[i] for i in range(len(reasons))]
    return reasons
