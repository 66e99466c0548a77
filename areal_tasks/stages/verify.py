"""verify: judges every completion in processes that can be killed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from itertools import chain
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from areal_tasks.rewards.load import verifier_version
from areal_tasks.rewards.pool import VerifierPool, VerifyResult, unverified_verdicts
from areal_tasks.rewards.protocol import Row
from areal_tasks.rollout.judging import basis, verdict_table
from areal_tasks.rollout.made_with import judged_with
from areal_tasks.stages.progress import reported
from areal_tasks.stages.stage import Context, Inputs, Kind, Output, Stage, columns, tables_of
from schemas.errors import UserError
from schemas.recipe.derived import judges_groups, judges_in_advance
from schemas.recipe.recipe import RlhfRecipe
from schemas.recipe.sections import Reward
from schemas.tables import JUDGED, VERDICTS, VERIFY

if TYPE_CHECKING:
    from areal_tasks.stages.generation import Generation


def verify(recipe: RlhfRecipe) -> Stage:
    """One row per sample: reward, verdict, and the answer found in the text.

    Verdicts that were made with the same settings while groups were generated are taken over.
    """
    judged = columns("judged", *JUDGED.names) if judges_groups(recipe, recipe.rollout) else ()
    return Stage(
        name="verify",
        kind=Kind.PURE,
        version=verifier_version(recipe.reward.verifier),
        run=run,
        reads=(*columns("rollout", "sample_id", "group_id", *Row._fields), *judged),
        writes=("verify",),
        fields=("reward",),
    )


def run(context: Context, inputs: Inputs, prefix: str) -> Output:
    """Verify all samples. UserError if the share that could not be verified exceeds `reward.max_unverified`."""
    rollout = inputs.read(context, "rollout")
    known = known_verdicts(context, inputs, rollout)
    ids = rollout["sample_id"].to_pylist()
    missing = [i for i, sample in enumerate(ids) if sample not in known]
    if missing:
        with context.engines.judging(len(missing)):
            found = judge(context.engines.verifiers, rollout.take(missing), f"verify {context.iteration}")
        known |= {ids[i]: result for i, result in zip(missing, found, strict=True)}
    results = [known[sample] for sample in ids]
    counts = verdict_shares(results)
    check_failures(results, context.recipe.reward)  # type: ignore[union-attr]
    table = verdict_table(VERIFY, {"sample_id": ids}, results)
    return Output({"verify": table}, {"reward": mean_reward(results), **counts})


def known_verdicts(context: Context, inputs: Inputs, rollout: pa.Table) -> dict[str, VerifyResult]:
    """By sample id, the verdicts that were made during generation with the settings in force."""
    assert isinstance(context.recipe, RlhfRecipe)
    current = judged_with(context.recipe, context.engines.code)
    if "judged" in tables_of(inputs.reads):
        rows = inputs.read(context, "judged").to_pylist()
        return {row["sample_id"]: _result(row) for row in rows if row["judged_with"] == current}
    if context.generation is None or not judges_in_advance(context.recipe):
        return {}
    return made_in_advance(context.generation, rollout, current)


def made_in_advance(generation: Generation, rollout: pa.Table, current: str) -> dict[str, VerifyResult]:
    """The same where workers have not written them. An `error` is not taken over: it may be due to their machine."""
    samples: dict[int, list[tuple[str, Row]]] = {}
    ids = (rollout[name].to_pylist() for name in ("group_id", "sample_id"))
    for group, sample, row in zip(*ids, rows_of(rollout), strict=True):
        samples.setdefault(group, []).append((sample, row))
    found = generation.verdicts({group: basis(current, (row for _, row in of)) for group, of in samples.items()})
    made = chain.from_iterable(zip(samples[group], verdicts, strict=True) for group, verdicts in found.items())
    return {sample: verdict for (sample, _), verdict in made if verdict.verdict != "error"}


def _result(row: dict[str, Any]) -> VerifyResult:
    given = {field.name: row[field.name] for field in fields(VerifyResult) if field.name != "seconds"}
    return VerifyResult(**given, seconds=row["verify_seconds"])


def judge(pool: VerifierPool, samples: pa.Table, label: str) -> list[VerifyResult]:
    """A result for each row of `samples` (with the columns of `Row`), in order."""
    with reported(label, "verdicts", lambda: (min(pool.judged, len(samples)), len(samples))):
        return pool.verify(rows_of(samples))


def rows_of(samples: pa.Table) -> list[Row]:
    """What verifiers are given for each row of `samples`."""
    return list(map(Row, *(samples[name].to_pylist() for name in Row._fields)))


def mean_reward(results: Sequence[VerifyResult]) -> float:
    """The mean reward of the samples that have one; 0 if none has."""
    rewards = [result.reward for result in results if not math.isnan(result.reward)]
    return sum(rewards) / max(len(rewards), 1)


def verdict_shares(results: Sequence[VerifyResult]) -> dict[str, float]:
    return {v: sum(r.verdict == v for r in results) / max(len(results), 1) for v in VERDICTS}


def check_failures(results: Sequence[VerifyResult], reward: Reward) -> None:
    """UserError if the share of samples that could not be verified exceeds `reward.max_unverified`."""
    failed = [result for result in results if result.verdict in unverified_verdicts(reward)]
    if len(failed) > reward.max_unverified * len(results):
        raise UserError(
            f"{len(failed) / len(results):.0%} of the completions could not be verified (reward.max_unverified = "
            f"{reward.max_unverified:g}); for example: {failed[0].verdict}: {failed[0].detail or 'no detail'}. "
            "Correct the verifier, or raise reward.timeout_seconds, reward.wall_seconds, reward.memory_mb or "
            "reward.max_unverified."
        )
