"""Which files are needed: by commits, running flows, children or tags. `gc` removes none of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from areal_tasks.store import paths
from areal_tasks.store.backend import Store
from areal_tasks.store.commit import last_present, read_record
from areal_tasks.store.history.journal import end_of_start
from areal_tasks.store.objects.inventory import Entry, entries, store_time
from areal_tasks.store.reachable import attempts_of, history, named_weights, pending_evaluation, reachable
from areal_tasks.store.runs import Run, load_run, run_names
from areal_tasks.store.weights import read_tags
from schemas.manifest import IterationCommit, Reference, StageManifest, WeightsManifest, WeightsRef

#: A reference is written before its child is created: for this long, it counts although the child does not exist.
REFERENCE_SECONDS: Final = 3600.0
#: A run that has written nothing for this long is not running, whatever its log says.
IDLE_SECONDS: Final = 7 * 24 * 3600.0


@dataclass(frozen=True)
class Version:
    """Weights or a checkpoint that has a manifest: `kind` is `weights` or `checkpoint`."""

    kind: str
    version: int
    attempt: str
    path: str

    @property
    def folder(self) -> str:
        """The folder of its files."""
        return self.path.removesuffix(".json")


@dataclass(frozen=True)
class RunFiles:
    """One run for `gc`: all of its files with their times, and what its records say."""

    run: Run
    files: tuple[Entry, ...]
    now: float

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def store(self) -> Store:
        return self.run.store

    @cached_property
    def by_path(self) -> dict[str, Entry]:
        return {entry.path: entry for entry in self.files}

    @cached_property
    def attempts(self) -> dict[str, list[Entry]]:
        """The files of each attempt's folder."""
        groups: dict[str, list[Entry]] = {}
        for entry in self.files:
            if folder := paths.attempt_folder(entry.path):
                groups.setdefault(folder, []).append(entry)
        return groups

    @cached_property
    def newest(self) -> float:
        """When anything of the run was last written."""
        return max((entry.modified for entry in self.files), default=0.0)

    @cached_property
    def owner(self) -> int:
        """The last start of the flow; 0 if there was none."""
        return last_present(lambda n: paths.owner(self.name, n) in self.by_path, 1)

    @cached_property
    def owner_since(self) -> float:
        """When the last start of the flow claimed the run; it wrote no older file."""
        return self.by_path[paths.owner(self.name, self.owner)].modified if self.owner else 0.0

    @cached_property
    def ended(self) -> bool:
        """Whether the log says that the last start of the flow has ended. A start that is killed logs nothing."""
        return end_of_start(self.store, self.name, self.owner) is not None

    @cached_property
    def may_write(self) -> bool:
        """Whether the last start of the flow may still be writing."""
        return not self.ended and self.now - self.newest < IDLE_SECONDS

    @cached_property
    def commits(self) -> list[IterationCommit]:
        """All commits that the run has, its parents' included."""
        return history(self.run)

    @cached_property
    def versions(self) -> list[Version]:
        """The weights and checkpoints in the run's folder that have a manifest."""
        found = []
        for path in self.by_path:
            with suppress(ValueError):
                found.append(Version(*paths.version_of(path), path))
        return found

    @cached_property
    def initial(self) -> list[str]:
        """The manifests of version 0 that the run's stage `initialise` has put into the store."""
        folder = f"{paths.iteration(self.name, self.run.first)}/stage=initialise/"
        found = [path for path in self.by_path if path.startswith(folder) and path.count("/") == 3]
        manifests = [read_record(self.store, path, StageManifest) for path in found if path.endswith(".json")]
        return [named_weights(self.store, manifest).path for manifest in manifests]

    @cached_property
    def borrowed(self) -> set[str]:
        """The folders of attempts of other runs whose files are this run's initial weights (`run://NAME`)."""
        first = [v.path for v in self.versions if (v.kind, v.version) == ("weights", 0)]
        folders = {one for path in first for one in attempts_of(path, read_record(self.store, path, WeightsManifest))}
        return {folder for folder in folders if not folder.startswith(f"{self.name}/")}

    @cached_property
    def references(self) -> list[Reference]:
        """The references of children that exist or may be about to begin."""
        found = []
        for entry in entries(self.store, f"{self.name}/references"):
            if entry.path.endswith(".json"):  # not one that is being written
                reference = read_record(self.store, entry.path, Reference)
                begun = self.store.exists(paths.run_record(reference.child))
                ended = self.store.exists(paths.run_tombstone(reference.child))
                if begun or (not ended and self.now - entry.modified < REFERENCE_SECONDS):
                    found.append(reference)
        return found


def read_run_files(store: Store, name: str, now: float) -> RunFiles:
    """The run `name` with all files in its folder."""
    return RunFiles(load_run(store, name), tuple(entries(store, name)), now)


def read_all_run_files(store: Store) -> dict[str, RunFiles]:
    """All runs of the store, by name."""
    now = store_time(store)
    return {name: read_run_files(store, name, now) for name in run_names(store)}


def selected_weights(runs: Iterable[RunFiles]) -> set[str]:
    """The manifests of weights and checkpoints that any commit, or any stage `initialise`, names."""
    return {path for run in runs for path in (*reachable(run.commits, WeightsRef), *run.initial)}


def needed_weights(runs: Collection[RunFiles]) -> set[str]:
    """The manifests of weights and checkpoints of these runs that no retention rule may touch.

    They are what a restart of any run loads, what children refer to, what other runs began with, and what is tagged. A
    fork's history is its parent's too, so that a tag or a reference in the fork may mean files of its parent.
    """
    borrowed = {folder for run in runs for folder in run.borrowed}
    tagged = {(tag.version, tag.weights_attempt) for run in runs for tag in read_tags(run.store, run.name)}
    found = set[str]()
    for run in runs:
        found |= {v.path for v in run.versions if v.kind == "weights" and (v.version, v.attempt) in tagged}
        found |= {v.path for v in run.versions if v.folder in borrowed}
        for reference in run.references:  # read before the commits that they refer to
            found |= _referred(run, reference)
        found |= _restart(run.commits) | set(run.initial)
    return found


def _restart(commits: Sequence[IterationCommit]) -> set[str]:
    """The weights and the checkpoint that a start after the last of `commits` loads, and those it has to evaluate."""
    made = [ref for commit in commits for ref in (commit.published, commit.weights) if ref is not None and ref.written]
    last = [ref for commit in commits[-1:] for ref in commit.stored]
    return {ref.path for ref in (*made[-1:], *last, *_evaluating(commits))}


def _evaluating(commits: Sequence[IterationCommit]) -> list[WeightsRef]:
    """The stored weights whose evaluation had not ended at the last of `commits`."""
    if not commits or (k := pending_evaluation(commits[-1])) is None:
        return []
    around = [commit for commit in commits if commit.iteration in (k - 1, k)]
    return [ref for commit in around for ref in commit.stored if ref.version == k]


def _referred(run: RunFiles, reference: Reference) -> set[str]:
    """What a child needs: a fork, what a start at its iteration loads; a replay, the whole history before that."""
    shared = run.commits[: reference.iteration]
    if reference.kind == "fork":
        return _restart(shared)
    if reference.kind == "weights":
        around = run.commits[reference.iteration - 1 : reference.iteration + 1]  # the later one may name them
        return {ref.path for commit in around for ref in commit.stored if ref.version == reference.iteration}
    return set(reachable(shared, WeightsRef))
