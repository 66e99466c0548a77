"""Which weights of a run the store has: a commit names those of its own iteration, or of earlier ones written since.

What is written in the background comes in the order of versions, so the last commit that names any names the newest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from schemas.manifest import IterationCommit, WeightsRef

if TYPE_CHECKING:
    from areal_tasks.store.runs import Run


def newest_written(run: Run, head: IterationCommit) -> WeightsRef | None:
    """The newest weights that `head` or a commit before it names as written; looks back one interval or two."""
    commit = head
    while not commit.written_weights and commit.iteration:
        commit = run.commit(commit.iteration - 1)
    return commit.written_weights[-1] if commit.written_weights else None


def written_version(run: Run, version: int, head: IterationCommit) -> WeightsRef | None:
    """The weights of one version (from 1), if `head` or a commit before it names them as written.

    Reads on from the commit that made them until one names a later version.
    """
    for k in range(version - 1, head.iteration + 1):
        named = run.commit(k).written_weights
        if any(ref.version >= version for ref in named):
            return next((ref for ref in named if ref.version == version), None)
    return None
