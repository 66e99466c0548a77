"""Evaluations that end after the commit of their iteration, with η > 0: a later commit names them."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from areal_tasks.store import paths
from areal_tasks.store.backend import Missing
from areal_tasks.store.objects.files import written_weights
from schemas.manifest import IterationCommit, StageRef, WeightsRef

if TYPE_CHECKING:
    from areal_tasks.store.runs import Run

#: Key in the state of a commit: the iteration (and version of the weights) whose evaluation has not ended.
EVALUATING: Final = "evaluating"


def pending_evaluation(commit: IterationCommit) -> int | None:
    """The iteration whose evaluation had not ended at a commit."""
    return commit.state.get(EVALUATING)


def stages_of(run: Run, commit: IterationCommit) -> list[StageRef]:
    """The stages that a commit names, and the evaluation of its iteration that a later one names."""
    k, later = commit.iteration, commit
    with suppress(Missing):
        while pending_evaluation(later) == k:
            later = run.commit(later.iteration + 1)
    folder = f"{paths.iteration(commit.run, k)}/stage=evaluate/"
    late = [ref for ref in later.stages if later is not commit and ref.path.startswith(folder)]
    return [*commit.stages, *late]


def evaluated_weights(run: Run, k: int, initial: WeightsRef) -> tuple[WeightsRef, WeightsRef]:
    """The weights with which the committed iteration `k` began: as its stages name them, and as the store has them."""
    if k == 0:
        return initial, initial
    before, restored = run.commit(k - 1), run.commit(k).restored
    return (restored, restored) if restored else (before.weights, written_weights(run, before))
