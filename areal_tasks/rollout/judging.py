"""Verifies groups as they finish: for filters, which reject some, for workflows that ask, or in advance."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from areal_tasks.rewards.pool import VerifyResult
from areal_tasks.rewards.protocol import Row
from areal_tasks.rollout.filters import Function, rejection, rejection_by
from areal_tasks.store.parallel import in_background
from areal_tasks.workflows import Sample
from schemas.recipe.sections import Filters
from schemas.tables import JUDGED


class VerifiersFailed(Exception):
    """The verifiers themselves failed: no completion is the cause."""


Verify = Callable[[Sequence[Row]], Awaitable[Sequence[VerifyResult]]]


@dataclass
class Judge:
    """Verifies samples, and decides which groups filters reject. Use within one event loop.

    `judged_with` is the digest of what verdicts depend on besides the samples. `known` has the verdicts of one attempt
    at a group, one for each completion. Verdicts that decide nothing are made in advance of the stage `verify`, and are
    not written.
    """

    verify: Verify
    judged_with: str
    filters: Filters
    function: Function | None = None
    seconds: float = 3600.0  # limit of a call of `function`
    decides: bool = True  # as of `judges_groups`

    async def verdict(self, known: dict[Row, VerifyResult], sample: Sample) -> VerifyResult:
        """The verdict on a sample as it is now, for a workflow that asks. Errors as of `__call__`."""
        row = row_of(sample)
        if row not in known:
            [found] = await self._verified([row])
            known.setdefault(row, found)  # concurrent calls get the same verdict
        return known[row]

    async def __call__(self, samples: list[Sample], known: Mapping[Row, VerifyResult] = MappingProxyType({})) -> str:
        """Verify those samples of a group whose verdicts are not `known`. Returns why a filter rejects it, or "".

        Raises:
            VerifiersFailed: the verifiers have failed.
            UserError: the verifier cannot be loaded.
            Exception: what the user's function raises, or TimeoutError if it does not return.
        """
        rows = [row_of(sample) for sample in samples]
        missing = [row for row in rows if row not in known]
        found = iter(await self._verified(missing) if missing else ())
        for sample, row in zip(samples, rows, strict=True):
            sample.verdict = known[row] if row in known else next(found)
            sample.judged_with = self.judged_with if self.decides else ""
        results = verdicts_of(samples)
        reason = rejection(results, self.filters)
        if reason or self.function is None:
            return reason
        async with asyncio.timeout(self.seconds):
            work = in_background(partial(rejection_by, self.function, samples, results), "filter")
            return await asyncio.wrap_future(work)  # in its own thread, which stays if the function never returns

    async def _verified(self, rows: Sequence[Row]) -> Sequence[VerifyResult]:
        try:
            return await self.verify(rows)
        except ConnectionError as error:
            raise VerifiersFailed(f"the verifiers have failed: {error}") from error


def row_of(sample: Sample) -> Row:
    """The verifier's input for a sample; the stage `verify` reads the same from the table."""
    truncated = sample.stop_reason == "length"
    return Row(sample.prompt.prompt, sample.completion, sample.prompt.answer, truncated, sample.stop_reason)


def basis(judged_with: str, rows: Iterable[Row]) -> str:
    """Digest of what the verdicts on these rows depend on, which are then those of no other attempt at a group."""
    parts = "\0".join(map(str, chain([judged_with], *rows)))
    return hashlib.sha256(parts.encode(errors="surrogatepass")).hexdigest()


def verdicts_of(samples: Sequence[Sample]) -> list[VerifyResult]:
    """The verdicts of a group's samples; none if it was not verified."""
    return [sample.verdict for sample in samples if sample.verdict is not None]


def judged_table(samples: Sequence[Sample]) -> pa.Table:
    """The verdicts of the samples, as a `JUDGED` table."""
    judged = [sample for sample in samples if sample.verdict is not None]
    names = ("sample_id", "judged_with", "sample_index")
    columns = {name: [getattr(sample, name) for sample in judged] for name in names}
    columns["group_id"] = [sample.prompt.group_id for sample in judged]
    return verdict_table(JUDGED, columns, verdicts_of(samples))


def verdict_table(schema: pa.Schema, columns: Mapping[str, Sequence[Any]], results: Sequence[VerifyResult]) -> pa.Table:
    """A table with these columns, and those of the results."""
    found = {field.name: [getattr(result, field.name) for result in results] for field in fields(VerifyResult)}
    every = {**columns, **found, "verify_seconds": found["seconds"]}
    return pa.table({f.name: pa.array(every[f.name], f.type) for f in schema}, schema=schema)
