"""One iteration of training: the plan of its minibatches, the optimizer steps, and their metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from areal_tasks.algorithms.behaviour import sequence_log_ratios
from areal_tasks.algorithms.losses import token_weights
from areal_tasks.data.batching import LEFT_OUT, Layout, counted_tokens, make_layout
from areal_tasks.engines.trainer import metrics, objective
from areal_tasks.engines.trainer.checkpoint import Progress
from areal_tasks.engines.trainer.fencing import Declined
from areal_tasks.engines.trainer.forward import ahead, fetch, move, pinned, staged
from areal_tasks.engines.trainer.head import TokenLoss
from areal_tasks.engines.trainer.local import LocalBackend
from areal_tasks.engines.trainer.memory import peak_bytes, watch_peak
from areal_tasks.engines.trainer.optimizer import learning_rate
from areal_tasks.engines.trainer.plan import Plan, Rows, passes_of, passes_of_rank
from areal_tasks.engines.trainer.rows import LEAST_COMPARED, Batch, make_table, staleness_metrics, staleness_totals
from areal_tasks.engines.trainer.settings import Settings
from schemas.errors import UserError
from schemas.tables import TRAIN_STEPS


@dataclass
class Work:
    """How many of a command's samples the model has processed, over all ranks, as estimated by one rank."""

    of: int = 0
    done: int = 0

    def add(self, samples: int) -> None:
        self.done = min(self.of, self.done + samples)


@dataclass(frozen=True)
class Minibatch:
    """The plan of an optimizer step: its samples, the weight of each sample's tokens, and this rank's passes."""

    number: int
    rows: Rows
    weights: Float[Tensor, " B"]
    passes: int  # over all ranks
    mine: list[Rows]


#: The input of a forward and backward pass: its layout and token weights, page-locked if a GPU computes it.
Pass = tuple[Layout, Float[Tensor, " T"]]


@dataclass(frozen=True)
class Learned:
    """The results of an iteration: its two tables, their summary, and the progress."""

    train_steps: pa.Table
    train_samples: pa.Table
    metrics: dict[str, float]
    progress: Progress


def make_objective(batch: Batch, settings: Settings, device: torch.device) -> objective.Objective:
    """The objective that is minimised over `batch`, with its columns on `device`."""
    if settings.kind == "sft":
        return objective.sft_objective
    more = {"log_ratio": _sequence_log_ratios(batch)} if settings.sequence_weights else {}
    columns = {name: move(column, device) for name, column in (batch.columns | more).items()}
    return objective.grpo_objective(columns, settings)


def _sequence_log_ratios(batch: Batch) -> Float[Tensor, " N"]:
    """log π_proximal / π_behaviour of each token's whole sample, from the table `proximal`; 0 at uncounted tokens."""
    counted = batch.sequences.counted
    log_ratios = batch.columns["proximal"][counted] - batch.columns["behaviour"][counted]
    found = torch.zeros(len(counted))
    found[counted] = sequence_log_ratios(log_ratios, counted_tokens(batch.sequences, batch.rows))
    return found


class Learner:
    """Runs the optimizer steps of one iteration on this rank; `batch` must hold the tokens of its samples.

    All ranks make a `Learner` at the same time, since they exchange numbers of tokens. `same_attempt`: as of `Train`.
    """

    def __init__(
        self, backend: LocalBackend, settings: Settings, batch: Batch, plan: Plan, same_attempt: bool = True
    ) -> None:
        self.backend = backend
        self.settings = settings
        self.batch = batch
        self.plan = plan
        self.objective = make_objective(batch, settings, backend.device)
        self.rows = len(objective.stat_names(batch.columns, settings))
        self.counts = torch.zeros_like(batch.lengths)  # how many tokens of each sample count
        self.counts[batch.rows] = counted_tokens(batch.sequences, batch.rows)
        backend.add_up(self.counts)
        self.comparable = same_attempt and self._is_comparable()
        self.work = Work(int((plan.minibatch != LEFT_OUT).sum()))

    def learn(self, version: int, progress: Progress) -> Learned:
        """Take every optimizer step of the iteration that makes `version` + 1.

        While the device computes a minibatch, the host collects sample statistics of the previous one and lays out the
        next; it waits for the device once, right before the step. UserError: more non-finite steps in a row than the
        recipe allows. Declined: logprobs of server and trainer differ more than it allows; no step was made.
        """
        self._check_table()
        self.backend.use(self.settings.trainer)
        minibatches = [self._minibatch(number) for number in range(self.settings.minibatches)]
        with ahead(self._passes(minibatches), self.backend.device) as passes:
            return self._learn(version, progress, minibatches, passes)

    def _learn(self, version: int, progress: Progress, minibatches: list[Minibatch], passes: Iterator[Pass]) -> Learned:
        steps: list[dict[str, Any]] = []
        samples = metrics.SampleMeans(len(self.counts))
        done: list[tuple[metrics.TokenStats, bool]] = []
        peaks: list[int] = []
        for minibatch in minibatches:
            started = time.perf_counter()
            watch_peak(self.backend.device)
            of_all, of_each = self._accumulate(minibatch, passes)
            self._collect(done, samples)
            row = self._step(minibatch, of_all, progress.step)
            row["step_seconds"] = time.perf_counter() - started
            peaks.append(peak_bytes(self.backend.device))
            done.append((of_each, self._measures(minibatch.number)))
            progress = Progress(progress.step + 1, progress.skipped_in_row + 1 if row["skipped"] else 0)
            steps.append({"version": version + 1, "step": progress.step, "minibatch": minibatch.number, **row})
            self._check_skipped(progress, row)
        self._collect(done, samples)
        self.backend.add_up(samples.parts)
        for row, of_ranks in zip(steps, self._of_ranks([float(peak) for peak in peaks]), strict=True):
            row["peak_bytes"] = [int(peak) for peak in of_ranks]
        planned = {"minibatch": self.plan.minibatch.numpy(), "micro_batch": self.plan.micro_batch.numpy()}
        train_samples = make_table("train_samples", {"sample_id": self.batch.ids, **planned, **samples.columns()})
        train_steps = make_table("train_steps", {name: [row[name] for row in steps] for name in TRAIN_STEPS.names})
        return Learned(train_steps, train_samples, metrics.summary(steps) | self._ages(), progress)

    def _minibatch(self, number: int) -> Minibatch:
        """Minibatch `number` of the plan: all its tokens together weigh 1."""
        rows = torch.nonzero(self.plan.minibatch == number)[:, 0]
        counts = self.counts[rows]
        counted = counts > 0
        first = (counts.cumsum(0) - counts)[counted]
        weights = torch.zeros(len(self.counts))
        weights[rows[counted]] = token_weights(counts, self.settings.mean)[first]  # equal for all tokens of a sample
        mine = passes_of_rank(self.plan, number, self.backend.rank, self.backend.world)
        return Minibatch(number, rows, weights, passes_of(self.plan, number), mine)

    def _passes(self, minibatches: list[Minibatch]) -> Iterator[Pass]:
        """This rank's passes over all minibatches, in order."""
        device, kind = self.backend.device, self.settings.trainer.layout
        for minibatch in minibatches:
            for rows in minibatch.mine:
                layout = staged(make_layout(self.batch.sequences, rows, kind), device)
                yield layout, pinned(minibatch.weights[layout.samples], device)

    def _step(self, minibatch: Minibatch, of_all: Float[Tensor, "3 K"], step: int) -> dict[str, Any]:
        """Make the optimizer step, unless no token counts; returns its row of `train_steps`."""
        rows = minibatch.rows
        overall = metrics.over_ranks(self.backend.of_ranks(of_all.cpu().flatten()))  # waits for the device
        found = metrics.step_statistics(overall, int(self.counts[rows].sum()), self._measures(minibatch.number))
        if minibatch.number == 0:
            try:
                objective.check_agreement(found, self.settings.max_logprob_gap, found["compared"])
            except Declined:
                self.backend.step(0.0, wanted=False)  # discards the gradient
                raise
        lr = learning_rate(step, self.settings.total_steps, self.settings.trainer)
        norm = self.backend.step(lr, math.isfinite(found["loss"])) if found["tokens"] else 0.0
        return {
            **found,
            "grad_norm": norm,
            "lr": lr,
            "skipped": not (math.isfinite(found["loss"]) and math.isfinite(norm)),
            "total_tokens": int((self.batch.lengths[rows] - 1).clamp(min=0).sum()),  # the last token predicts nothing
            "samples": len(rows),
            "micro_batches": minibatch.passes,
        }

    def _of_ranks(self, mine: Sequence[float]) -> list[list[float]]:
        """For each of these numbers, a list with those of all ranks."""
        found: list[list[float]] = self.backend.of_ranks(torch.tensor(mine, dtype=torch.float64)).tolist()
        return found

    def _measures(self, number: int) -> bool:
        """Whether a minibatch measures the engines' agreement; without `proximal` later ones would show the drift."""
        return self.comparable and (number == 0 or "proximal" in self.batch.columns)

    def _is_comparable(self) -> bool:
        """Whether enough tokens of the compared minibatches were sampled by the policy itself."""
        if self.batch.staleness is None:
            return True
        last = self.settings.minibatches - 1 if "proximal" in self.batch.columns else 0
        compared = (self.plan.minibatch != LEFT_OUT) & (self.plan.minibatch <= last)
        mine = float((self.batch.staleness.comparable & self._tokens_of(compared)).sum())
        return sum(self._of_ranks([mine])[0]) >= LEAST_COMPARED

    def _ages(self) -> dict[str, float]:
        """Staleness of the tokens that were trained on; empty if they cannot be older than the policy."""
        if self.batch.staleness is None:
            return {}
        mine = staleness_totals(self.batch.staleness, self._tokens_of(self.plan.minibatch != LEFT_OUT))
        return staleness_metrics(self._of_ranks(mine))

    def _tokens_of(self, samples: Bool[Tensor, " B"]) -> Bool[Tensor, " N"]:
        """A mask of this rank's tokens: the counted tokens of these samples."""
        here = self.batch.rows
        return self.batch.sequences.counted & samples[here].repeat_interleave(self.batch.lengths[here])

    def _collect(self, done: list[tuple[metrics.TokenStats, bool]], samples: metrics.SampleMeans) -> None:
        """Add this rank's statistics of finished minibatches to `samples`."""
        while done:
            samples.add(*done.pop())

    def _accumulate(
        self, minibatch: Minibatch, passes: Iterator[Pass]
    ) -> tuple[Float[Tensor, "3 K"], metrics.TokenStats]:
        """Run this rank's forward and backward passes; the backend accumulates the gradients.

        Returns the totals of their tokens, and the statistics of each in host memory, which are valid once the device
        is synchronised: this does not wait for it.
        """
        device = self.backend.device
        values, weights = [torch.zeros(self.rows, 0, device=device)], [torch.zeros(0, device=device)]
        samples = [torch.zeros(0, dtype=torch.int64)]
        for number, (rows, (layout, of_tokens)) in enumerate(zip(minibatch.mine, passes, strict=False), 1):
            loss, last = self._token_loss(layout), number == len(minibatch.mine)
            weights.append(move(of_tokens, device))
            values.append(self.backend.learn(layout, weights[-1], loss, self.settings.temperature, last))
            samples.append(layout.samples)
            self.work.add(len(rows) * self.backend.world)
        found = torch.cat(values, 1)
        return metrics.totals(found, torch.cat(weights)), metrics.TokenStats(fetch(found), torch.cat(samples))

    def _token_loss(self, layout: Layout) -> TokenLoss:
        where = move(layout.where, self.backend.device)
        return lambda logprobs, entropy, part: self.objective(logprobs, entropy, where[part])

    def _check_table(self) -> None:
        """Check the agreement over all tokens to train on, if the table `proximal` holds the trainer's logprobs."""
        if "proximal" in self.batch.columns and self.comparable:
            counted = self._tokens_of(self.batch.kept)
            if self.batch.staleness is not None:
                counted = counted & self.batch.staleness.comparable
            both = [self.batch.columns[name][counted] for name in ("proximal", "behaviour")]
            tokens, gaps, largest, outside = self._of_ranks(objective.agreement_totals(objective.differences(*both)))
            found = objective.agreement(sum(tokens), sum(gaps), float(np.max(largest)), sum(outside))  # NaN if one is
            objective.check_agreement(found, self.settings.max_logprob_gap, int(sum(tokens)))

    def _check_skipped(self, progress: Progress, row: dict[str, Any]) -> None:
        bound = self.settings.trainer.max_skipped_steps
        if progress.skipped_in_row > bound:
            raise UserError(
                f"{progress.skipped_in_row} optimizer steps in a row, up to step {progress.step}, were skipped for a "
                f"non-finite loss ({row['loss']}) or gradient norm ({row['grad_norm']}); trainer.max_skipped_steps "
                f"allows {bound}. A lower trainer.lr or trainer.max_grad_norm usually helps."
            )
