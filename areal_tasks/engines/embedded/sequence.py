"""A completion during its generation, and the request that it belongs to."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Annotated, Final, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from areal_tasks.data.sampler import GOLDEN, mix64
from schemas.record import Record

Seed = Annotated[int, Field(ge=0, lt=2**63)]
TokenId = Annotated[int, Field(ge=0)]
StopString = Annotated[str, Field(min_length=1)]  # an empty one would end every completion at once
MAX_STOPS: Final = 64
T = TypeVar("T")


class SamplingParams(Record):
    """SGLang's `sampling_params`, without those that a trainer cannot reproduce: they are refused.

    Texts hold all tokens that were sampled: `no_stop_trim` cannot be turned off.
    """

    max_new_tokens: int = Field(128, ge=1)
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    stop: tuple[StopString, ...] = Field((), max_length=MAX_STOPS)
    stop_token_ids: tuple[TokenId, ...] = Field((), max_length=MAX_STOPS)
    sampling_seed: Seed | None = None
    ignore_eos: bool = False
    no_stop_trim: Literal[True] = True


@dataclass(eq=False, slots=True)
class Sequence:
    """A prompt, how to continue it, and what has been generated so far.

    Tokens that are `given` follow the prompt in place of sampled ones; `scores` are their logprobs.
    """

    prompt: list[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    limit: int  # tokens it may generate: max_new_tokens, or what the context leaves
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[str, int]] = field(default_factory=list)  # (weights version, tokens sampled with it), in order
    stale_kv: list[tuple[bool, int]] = field(default_factory=list)  # (over a cache of older weights, tokens), in order
    finish: dict[str, object] | None = None
    listener: Callable[[Sequence], None] | None = None  # called after each token but the last, in the engine's thread
    given: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    def notify(self) -> None:
        """Give the listener a copy of the sequence as it is now."""
        if self.listener is not None:
            now = replace(self, output=[*self.output], logprobs=[*self.logprobs], versions=[*self.versions])
            now.stale_kv = [*self.stale_kv]
            self.listener(now)

    def so_far(self) -> list[int]:
        """All tokens up to now, which the cache must hold to continue."""
        return self.prompt + self.given[: len(self.scores)] + self.output

    @property
    def left(self) -> int:
        """How many tokens may follow, given ones included."""
        return len(self.given) - len(self.scores) + self.limit - len(self.output)

    def record(self, tokens: list[int], logprobs: list[float], version: str, stale_kv: bool) -> None:
        """Append tokens (given ones first) sampled with `version`; `stale_kv`: some cache is of older weights."""
        given = min(len(self.given) - len(self.scores), len(tokens))
        self.scores += logprobs[:given]
        if sampled := tokens[given:]:
            self.output += sampled
            self.logprobs += logprobs[given:]
            _add_run(self.versions, version, len(sampled))
            _add_run(self.stale_kv, stale_kv, len(sampled))


def _add_run(runs: list[tuple[T, int]], value: T, count: int) -> None:
    """Append `count` times `value` to a run-length encoded list."""
    if runs and runs[-1][0] == value:
        count += runs.pop()[1]
    runs.append((value, count))


@dataclass(eq=False, slots=True)
class Job:
    """The sequences of one HTTP request. `done` gets its result when all have finished."""

    sequences: list[Sequence]
    done: Future[None] = field(default_factory=Future)
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = len(self.sequences)
        self.done.set_running_or_notify_cancel()  # it cannot be cancelled


@dataclass(eq=False, slots=True)
class Batch:
    """Sequences with the same tokens so far: their cache is computed once, in the row of the first slot."""

    tokens: list[int]
    sequences: list[Sequence]
    slots: list[int] = field(default_factory=list)  # of the sequences, once they have been admitted
    cursor: int = 0  # tokens whose cache is computed

    @property
    def last(self) -> int:
        """Offset of the last token after the cursor."""
        return len(self.tokens) - 1 - self.cursor

    def split(self, n: int) -> tuple[Batch, Batch]:
        return Batch(self.tokens, self.sequences[:n]), Batch(self.tokens, self.sequences[n:])


def make_sequence(
    prompt: list[int], params: SamplingParams, eos: frozenset[int], max_length: int, scored: int | None = None
) -> Sequence:
    """The sequence of a prompt, whose tokens from position `scored` on are scored. Without a seed: a random one."""
    stop_ids = frozenset() if params.ignore_eos else frozenset(params.stop_token_ids) | eos  # as SGLang does
    limit = min(params.max_new_tokens, max_length - len(prompt))
    seed = secrets.randbits(62) if params.sampling_seed is None else params.sampling_seed
    return Sequence(prompt[:scored], params, seed, stop_ids, limit, given=prompt[len(prompt[:scored]) :])


def share_prompts(sequences: list[Sequence]) -> list[Batch]:
    """Batches of sequences that start from the same tokens, in order of arrival."""
    batches: dict[tuple[int, ...], Batch] = {}
    for sequence in sequences:
        tokens = sequence.so_far()
        batches.setdefault(tuple(tokens), Batch(tokens, [])).sequences.append(sequence)
    return list(batches.values())


# ── sampling ────────────────────────────────────────────────────────────────────────────────────────────────────────


def uniforms(seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row, from the sequence's seed and the new token's position in the sequence.

    The position, not the count of generated tokens: a sequence continued from partial output gets the same numbers.
    """
    steps = (positions - 1).astype(np.uint64)  # `mix64` makes another one
    bits: npt.NDArray[np.uint64] = mix64(mix64(seeds.astype(np.uint64)) + steps * np.uint64(GOLDEN))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(
    logits: Float[Tensor, "n vocab"],
    temperature: Float[Tensor, " n"],
    uniform: Float[Tensor, " n"],
    given: Int[Tensor, " n"] | None = None,
) -> tuple[Int[Tensor, " n"], Float[Tensor, " n"]]:
    """Tokens and their log-probabilities, log_softmax(logits / temperature) over the whole vocabulary.

    Temperature 0 is greedy; its log-probabilities are taken at temperature 1. Those not -1 are `given`, not sampled.
    """
    greedy = temperature == 0
    logprobs = torch.log_softmax(logits.float() / temperature.masked_fill(greedy, 1.0)[:, None], dim=-1)
    tokens = logprobs.argmax(dim=-1)
    if not bool(greedy.all()):
        tokens = torch.where(greedy, tokens, _inverse_cdf(logprobs, uniform))
    if given is not None:
        tokens = torch.where(given < 0, tokens, given)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _inverse_cdf(logprobs: Float[Tensor, "n vocab"], uniform: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
    """The first token whose cumulative probability exceeds `uniform` times the total: never one of probability 0."""
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    target = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=logprobs.shape[1] - 1)
