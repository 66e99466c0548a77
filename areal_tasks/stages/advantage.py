"""advantage: GRPO's advantages of every generated token, from rewards relative to their group."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import torch

from areal_tasks.algorithms.advantages import grpo_advantages, kl_penalty
from areal_tasks.data.ragged import Flat, flat, lengths, ragged, scatter
from areal_tasks.engines.trainer.forward import one_thread
from areal_tasks.stages.stage import Context, Inputs, Kind, Output, Stage, columns, tables_of
from schemas.recipe.derived import same_policy
from schemas.recipe.recipe import RlhfRecipe
from schemas.recipe.sections import Reward
from schemas.recipe.training import Grpo
from schemas.tables import ADVANTAGE


def advantage(recipe: RlhfRecipe) -> Stage:
    """Per token `advantages` and `returns`; per sample the shaped reward and whether it is trained on.

    KL in the reward uses the trainer's logprobs of the policy that the iteration begins with, as for the reference. The
    servers' logprobs replace them only if both run the same code with the same weights: otherwise differences in
    rounding, or older weights, would be penalised.
    """
    penalty: tuple[str, ...] = ()
    if recipe.algorithm.kl == "reward":
        policy = ("rollout", "logprobs") if same_policy(recipe) else ("proximal", "sample_id", "prox_logprobs")
        penalty = columns(*policy) + columns("reference", "sample_id", "ref_logprobs")
    return Stage(
        name="advantage",
        kind=Kind.PURE,
        version=1,
        run=run,
        reads=(
            *columns("rollout", "sample_id", "group_id", "loss_mask", "num_generated"),
            *penalty,
            *columns("verify", "sample_id", "reward", "verdict"),
        ),
        writes=("advantage",),
        fields=(
            "algorithm.reward_norm",
            "algorithm.advantage_norm",
            "algorithm.std_unbiased",
            "reward.on_unverified",
            *(("algorithm.kl", "algorithm.kl_coef") if penalty else ()),
        ),
    )


def run(context: Context, inputs: Inputs, prefix: str) -> Output:
    """Computes the table `advantage`; metric `kept`: the share of samples that are trained on."""
    recipe = context.recipe
    assert isinstance(recipe, RlhfRecipe)
    read = {table: inputs.read(context, table) for table in tables_of(inputs.reads)}
    for table in read.values():
        if not table["sample_id"].equals(read["rollout"]["sample_id"]):
            raise ValueError("the input tables do not hold the same samples in the same order")
    with one_thread():
        table = advantage_table(read, recipe.algorithm, recipe.reward)
    return Output({"advantage": table}, {"kept": float(np.mean(table["kept"].to_numpy()))})


def advantage_table(read: Mapping[str, pa.Table], algorithm: Grpo, reward: Reward) -> pa.Table:
    """The rows of `ADVANTAGE` for samples given in the same order in every table.

    Args:
        read: `rollout` and `verify`; with KL in the reward `reference` too, and `proximal` unless the rollout's
            logprobs are the policy's own.
    """
    rollout, verdicts = read["rollout"], read["verify"]
    mask, sizes = flat(rollout["loss_mask"]), lengths(rollout["loss_mask"])
    reasons = dropped_reasons(rollout, verdicts, reward)
    kept = np.asarray([reason == "" for reason in reasons])
    result = grpo_advantages(
        torch.tensor(verdicts["reward"].to_numpy()),
        torch.tensor(rollout["group_id"].to_numpy()),
        torch.from_numpy(rollout["num_generated"].to_numpy().astype(np.int64)),
        torch.from_numpy(kept),
        algorithm.reward_norm,
        algorithm.advantage_norm,
        _penalty(read, mask, algorithm.kl_coef) if algorithm.kl == "reward" else None,
        algorithm.std_unbiased,
    )
    return pa.table(
        {
            "sample_id": rollout["sample_id"],
            "advantages": ragged(scatter(result.advantages.numpy(), mask), sizes, ADVANTAGE.field("advantages").type),
            "returns": ragged(scatter(result.returns.numpy(), mask), sizes, ADVANTAGE.field("returns").type),
            "shaped_reward": pa.array(result.shaped_reward.numpy(), pa.float32()),
            "kept": pa.array(kept),
            "dropped_reason": pa.array(reasons, pa.string()),
        },
        schema=ADVANTAGE,
    )


def _penalty(read: Mapping[str, pa.Table], mask: Flat, kl_coef: float) -> torch.Tensor:
    policy = read["proximal"]["prox_logprobs"] if "proximal" in read else read["rollout"]["logprobs"]
    logprobs, base = flat(policy)[mask], flat(read["reference"]["ref_logprobs"])[mask]
    return kl_penalty(torch.from_numpy(logprobs), torch.from_numpy(base), kl_coef)


def dropped_reasons(rollout: pa.Table, verdicts: pa.Table, reward: Reward) -> list[str]:
    """Why each sample is not trained on: its verdict if that gave no reward (NaN); "" if it is trained on.

    `drop_group` also drops all other samples of their groups (`group`).
    """
    failed = np.isnan(verdicts["reward"].to_numpy())
    reasons = np.where(failed, verdicts["verdict"].to_pylist(), "")
    if reward.on_unverified == "drop_group":
        groups = rollout["group_id"].to_numpy()
        reasons = np.where(np.isin(groups, groups[failed]) & ~failed, "group", reasons)
    return [str(reason) for reason in reasons]
