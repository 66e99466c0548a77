"""One iteration of training: the plan of its minibatches, the optimizer steps, and what they say of themselves."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from areal_tasks.algorithms.behaviour import sequence_log_ratios
from areal_tasks.algorithms.losses import token_weights
from areal_tasks.data.batching import (
    LEFT_OUT,
    Layout,
    counted_tokens,
    lay_out,
    micro_batches,
    minibatches,
)
from areal_tasks.engines.trainer.agreement import EnginesDisagree, agreement, check_agreement, gaps, outside
from areal_tasks.engines.trainer.ahead import Ahead, aside
from areal_tasks.engines.trainer.backend import Backend, Progress, TokenLoss, TokenStats
from areal_tasks.engines.trainer.forward import fetch, move, pinned, staged
from areal_tasks.engines.trainer.metrics import SampleMeans, over_ranks, step_statistics, steps_table, summary, totals
from areal_tasks.engines.trainer.objective import Objective, grpo_objective, sft_objective, stat_names
from areal_tasks.engines.trainer.optimizer import learning_rate
from areal_tasks.engines.trainer.rows import Batch, aligned, make_table
from areal_tasks.engines.trainer.settings import Settings
from areal_tasks.engines.trainer.staleness import LEAST_COMPARED, staleness_metrics
from schemas.errors import UserError

Rows = Int[Tensor, " _"]  # samples by their place in the batch


class TrainingFailed(UserError):
    """Training cannot go on: the loss or the gradient stays non-finite."""


@dataclass(frozen=True)
class Plan:
    """The minibatch and micro-batch of each sample; `LEFT_OUT` for those that are not trained on."""

    minibatch: Int[Tensor, " B"]
    micro_batch: Int[Tensor, " B"]


@dataclass
class Work:
    """How many of a command's samples have been through the model; of all ranks, as rank 0 can tell."""

    of: int = 0
    done: int = 0

    def add(self, samples: int) -> None:
        """Another `samples` are done."""
        self.done = min(self.of, self.done + samples)


@dataclass(frozen=True)
class Minibatch:
    """An optimizer step to come: its samples, what a token of each weighs, and this rank's passes through them."""

    number: int
    rows: Rows
    weights: Float[Tensor, " B"]
    passes: int  # of all ranks
    mine: list[Rows]


@dataclass(frozen=True)
class Pass:
    """A forward and backward pass to come: where its tokens lie, and what each weighs. On its way to the device."""

    layout: Layout
    weights: Float[Tensor, " T"]


@dataclass(frozen=True)
class Computed:
    """What the passes of a minibatch have queued on the device; nobody has waited for it yet."""

    totals: Float[Tensor, "3 K"]
    stats: TokenStats  # in host memory, and there once the device has been waited for


@dataclass(frozen=True)
class Learned:
    """What an iteration leaves: its two tables, their summary, and where training stands."""

    train_steps: pa.Table
    train_samples: pa.Table
    metrics: dict[str, float]
    progress: Progress


def make_plan(batch: Batch, settings: Settings, iteration: int, world: int = 1) -> Plan:
    """Deal the kept samples out to minibatches, and each minibatch to micro-batches within the token budget.

    The number of micro-batches is a multiple of `world`, the number of ranks, where there are samples enough.
    """
    assigned = batch.minibatch
    if assigned is None:
        assigned = minibatches(batch.kept, settings.minibatches, settings.seed, iteration)
    micro = torch.full_like(assigned, LEFT_OUT)
    for number in range(settings.minibatches):
        rows = torch.nonzero(assigned == number)[:, 0]
        lengths = batch.sequences.lengths[rows]
        micro[rows] = micro_batches(lengths, settings.trainer.micro_batch_tokens, settings.trainer.layout, world)
    return Plan(assigned, micro)


def recorded_plan(batch: Batch, train_samples: pa.Table) -> Plan:
    """The plan that a committed iteration followed, from its `train_samples`."""
    table = aligned(train_samples, batch.ids, "train_samples")
    return Plan(*(torch.tensor(table[name].to_numpy()).long() for name in ("minibatch", "micro_batch")))


def make_objective(batch: Batch, settings: Settings, device: torch.device) -> Objective:
    """What is minimised over `batch`, of tokens on `device`."""
    if settings.kind == "sft":
        return sft_objective
    more = {"log_ratio": _sequence_log_ratios(batch)} if settings.sequence_weights else {}
    columns = {name: move(column, device) for name, column in (batch.columns | more).items()}
    return grpo_objective(columns, settings)


def _sequence_log_ratios(batch: Batch) -> Float[Tensor, " N"]:
    """log π_proximal / π_behaviour of each token's whole sample, from the table `proximal`; 0 where none counts."""
    counted = batch.sequences.counted
    log_ratios = batch.columns["proximal"][counted] - batch.columns["behaviour"][counted]
    found = torch.zeros(len(counted))
    found[counted] = sequence_log_ratios(log_ratios, counted_tokens(batch.sequences))
    return found


def shared_out(passes: list[Rows], rank: int, world: int) -> list[Rows]:
    """The samples of every `world`-th pass, and of none where other ranks have one more: sharded ranks work in step."""
    rounds = -(-len(passes) // world)
    mine = passes[rank::world]
    return mine + [torch.zeros(0, dtype=torch.int64)] * (rounds - len(mine))


class Learner:
    """Runs the optimizer steps of one iteration on this rank."""

    def __init__(self, backend: Backend, settings: Settings, batch: Batch, plan: Plan) -> None:
        self.backend = backend
        self.settings = settings
        self.batch = batch
        self.plan = plan
        self.objective = make_objective(batch, settings, backend.device)
        self.rows = len(stat_names(batch.columns, settings))
        self.counts = counted_tokens(batch.sequences)
        self.comparable = self._is_comparable()
        self.work = Work(int((plan.minibatch != LEFT_OUT).sum()))

    def learn(self, version: int, progress: Progress) -> Learned:
        """Take every optimizer step of the iteration that makes `version` + 1.

        While the device computes a minibatch, the host describes the samples of the one before and lays out the one
        after; it waits for the device once, right before the step.

        Raises:
            TrainingFailed: more non-finite steps in a row than the recipe allows.
            EnginesDisagree: server and trainer are further apart than the recipe allows; no step was made.
        """
        self._check_table()
        self.backend.use(self.settings.trainer)
        minibatches = [self._minibatch(number) for number in range(self.settings.minibatches)]
        with aside(self.backend.device) as thread:
            return self._learn(version, progress, minibatches, Ahead(self._passes(minibatches), thread))

    def _learn(self, version: int, progress: Progress, minibatches: list[Minibatch], passes: Ahead[Pass]) -> Learned:
        steps: list[dict[str, Any]] = []
        samples = SampleMeans(len(self.counts))
        done: list[tuple[TokenStats, bool]] = []
        for minibatch in minibatches:
            started = time.perf_counter()
            computed = self._accumulate(minibatch, passes)
            self._describe(done, samples)
            passes.prepare()
            row = self._step(minibatch, computed, progress.step)
            row["step_seconds"] = time.perf_counter() - started
            done.append((computed.stats, self._measures(minibatch.number)))
            progress = Progress(progress.step + 1, progress.skipped_in_row + 1 if row["skipped"] else 0)
            steps.append({"version": version + 1, "step": progress.step, "minibatch": minibatch.number, **row})
            self._check_skipped(progress, row)
        self._describe(done, samples)
        return Learned(steps_table(steps), self._samples_table(samples), summary(steps) | self._ages(), progress)

    def _minibatch(self, number: int) -> Minibatch:
        """Minibatch `number` of the plan."""
        rows = torch.nonzero(self.plan.minibatch == number)[:, 0]
        micro = self.plan.micro_batch[rows]
        passes = [rows[micro == number] for number in torch.unique(micro).tolist()]
        mine = shared_out(passes, self.backend.rank, self.backend.world)
        return Minibatch(number, rows, self._sample_weights(rows), len(passes), mine)

    def _passes(self, minibatches: list[Minibatch]) -> Iterator[Pass]:
        """This rank's passes through all of them, one after the other."""
        device, kind = self.backend.device, self.settings.trainer.layout
        for minibatch in minibatches:
            for rows in minibatch.mine:
                layout = staged(lay_out(self.batch.sequences, rows, kind), device)
                yield Pass(layout, pinned(minibatch.weights[layout.samples], device))

    def _step(self, minibatch: Minibatch, computed: Computed, step: int) -> dict[str, Any]:
        """The optimizer step and its row of `train_steps`. A minibatch without tokens makes none."""
        rows = minibatch.rows
        found = self._statistics(minibatch, computed)
        if minibatch.number == 0:
            self._check_first(found)
        lr = learning_rate(step, self.settings.total_steps, self.settings.trainer)
        norm = self.backend.step(lr, math.isfinite(found["loss"])) if found["tokens"] else 0.0
        return {
            **found,
            "grad_norm": norm,
            "lr": lr,
            "skipped": not (math.isfinite(found["loss"]) and math.isfinite(norm)),
            "total_tokens": int(
                (self.batch.sequences.lengths[rows] - 1).clamp(min=0).sum()
            ),  # the last predicts nothing
            "samples": len(rows),
            "micro_batches": minibatch.passes,
        }

    def _statistics(self, minibatch: Minibatch, computed: Computed) -> dict[str, Any]:
        """What the passes of all ranks found; waits for the device."""
        here = TokenStats(computed.totals.cpu().view(-1, 1), torch.zeros(1, dtype=torch.int64))
        everywhere = over_ranks(self.backend.gather(here).values)
        return step_statistics(everywhere, int(self.counts[minibatch.rows].sum()), self._measures(minibatch.number))

    def _measures(self, number: int) -> bool:
        """Whether the passes of a minibatch tell how far the engines are apart; later ones show the policy's drift."""
        return self.comparable and (number == 0 or "proximal" in self.batch.columns)

    def _is_comparable(self) -> bool:
        """Whether tokens enough, of the minibatches that are compared, were sampled by the policy itself."""
        if self.batch.staleness is None:
            return True
        last = self.settings.minibatches - 1 if "proximal" in self.batch.columns else 0
        compared = (self.plan.minibatch != LEFT_OUT) & (self.plan.minibatch <= last)
        return int((self.batch.staleness.comparable & self._tokens_of(compared)).sum()) >= LEAST_COMPARED

    def _ages(self) -> dict[str, float]:
        """How old the tokens are that were trained on; nothing where they cannot be older than the policy."""
        stale = self.batch.staleness
        return {} if stale is None else staleness_metrics(stale, self._tokens_of(self.plan.minibatch != LEFT_OUT))

    def _tokens_of(self, samples: Bool[Tensor, " B"]) -> Bool[Tensor, " N"]:
        """The tokens of these samples that count."""
        return self.batch.sequences.counted & samples.repeat_interleave(self.batch.sequences.lengths)

    def _describe(self, done: list[tuple[TokenStats, bool]], samples: SampleMeans) -> None:
        """Add what all ranks say of the samples of minibatches that are over."""
        while done:
            stats, measured = done.pop()
            samples.add(self.backend.gather(stats), measured)

    def _sample_weights(self, rows: Int[Tensor, " n"]) -> Float[Tensor, " B"]:
        """The weight of every token of each sample, such that all tokens of the minibatch together weigh 1."""
        counts = self.counts[rows]
        counted = counts > 0
        first = (counts.cumsum(0) - counts)[counted]
        weights = torch.zeros(len(self.counts))
        weights[rows[counted]] = token_weights(counts, self.settings.mean)[first]  # the tokens of a sample weigh alike
        return weights

    def _accumulate(self, minibatch: Minibatch, passes: Ahead[Pass]) -> Computed:
        """Forward and backward through this rank's passes; the gradients add up in the backend.

        Never waits for the device.
        """
        device = self.backend.device
        values, weights = [torch.zeros(self.rows, 0, device=device)], [torch.zeros(0, device=device)]
        samples = [torch.zeros(0, dtype=torch.int64)]
        for number, (rows, taken) in enumerate(zip(minibatch.mine, passes, strict=False), 1):
            loss, last = self._token_loss(taken.layout), number == len(minibatch.mine)
            weights.append(move(taken.weights, device))
            values.append(self.backend.learn(taken.layout, weights[-1], loss, self.settings.temperature, last))
            samples.append(taken.layout.samples)
            self.work.add(len(rows) * self.backend.world)
        found = torch.cat(values, 1)
        return Computed(totals(found, torch.cat(weights)), TokenStats(fetch(found), torch.cat(samples)))

    def _token_loss(self, layout: Layout) -> TokenLoss:
        where = move(layout.where, self.backend.device)
        return lambda logprobs, entropy, part: self.objective(logprobs, entropy, where[part])

    def _check_table(self) -> None:
        """Compare server and trainer over all tokens to be trained on, where the trainer was asked beforehand."""
        if "proximal" in self.batch.columns and self.comparable:
            counted = self._tokens_of(self.batch.kept)
            if self.batch.staleness is not None:
                counted = counted & self.batch.staleness.comparable
            both = [self.batch.columns[name][counted] for name in ("proximal", "behaviour")]
            check_agreement(agreement(gaps(*both), outside(*both)), self.settings.max_logprob_gap, len(both[0]))

    def _check_first(self, found: dict[str, Any]) -> None:
        """The same over the first minibatch, of which the forward and backward pass are done and the step is not."""
        try:
            check_agreement(found, self.settings.max_logprob_gap, found["compared"])
        except EnginesDisagree:
            self.backend.step(0.0, wanted=False)  # forgets the gradient
            raise

    def _check_skipped(self, progress: Progress, row: dict[str, Any]) -> None:
        bound = self.settings.trainer.max_skipped_steps
        if progress.skipped_in_row > bound:
            raise TrainingFailed(
                f"{progress.skipped_in_row} optimizer steps in a row, up to step {progress.step}, were skipped for a "
                f"non-finite loss ({row['loss']}) or gradient norm ({row['grad_norm']}); trainer.max_skipped_steps "
                f"allows {bound}. A lower trainer.lr or trainer.max_grad_norm usually helps."
            )

    def _samples_table(self, samples: SampleMeans) -> pa.Table:
        return make_table(
            "train_samples",
            {
                "sample_id": self.batch.ids,
                "minibatch": self.plan.minibatch.numpy(),
                "micro_batch": self.plan.micro_batch.numpy(),
                **samples.columns(),
            },
        )
