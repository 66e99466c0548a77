"""Verdicts on finished groups while others generate, so that filters can reject groups at once."""

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


class Unjudged(Exception):
    """The verifiers have failed, and not for anything that a completion did."""


@dataclass
class Judge:
    """Gives samples their verdicts, and says which groups filters reject. Belongs to one event loop.

    `verify` blocks, and is called in a thread: for all groups that wait, by one call at a time. `judged_with` is what
    the verdicts depend on besides the samples.
    """

    verify: Callable[[Sequence[Row]], Sequence[VerifyResult]]
    judged_with: str
    filters: Filters
    function: Function | None = None
    seconds: float = 3600.0  # that the function may take
    _waiting: list[list[Sample]] = field(default_factory=list)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def __call__(self, samples: list[Sample]) -> str:
        """Judge a group; why it is rejected, or nothing.

        Raises:
            Unjudged: the verifiers have failed.
            UserError: the verifier cannot be loaded.
            Exception: what the user's function raises, or TimeoutError if it does not return.
        """
        await self._judge(samples)
        results = verdicts_of(samples)
        reason = rejection(results, self.filters)
        if reason or self.function is None:
            return reason
        async with asyncio.timeout(self.seconds):
            asked = in_background(partial(rejection_by, self.function, samples, results), "filter")
            return await asyncio.wrap_future(asked)  # in a thread of its own, which it keeps if it never returns

    async def _judge(self, samples: list[Sample]) -> None:
        self._waiting.append(samples)
        async with self._turn:
            if samples[0].verdict is not None:  # another group's turn has taken it along
                return
            groups = list(self._waiting)
            rows = [row_of(sample) for sample in chain(*groups)]
            try:
                results = await asyncio.to_thread(self.verify, rows)
            except ConnectionError as error:
                raise Unjudged(f"the verifiers have failed: {error}") from error
            for sample, result in zip(chain(*groups), results, strict=True):
                sample.verdict, sample.judged_with = result, self.judged_with
            del self._waiting[: len(groups)]


def row_of(sample: Sample) -> Row:
    """What a verifier is given of a sample; the stage `verify` reads the same from the table."""
    truncated = sample.stop_reason == "length"
    return Row(sample.prompt.prompt, sample.completion, sample.prompt.answer, truncated, sample.stop_reason)


def verdicts_of(samples: Sequence[Sample]) -> list[VerifyResult]:
    """The verdicts that a group has been given; none where it was not judged."""
    return [sample.verdict for sample in samples if sample.verdict is not None]


def judged_with(recipe: RlhfRecipe) -> str:
    """Digest of the settings that a verdict depends on, and of the verifier's version."""
    return digest_json([recipe_values(recipe, ["reward"]), verifier_version(recipe.reward.verifier)])


def judged_table(samples: Sequence[Sample]) -> pa.Table:
    """The verdicts that accompany the samples, as a `JUDGED` table."""
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
