"""verify: judges every completion in processes that can be killed."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from areal_tasks.rewards.pool import VerifierPool, VerifyResult
from areal_tasks.rewards.protocol import UNVERIFIED
from areal_tasks.stages.context import Context
from areal_tasks.stages.progress import reported
from areal_tasks.stages.stage import Inputs, Kind, Output, Stage, columns
from schemas.errors import UserError
from schemas.recipe.recipe import RlhfRecipe
from schemas.tables import VERDICTS, VERIFY


def verify(recipe: RlhfRecipe) -> Stage:
    """One row per sample: reward, verdict, and what was found in the text."""
    return Stage(
        name="verify",
        kind=Kind.PURE,
        version=1,
        run=run,
        reads=columns("rollout", "sample_id", "prompt", "completion", "answer"),
        writes=("verify",),
        fields=("reward",),
    )


def run(context: Context, inputs: Inputs, prefix: str) -> Output:
    """Raises UserError when more verdicts than `reward.max_unverified` are timeouts or errors."""
    rollout = inputs.read(context, "rollout")
    with context.engines.judging(len(rollout)):
        results = judge(context.engines.verifiers, rollout, f"verify {context.iteration}")
    counts = verdict_shares(results)
    check_failures(counts, context.recipe.reward.max_unverified, results)  # type: ignore[union-attr]
    table = verify_table(rollout["sample_id"], results)
    return Output({"verify": table}, {"reward": mean_reward(results), **counts})


def judge(pool: VerifierPool, samples: pa.Table, label: str) -> list[VerifyResult]:
    """A result for each row of `samples` (columns prompt, completion, answer), in order."""
    texts = [samples[name].to_pylist() for name in ("prompt", "completion", "answer")]
    with reported(label, "verdicts", lambda: (min(pool.judged, len(samples)), len(samples))):
        return pool.verify(list(zip(*texts, strict=True)))


def verify_table(sample_ids: pa.ChunkedArray, results: Sequence[VerifyResult]) -> pa.Table:
    """The rows of `VERIFY`."""
    names = ("reward", "verdict", "parsed", "detail", "verifier", "seconds")
    found = {name: [getattr(result, name) for result in results] for name in names}
    columns = {"sample_id": sample_ids.to_pylist(), "verify_seconds": found.pop("seconds"), **found}
    return pa.table({f.name: pa.array(columns[f.name], f.type) for f in VERIFY}, schema=VERIFY)


def mean_reward(results: Sequence[VerifyResult]) -> float:
    """Over the samples that could be judged; 0 where none could."""
    judged = [r.reward for r in results if r.verdict not in UNVERIFIED]
    return sum(judged) / max(len(judged), 1)


def verdict_shares(results: Sequence[VerifyResult]) -> dict[str, float]:
    """The share of each verdict."""
    return {v: sum(r.verdict == v for r in results) / max(len(results), 1) for v in VERDICTS}


def check_failures(shares: dict[str, float], bound: float, results: Sequence[VerifyResult]) -> None:
    failed = sum(shares[v] for v in UNVERIFIED)
    if failed > bound:
        example = next(r for r in results if r.verdict in UNVERIFIED)
        raise UserError(
            f"{failed:.0%} of the completions could not be verified (reward.max_unverified = {bound:g}); "
            f"for example: {example.verdict}: {example.detail or 'no detail'}. Mend the verifier, or raise "
            "reward.timeout_seconds, reward.memory_mb or reward.max_unverified."
        )
