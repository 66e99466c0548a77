"""The files that a run references. Commits name manifests of stages, weights and checkpoints; these and the records of
the spool and of compactions name files, which lie in folders of attempts.

`audit` checks reachable files and `gc` keeps them; SQL, forks, lists of weights and `diff` read a part of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeVar

from areal_tasks.store import paths
from areal_tasks.store.backend import Missing, Store
from areal_tasks.store.objects.files import weights_ref
from areal_tasks.store.shards import read_table
from schemas.compaction import Compaction
from schemas.manifest import FileRef, IterationCommit, SpoolRecord, StageManifest, StageRef, WeightsManifest, WeightsRef

if TYPE_CHECKING:
    from areal_tasks.store.runs import Run

#: The table that names version 0, which no commit does.
INITIAL: Final = "initial_weights"
Ref = TypeVar("Ref", bound=StageRef | WeightsRef)
#: By the path of a manifest, its reference in the first commit that names it, and that commit.
Reached = dict[str, tuple[Ref, IterationCommit]]


def history(run: Run) -> list[IterationCommit]:
    """All commits of a run in order, its parents' included. StoreError if one is missing, damaged or replaced."""
    return run.commits(0, run.checked_committed())


def reachable(commits: Iterable[IterationCommit], kind: type[Ref]) -> Reached[Ref]:
    """The manifests that these commits name: of stages, or by `WeightsRef` of stored weights and checkpoints."""
    found: Reached[Ref] = {}
    for commit in commits:
        for ref in (*commit.stages, *commit.stored):
            if isinstance(ref, kind):
                found.setdefault(ref.path, (ref, commit))
    return found


def named_weights(store: Store, manifest: StageManifest) -> WeightsRef:
    """The weights that the one row of a stage's table names, such as `publish`; it has no digest of their manifest."""
    [table] = manifest.tables.values()
    row = read_table(store, table, ("version", "weights_attempt", "materialised", "sha256")).to_pylist()[0]
    version, attempt = row["version"], row["weights_attempt"] if row["materialised"] else ""
    path = paths.weights(manifest.run, version, attempt) if attempt else ""
    return WeightsRef(version=version, attempt=attempt, path=path, sha256="", digest=row["sha256"])


def published_weights(store: Store, manifest: StageManifest) -> WeightsRef:
    """As `named_weights`, with the digest of their manifest, which is in the run that wrote the row."""
    ref = named_weights(store, manifest)
    return weights_ref(store, ref.path) if ref.written else ref


def files_of(record: StageManifest | WeightsManifest | SpoolRecord | Compaction) -> list[FileRef]:
    """The files that a record names."""
    if isinstance(record, WeightsManifest):
        return list(record.files)
    if isinstance(record, Compaction):
        return [file for merged in record.tables.values() for file in merged.files]
    return [shard for table in record.tables.values() for shard in table.shards]


def attempts_of(path: str, record: StageManifest | WeightsManifest | SpoolRecord | Compaction) -> set[str]:
    """The folders of the files that the record at `path` names; its own attempt's too, even if that holds none."""
    own = f"{path.rsplit('/', 1)[0]}/attempt={record.attempt}"
    return {own, *(paths.attempt_folder(file.path) for file in files_of(record))}


# ── what a later commit names: with η > 0, weights are written and evaluations end after that of their iteration ──────


#: Key in the state of a commit: the iteration (and version of the weights) whose evaluation has not ended.
EVALUATING: Final = "evaluating"


def newest_written(run: Run, head: IterationCommit) -> WeightsRef | None:
    """The newest written weights that `head` or an earlier commit names; looks back one write interval at most."""
    commit = head
    while not commit.weights.written and commit.published is None and commit.iteration:
        commit = run.commit(commit.iteration - 1)
    return commit.weights if commit.weights.written else commit.published


def written_weights(run: Run, commit: IterationCommit) -> WeightsRef:
    """The weights that an iteration made, as the store has them: with η > 0 the next commit may name them."""
    if not commit.weights.written:
        with suppress(Missing):
            return run.commit(commit.iteration + 1).published or commit.weights
    return commit.weights


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
