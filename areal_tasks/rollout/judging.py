"""Verifies finished groups while others are generated, so that filters can reject groups at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import pyarrow as pa

from areal_tasks.rewards.load import verifier_version
from areal_tasks.rewards.pool import VerifyResult
from areal_tasks.rewards.protocol import Row
from areal_tasks.rollout.filters import Function, rejection, rejection_by
from areal_tasks.store.keys import digest_json, recipe_values
from areal_tasks.store.parallel import in_background
from areal_tasks.workflows import Sample
from schemas.recipe.filters import Filters
from schemas.recipe.recipe import RlhfRecipe
from schemas.tables import JUDGED


class VerifiersFailed(Exception):
    """The verifiers failed, and no completion is the cause."""


@dataclass
class Judge:
    """Verifies samples, and decides which groups filters reject. Use within one event loop.

    `verify` blocks, so it is called in a thread: one call at a time, for all waiting groups. `judged_with` is the
    digest of what verdicts depend on besides the samples.
    """

    verify: Callable[[Sequence[Row]], Sequence[VerifyResult]]
    judged_with: str
    filters: Filters
    function: Function | None = None
    seconds: float = 3600.0  # limit of a call of `function`
    _waiting: list[list[Sample]] = field(default_factory=list)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def __call__(self, samples: list[Sample]) -> str:
        """Verify a group. Returns why a filter rejects it, or an empty string.

        Raises:
            VerifiersFailed: the verifiers have failed.
            UserError: the verifier cannot be loaded.
            Exception: what the user's function raises, or TimeoutError if it does not return.
        """
        await self._judge(samples)
        results = verdicts_of(samples)
        reason = rejection(results, self.filters)
        if reason or self.function is None:
            return reason
        async with asyncio.timeout(self.seconds):
            work = in_background(partial(rejection_by, self.function, samples, results), "filter")
            return await asyncio.wrap_future(work)  # in its own thread, which stays if the function never returns

    async def _judge(self, samples: list[Sample]) -> None:
        self._waiting.append(samples)
        async with self._turn:
            if samples[0].verdict is not None:  # verified together with another group
                return
            groups = list(self._waiting)
            rows = [row_of(sample) for sample in chain(*groups)]
            try:
                results = await asyncio.to_thread(self.verify, rows)
            except ConnectionError as error:
                raise VerifiersFailed(f"the verifiers have failed: {error}") from error
            for sample, result in zip(chain(*groups), results, strict=True):
                sample.verdict, sample.judged_with = result, self.judged_with
            del self._waiting[: len(groups)]


def row_of(sample: Sample) -> Row:
    """The verifier's input for a sample; the stage `verify` reads the same from the table."""
    truncated = sample.stop_reason == "length"
    return Row(sample.prompt.prompt, sample.completion, sample.prompt.answer, truncated, sample.stop_reason)


def verdicts_of(samples: Sequence[Sample]) -> list[VerifyResult]:
    """The verdicts of a group's samples; none if it was not verified."""
    return [sample.verdict for sample in samples if sample.verdict is not None]


def judged_with(recipe: RlhfRecipe) -> str:
    """Digest of the settings that a verdict depends on, and of the verifier's version."""
    return digest_json([recipe_values(recipe, ["reward"]), verifier_version(recipe.reward.verifier)])


def judged_table(samples: Sequence[Sample]) -> pa.Table:
    """The verdicts of the samples, as a `JUDGED` table."""
    rows = [
        {
            "sample_id": sample.sample_id,
            "group_id": sample.prompt.group_id,
            "sample_index": sample.sample_index,
            "judged_with": sample.judged_with,
            "verify_seconds": sample.verdict.seconds,
            **vars(sample.verdict),
        }
        for sample in samples
        if sample.verdict is not None
    ]
    return pa.table({f.name: pa.array([row[f.name] for row in rows], f.type) for f in JUDGED}, schema=JUDGED)
