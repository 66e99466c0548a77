"""Which files are needed: by commits, running flows, children or tags. `gc` removes none of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from areal_tasks.store import paths
from areal_tasks.store.backend import Store
from areal_tasks.store.commit import find_record, read_record
from areal_tasks.store.history.journal import read_log
from areal_tasks.store.objects.inventory import Entry, entries
from areal_tasks.store.parallel import parallel
from areal_tasks.store.retention.tags import read_tags
from areal_tasks.store.runs import Run, load_run
from areal_tasks.store.search import last_present
from areal_tasks.store.shards import read_table
from schemas.manifest import IterationCommit, Reference, RunRecord, StageManifest, WeightsManifest

#: A reference is left before its child begins: for this long, it counts although the child does not exist yet.
REFERENCE_SECONDS: Final = 3600.0
#: A run that has written nothing for this long is not running, whatever its log says.
IDLE_SECONDS: Final = 7 * 24 * 3600.0
_ENDED: Final = ("finished", "failed", "cancelled", "suspended", "interrupted")
_WEIGHTS: Final = re.compile(r"(?P<kind>weights|checkpoints)/version=(?P<version>\d+)/attempt=(?P<attempt>\w+)\.json")


@dataclass(frozen=True)
class Version:
    """Weights or a checkpoint that has a manifest: `kind` is `weights` or `checkpoint`."""

    kind: str
    version: int
    attempt: str
    path: str


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
    def newest(self) -> float:
        """When anything of the run was last written."""
        return max((entry.modified for entry in self.files), default=0.0)

    @cached_property
    def owner_since(self) -> float:
        """When the last start of the flow claimed the run; it wrote no older file."""
        n = last_present(lambda n: paths.owner(self.name, n) in self.by_path, 1)
        return self.by_path[paths.owner(self.name, n)].modified if n else 0.0

    @cached_property
    def ended(self) -> bool:
        """Whether the log says that the last start of the flow has ended. A start that is killed logs nothing."""
        owner = last_present(lambda n: paths.owner(self.name, n) in self.by_path, 1)
        lines = read_log(self.store, self.name)
        return any(line.action in _ENDED and line.details.get("owner") == owner for line in lines)

    @cached_property
    def may_write(self) -> bool:
        """Whether the last start of the flow may still be writing."""
        return not self.ended and self.now - self.newest < IDLE_SECONDS

    @cached_property
    def commits(self) -> list[IterationCommit]:
        """All commits that the run has, its parents' included."""
        head = self.run.head()
        return parallel(self.run.commit, range(head.iteration + 1)) if head else []

    @cached_property
    def versions(self) -> list[Version]:
        """The weights and checkpoints in the run's folder that have a manifest."""
        found = []
        for path in self.by_path:
            if match := _WEIGHTS.fullmatch(path.removeprefix(f"{self.name}/")):
                kind = "checkpoint" if match["kind"] == "checkpoints" else "weights"
                found.append(Version(kind, int(match["version"]), match["attempt"], path))
        return found

    @cached_property
    def initial(self) -> list[str]:
        """The manifests of version 0 that the run's stage `initialise` has put into the store."""
        folder = f"{paths.iteration(self.name, self.run.first)}/stage=initialise/"
        found = [path for path in self.by_path if path.startswith(folder) and path.count("/") == 3]
        manifests = [read_record(self.store, path, StageManifest) for path in found if path.endswith(".json")]
        return [_initial_path(self.store, manifest) for manifest in manifests]

    @cached_property
    def tagged(self) -> set[tuple[int, str]]:
        return {(tag.version, tag.weights_attempt) for tag in read_tags(self.store, self.name)}

    @cached_property
    def references(self) -> list[Reference]:
        return live_references(self.store, self.name, self.now)


def _initial_path(store: Store, manifest: StageManifest) -> str:
    row = read_table(store, manifest.tables["initial_weights"], ("version", "weights_attempt")).to_pylist()[0]
    return paths.weights(manifest.run, row["version"], row["weights_attempt"])


def read_run(store: Store, name: str, now: float) -> RunFiles:
    """The run `name` with all files in its folder."""
    return RunFiles(load_run(store, name), tuple(entries(store, name)), now)


def selected(runs: Sequence[RunFiles]) -> set[str]:
    """The manifests of weights and checkpoints that any commit, or any stage `initialise`, names."""
    refs = [ref for run in runs for commit in run.commits for ref in commit.stored]
    return {ref.path for ref in refs} | {path for run in runs for path in run.initial}


def needed(run: RunFiles, runs: Sequence[RunFiles]) -> set[str]:
    """The manifests of weights and checkpoints of `run` that no retention rule may touch.

    They are what a restart of any run loads, what children refer to, what other runs began with, and what is tagged. A
    fork's history is its parent's too, so that a tag or a reference in the fork may mean files of `run`.
    """
    found = set(run.initial)
    for other in runs:
        found |= {v.path for v in run.versions if v.kind == "weights" and (v.version, v.attempt) in other.tagged}
        for reference in other.references:  # read before the commits that they refer to
            found |= _referred(other, reference)
        found |= _restart(other.commits) | set(other.initial)
    borrowed = _borrowed(run, runs)
    return found | {version.path for version in run.versions if _folder(version.path) in borrowed}


def _folder(manifest: str) -> str:
    return manifest.removesuffix(".json")


def _restart(commits: Sequence[IterationCommit]) -> set[str]:
    """What a start after the last of `commits` loads: its checkpoint, and the newest weights that were written."""
    made = [ref for commit in commits for ref in (commit.published, commit.weights) if ref is not None and ref.written]
    last = [ref for commit in commits[-1:] for ref in commit.stored]
    return {ref.path for ref in (*made[-1:], *last)}


def _referred(run: RunFiles, reference: Reference) -> set[str]:
    """What a child needs: a fork, a start at its iteration; a replay, all of the history before that."""
    shared = run.commits[: reference.iteration]
    if reference.kind == "fork":
        return _restart(shared)
    if reference.kind == "weights":
        around = run.commits[reference.iteration - 1 : reference.iteration + 1]  # the later one may name them
        return {ref.path for commit in around for ref in commit.stored if ref.version == reference.iteration}
    return {ref.path for commit in shared for ref in commit.stored}


def _borrowed(run: RunFiles, runs: Sequence[RunFiles]) -> set[str]:
    """Folders of attempts of `run` whose files other runs use as initial weights (`run://NAME`)."""
    manifests = [read_record(run.store, v.path, WeightsManifest) for o in _others(run, runs) for v in _first(o)]
    files = [file.path for manifest in manifests for file in manifest.files if file.path.startswith(f"{run.name}/")]
    return {re.sub(r"(attempt=\w+)/.*", r"\1", path) for path in files}


def _others(run: RunFiles, runs: Sequence[RunFiles]) -> Iterator[RunFiles]:
    return (other for other in runs if other.name != run.name)


def _first(run: RunFiles) -> list[Version]:
    return [version for version in run.versions if version.kind == "weights" and version.version == 0]


def borrowers(run: RunFiles, runs: Sequence[RunFiles]) -> list[str]:
    """The runs whose initial weights are files of `run`."""
    return [other.name for other in _others(run, runs) if _borrowed(run, [other])]


def live_references(store: Store, name: str, now: float) -> list[Reference]:
    """The references of children that exist or may be about to begin."""
    found = []
    for entry in entries(store, f"{name}/references"):
        if not entry.path.rsplit("/", 1)[-1].startswith("."):
            reference = read_record(store, entry.path, Reference)
            begun = find_record(store, paths.run_record(reference.child), RunRecord) is not None
            ended = store.exists(paths.run_tombstone(reference.child))
            if begun or (not ended and now - entry.modified < REFERENCE_SECONDS):
                found.append(reference)
    return found
