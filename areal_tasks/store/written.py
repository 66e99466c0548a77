"""Which weights of a run the store has: versions that were handed to the servers directly need not be there."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from areal_tasks.store.backend import Missing
from schemas.manifest import IterationCommit, WeightsRef

if TYPE_CHECKING:
    from areal_tasks.store.runs import Run


def newest_written(run: Run, head: IterationCommit) -> WeightsRef | None:
    """The newest weights that the store has and `head` or a commit before it names; looks back one interval at most."""
    commit = head
    while (found := _newest(commit)) is None and commit.iteration:
        commit = run.commit(commit.iteration - 1)
    return found


def _newest(commit: IterationCommit) -> WeightsRef | None:
    return commit.weights if commit.weights.written else commit.published


def weights_made(run: Run, commit: IterationCommit) -> WeightsRef:
    """The weights that an iteration made: with η > 0 they may have been written after its commit."""
    if not commit.weights.written:
        with suppress(Missing):
            return run.commit(commit.iteration + 1).published or commit.weights
    return commit.weights
