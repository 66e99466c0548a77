"""The interface of workflows: a prompt in, samples out. A user's own is named `package.module:object`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import pyarrow as pa

from areal_tasks.data.ragged import Flat, ragged
from areal_tasks.engines.client import InferenceClient
from schemas.errors import UserError
from schemas.tables import ROLLOUT

if TYPE_CHECKING:
    from areal_tasks.rewards.pool import VerifyResult

#: One element per token. Arrays avoid the conversion to Python's numbers.
Values = Sequence[float] | Flat


@dataclass(frozen=True, slots=True)
class Prompt:
    """One group's prompt: a data-set row at its position in the run's order."""

    prompt_id: int
    group_id: int
    epoch: int
    prompt: str
    answer: str
    input_ids: list[int]


@dataclass(slots=True)
class Sample:
    """One trajectory. `Values` have one element per token of `input_ids`; those of the prompt are 0, -1 and False."""

    prompt: Prompt
    sample_index: int
    completion: str
    input_ids: Values
    loss_mask: Values
    logprobs: Values
    versions: Values
    stop_reason: str  # stop, length or abort; of the last turn
    seed: int
    server: str
    seconds: float
    turns: int = 1
    stale_kv: Values | None = None  # None: no token was sampled over the KV cache of older weights
    verdict: VerifyResult | None = None  # if groups are verified as they finish
    judged_with: str = ""  # digest of what the verdict depends on besides the sample; empty: it decides nothing

    @property
    def sample_id(self) -> str:
        """The sample's id in all tables of an iteration."""
        return f"{self.prompt.group_id}-{self.sample_index}"

    @property
    def generated_versions(self) -> Flat:
        """The weights versions of the generated tokens. [num_generated] int32."""
        return np.asarray(self.versions, np.int32)[np.asarray(self.loss_mask, np.bool_)]


async def verification_not_enabled(sample: Sample) -> VerifyResult:
    """`WorkflowContext.verify` where the recipe does not say that the workflow uses it."""
    raise UserError(
        "workflow.verifies: the workflow asks for a verdict (`context.verify`): set it to true. The settings of "
        "`reward` are then part of what identifies its samples"
    )


@dataclass(frozen=True)
class WorkflowContext:
    """What a workflow may use. `tokenizer` is a transformers tokenizer.

    `verify` gives the verdict on a sample as it is at that moment, with `workflow.verifies`.
    """

    client: InferenceClient
    seed: int
    group_size: int
    max_new_tokens: int
    temperature: float
    max_length: int
    stop: tuple[str, ...] = ()
    generation: int = 0
    tokenizer: Any = None
    verify: Callable[[Sample], Awaitable[VerifyResult]] = verification_not_enabled


class Workflow(Protocol):
    """Produces one group: `group_size` samples of a prompt, in order.

    The groups of a rollout worker run concurrently, as tasks of one event loop: a call that blocks delays the others,
    and fails after `workflow.blocked_seconds`. `await asyncio.to_thread(...)` takes such a call out of the loop.
    """

    async def run(self, prompt: Prompt, context: WorkflowContext) -> list[Sample]: ...


#: The list columns, and the types of their elements.
_LISTS: Final = {f.name: f.type.value_type.to_pandas_dtype() for f in ROLLOUT if pa.types.is_list(f.type)}
#: What a workflow gives for the other columns, by their type.
_GIVEN: Final[Mapping[pa.DataType, Callable[[Sample], tuple[object, ...]]]] = {
    pa.string(): attrgetter("completion", "stop_reason", "server", "prompt.prompt", "prompt.answer"),
    pa.int64(): attrgetter("seed", "prompt.prompt_id"),
    pa.int32(): attrgetter("sample_index", "turns", "prompt.epoch"),
    pa.float32(): lambda sample: (sample.seconds,),
}


def _scalars(sample: Sample) -> dict[str, Any]:
    versions = sample.generated_versions
    prompt = sample.prompt
    return {
        "sample_id": sample.sample_id,
        "group_id": prompt.group_id,
        "sample_index": sample.sample_index,
        "prompt_id": prompt.prompt_id,
        "epoch": prompt.epoch,
        "prompt": prompt.prompt,
        "completion": sample.completion,
        "answer": prompt.answer,
        "num_tokens": len(sample.input_ids),
        "num_generated": len(versions),
        "stop_reason": sample.stop_reason,
        "truncated": sample.stop_reason == "length",
        "turns": sample.turns,
        "seed": sample.seed,
        "server": sample.server,
        "version_min": int(versions.min()) if len(versions) else -1,
        "version_max": int(versions.max()) if len(versions) else -1,
        "seconds": sample.seconds,
        "status": "aborted" if sample.stop_reason == "abort" else "finished",
    }


def _array(sample: Sample, name: str) -> Flat:
    """The values of a list column. TypeError unless there is one for each token."""
    values, tokens = getattr(sample, name), len(sample.input_ids)
    if values is None and name == "stale_kv":
        return np.zeros(tokens, bool)
    found: Flat = np.asarray(values, _LISTS[name])
    if found.shape != (tokens,):
        raise TypeError(f"sample {sample.sample_id} has {tokens} `input_ids`, and not as many `{name}`: {found.size}")
    return found


def _lists(samples: Sequence[Sample], name: str) -> pa.ListArray:
    """A column of lists, made from one flat array: converting list by list takes Arrow three times as long."""
    parts = [_array(sample, name) for sample in samples]
    sizes = np.array([len(part) for part in parts], dtype=np.int64)
    return ragged(np.concatenate([np.zeros(0, _LISTS[name]), *parts]), sizes, ROLLOUT.field(name).type)


def check_values(samples: Sequence[Sample]) -> None:
    """Raise an error if the columns of `samples_to_table` cannot hold a value. A tenth of its work."""
    for sample in samples:
        for name in _LISTS:
            _array(sample, name)
    for kind, given in _GIVEN.items():
        if pa.array([value for sample in samples for value in given(sample)], kind).null_count:
            raise TypeError(f"one of these is None, which no column of {kind} can hold: {given(samples[0])}")


def samples_to_table(samples: Sequence[Sample]) -> pa.Table:
    """The samples as a `ROLLOUT` table, in the order given. TypeError if a list is not as long as its sample."""
    lists = {name: _lists(samples, name) for name in _LISTS}
    rows = [_scalars(sample) for sample in samples]
    columns = [
        lists[field.name] if field.name in lists else pa.array([row[field.name] for row in rows], field.type)
        for field in ROLLOUT
    ]
    return pa.Table.from_arrays(columns, schema=ROLLOUT)
