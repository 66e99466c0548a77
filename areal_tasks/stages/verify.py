"""verify: judges every completion in processes that can be killed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pyarrow as pa

from areal_tasks.rewards.load import verifier_version
from areal_tasks.rewards.pool import VerifierPool, VerifyResult, unverified
from areal_tasks.rewards.protocol import Row
from areal_tasks.stages.context import Context
from areal_tasks.stages.progress import reported
from areal_tasks.stages.stage import Inputs, Kind, Output, Stage, columns
from schemas.errors import UserError
from schemas.recipe.recipe import RlhfRecipe
from schemas.recipe.sections import Reward
from schemas.tables import VERDICTS, VERIFY


def verify(recipe: RlhfRecipe) -> Stage:
    """One row per sample: reward, verdict, and what was found in the text."""
    return Stage(
        name="verify",
        kind=Kind.PURE,
        version=verifier_version(recipe.reward.verifier),
        run=run,
        reads=columns("rollout", "sample_id", *Row._fields),
        writes=("verify",),
        fields=("reward",),
    )


def run(context: Context, inputs: Inputs, prefix: str) -> Output:
    """Raises UserError when more verdicts than `reward.max_unverified` are no judgement."""
    rollout = inputs.read(context, "rollout")
    with context.engines.judging(len(rollout)):
        results = judge(context.engines.verifiers, rollout, f"verify {context.iteration}")
    counts = verdict_shares(results)
    check_failures(results, context.recipe.reward)  # type: ignore[union-attr]
    table = verify_table(rollout["sample_id"], results)
    return Output({"verify": table}, {"reward": mean_reward(results), **counts})


def judge(pool: VerifierPool, samples: pa.Table, label: str) -> list[VerifyResult]:
    """A result for each row of `samples` (with the columns of `Row`), in order."""
    columns = [samples[name].to_pylist() for name in Row._fields]
    with reported(label, "verdicts", lambda: (min(pool.judged, len(samples)), len(samples))):
        return pool.verify(list(map(Row, *columns)))


def verify_table(sample_ids: pa.ChunkedArray, results: Sequence[VerifyResult]) -> pa.Table:
    """The rows of `VERIFY`."""
    names = ("reward", "verdict", "parsed", "detail", "verifier", "seconds")
    found = {name: [getattr(result, name) for result in results] for name in names}
    columns = {"sample_id": sample_ids.to_pylist(), "verify_seconds": found.pop("seconds"), **found}
    return pa.table({f.name: pa.array(columns[f.name], f.type) for f in VERIFY}, schema=VERIFY)


def mean_reward(results: Sequence[VerifyResult]) -> float:
    """Over the samples that have a reward; 0 where none has."""
    rewards = [result.reward for result in results if not math.isnan(result.reward)]
    return sum(rewards) / max(len(rewards), 1)


def verdict_shares(results: Sequence[VerifyResult]) -> dict[str, float]:
    """The share of each verdict."""
    return {v: sum(r.verdict == v for r in results) / max(len(results), 1) for v in VERDICTS}


def check_failures(results: Sequence[VerifyResult], reward: Reward) -> None:
    """UserError where more of the verdicts than `reward.max_unverified` are no judgement."""
    failed = [result for result in results if result.verdict in unverified(reward)]
    if len(failed) > reward.max_unverified * len(results):
        raise UserError(
            f"{len(failed) / len(results):.0%} of the completions could not be verified (reward.max_unverified = "
            f"{reward.max_unverified:g}); for example: {failed[0].verdict}: {failed[0].detail or 'no detail'}. "
            "Correct the verifier, or raise reward.timeout_seconds, reward.wall_seconds, reward.memory_mb or "
            "reward.max_unverified."
        )
