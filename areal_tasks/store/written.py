"""Which weights of a run the store has: versions that were handed to the servers directly need not be there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schemas.manifest import IterationCommit, WeightsRef

if TYPE_CHECKING:
    from areal_tasks.store.runs import Run


def newest_written(run: Run, head: IterationCommit) -> WeightsRef | None:
    """The newest weights that `head` or a commit before it made and the store has; looks back one interval at most."""
    commit = head
    while not commit.weights.written and commit.iteration:
        commit = run.commit(commit.iteration - 1)
    return commit.weights if commit.weights.written else None
