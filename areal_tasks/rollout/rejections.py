"""Rejected groups: those that are not recorded yet, counts by reason, and the limits that end a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final

from areal_tasks.rollout.filters import kind_of
from schemas.errors import UserError
from schemas.manifest import RejectedGroup
from schemas.recipe.sections import Rollout

STALE: Final = "stale"  # the reason of groups for which changed settings have no room
BATCHES = 10  # so many batches of groups may be rejected before one is filled, if the recipe sets no limit


@dataclass
class Rejections:
    """The rejected groups of one start of the flow, and those of earlier starts that no commit counts."""

    limits: Rollout
    unrecorded: dict[int, RejectedGroup] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)  # by reason, in the metrics of no commit yet
    failed: int = 0
    _reported: Counter[str] = field(default_factory=Counter)  # in the metrics of the iteration in progress
    _filtered: list[RejectedGroup] = field(default_factory=list)  # since a batch was last filled
    _kept: int = 0  # groups of the batch that is being filled

    def add(self, group: RejectedGroup) -> UserError | None:
        """Add a rejected group. Returns the error that must end the run if there are too many now."""
        self.unrecorded[group.index] = group
        self.counts[kind_of(group.reason)] += 1
        if is_failed(group):
            self.failed += 1
            return self._too_many_failed(group) if self.failed > self.limits.max_failed_groups else None
        if not is_filtered(group):
            return None
        self._filtered.append(group)
        return self._too_many_filtered() if len(self._filtered) >= self.most_filtered else None

    def restore(self, rejected: Sequence[RejectedGroup], waiting: int) -> None:
        """Count groups that earlier starts of the flow have recorded since the last commit.

        `waiting`: the number of those that finished and wait for an iteration.
        """
        self.counts.update(kind_of(group.reason) for group in rejected)
        self._kept = waiting % self.limits.groups
        if waiting < self.limits.groups:  # else a batch is filled
            self._filtered += filter(is_filtered, rejected)

    def keep(self) -> None:
        """Count a finished group that was not rejected."""
        self._kept += 1
        if self._kept >= self.limits.groups:
            self._kept = 0
            self._filtered.clear()

    @property
    def most_filtered(self) -> int:
        """The number of groups that filters may reject before a batch is filled; more end the run."""
        return self.limits.filters.max_rejected or BATCHES * self.limits.groups

    def by_filters(self) -> dict[int, RejectedGroup]:
        """Groups that filters, or changed settings, rejected and that are not recorded yet.

        Unlike failed groups, they never begin again.
        """
        return {index: group for index, group in self.unrecorded.items() if not is_failed(group)}

    def record(self, indices: Iterable[int]) -> None:
        """Note that these groups are recorded in the spool."""
        for index in indices:
            self.unrecorded.pop(index, None)

    def metrics(self) -> dict[str, float]:
        """Metrics of the iteration that takes its groups now: groups rejected since the last one, by reason."""
        self._reported = Counter(self.counts)
        return {f"rejected_{kind}": float(count) for kind, count in sorted(self._reported.items())}

    def committed(self) -> None:
        """Note that the iteration that read `metrics` has committed them."""
        self.counts, self._reported = self.counts - self._reported, Counter()

    def _too_many_failed(self, last: RejectedGroup) -> UserError:
        attempts, most = self.limits.group_attempts, self.limits.max_failed_groups
        why, remedy = last.reason.removeprefix("failed: "), "Correct the workflow and run this again"
        if not most:
            return UserError(
                f"group {last.index} has failed in {attempts} attempts: {why}. One such group ends an evaluation, and "
                f"training where rollout.max_failed_groups is 0. {remedy}"
            )
        return UserError(
            f"{self.failed} of the groups have failed in {attempts} attempts each, more than "
            f"rollout.max_failed_groups = {most}. The last one, group {last.index}: {why}. "
            f"{remedy}: the groups begin again"
        )

    def _too_many_filtered(self) -> UserError:
        failed = f"; {self.failed} others have failed" if self.failed else ""
        return UserError(
            f"rollout.filters have rejected {len(self._filtered)} groups while no batch of {self.limits.groups} was "
            f"filled: {summary(self._filtered)}{failed}. Let them reject less, or change the data or the reward; or "
            f"raise rollout.filters.max_rejected ({self.most_filtered}) to continue"
        )


def is_failed(group: RejectedGroup) -> bool:
    """Whether the group was rejected because its attempts failed, and not by a filter."""
    return kind_of(group.reason) == "failed"


def is_filtered(group: RejectedGroup) -> bool:
    """Whether a filter rejected the group."""
    return kind_of(group.reason) not in ("failed", STALE)


def summary(groups: Iterable[RejectedGroup]) -> str:
    """How many groups were rejected for which reason, the most frequent first, with the mean of their rewards."""
    rewards: dict[str, list[float | None]] = {}
    for group in groups:
        rewards.setdefault(kind_of(group.reason), []).append(group.reward)
    ordered: Mapping[str, list[float | None]] = dict(sorted(rewards.items(), key=lambda item: -len(item[1])))
    return ", ".join(f"{len(found)} by {kind}{_mean(found)}" for kind, found in ordered.items())


def _mean(rewards: Iterable[float | None]) -> str:
    known = [reward for reward in rewards if reward is not None]
    return f" (mean reward {fmean(known):.3g})" if known else ""


def stale_reason(why: str) -> str:
    """The reason for which a finished group is rejected that a change, `why`, leaves no room for."""
    return f"{STALE}: {why}"
