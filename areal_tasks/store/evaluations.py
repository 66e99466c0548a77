"""Evaluations that go on after the commit of their iteration, with η > 0: a later commit names them."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from areal_tasks.store import paths
from areal_tasks.store.backend import Missing
from areal_tasks.store.objects.files import weights_made
from schemas.manifest import IterationCommit, StageRef, WeightsRef

if TYPE_CHECKING:
    from areal_tasks.store.runs import Run

#: In the state of a commit: the iteration, and version of the weights, whose evaluation is under way.
EVALUATING: Final = "evaluating"


def evaluating(commit: IterationCommit) -> int | None:
    """The iteration whose evaluation was under way at a commit."""
    return commit.state.get(EVALUATING)


def stages_of(run: Run, commit: IterationCommit) -> list[StageRef]:
    """The stages that a commit names, and the evaluation of its iteration that a later one names."""
    k, later = commit.iteration, commit
    with suppress(Missing):
        while evaluating(later) == k:
            later = run.commit(later.iteration + 1)
    folder = f"{paths.iteration(commit.run, k)}/stage=evaluate/"
    late = [ref for ref in later.stages if later is not commit and ref.path.startswith(folder)]
    return [*commit.stages, *late]


def evaluated_weights(run: Run, k: int, initial: WeightsRef) -> tuple[WeightsRef, WeightsRef]:
    """The weights that the committed iteration `k` began with: as its stages know them, and in the store, if there."""
    if k == 0:
        return initial, initial
    before, restored = run.commit(k - 1), run.commit(k).restored
    return (restored, restored) if restored else (before.weights, weights_made(run, before))
