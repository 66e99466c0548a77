"""`arealflow gc`: which files are needed, by commits, running flows, derived runs or tags; and which are not, and why.

Planning changes nothing; `gc_remove` removes files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Final

from areal_tasks.rollout.settled import settled_after
from areal_tasks.store import paths
from areal_tasks.store.backend import Store
from areal_tasks.store.catalog import list_compactions, valid_compactions
from areal_tasks.store.commit import check_owners, last_present, missing_before, read_record
from areal_tasks.store.history.journal import end_of_start
from areal_tasks.store.objects.inventory import Entry, entries, store_time
from areal_tasks.store.parallel import parallel
from areal_tasks.store.reachable import attempts_of, history, named_weights, pending_evaluation, reachable
from areal_tasks.store.runs import Run, load_run, no_run, run_names
from areal_tasks.store.weights import read_tags
from schemas.compaction import Compaction
from schemas.errors import UserError
from schemas.manifest import (
    IterationCommit,
    Reference,
    SpoolRecord,
    StageManifest,
    StageRef,
    WeightsManifest,
    WeightsRef,
)

#: A reference is written before its derived run is created: for this long, it counts although that run does not exist.
REFERENCE_SECONDS: Final = 3600.0
#: A run that has written nothing for this long is not running, whatever its log says.
IDLE_SECONDS: Final = 7 * 24 * 3600.0
#: A compaction may have no owner: only its age shows whether it is still being written.
_COMPACT_SECONDS: Final = 3600.0


@dataclass(frozen=True)
class RetentionRule:
    """Which weights and checkpoints may be removed, besides files that no commit selects.

    Args:
        keep_weights: number of newest versions of a run's weights that stay; None: all.
        keep_checkpoints: the same for checkpoints.
        older_than: in seconds; nothing that was written more recently is removed.
    """

    keep_weights: int | None = None
    keep_checkpoints: int | None = None
    older_than: float = 24 * 3600.0

    def __post_init__(self) -> None:
        for name, kept in (("--keep-weights", self.keep_weights), ("--keep-checkpoints", self.keep_checkpoints)):
            if kept is not None and kept < 1:
                raise UserError(f"{name} {kept}: a run needs its newest one to continue; keep at least 1")


@dataclass(frozen=True)
class Removal:
    """Files to remove together. `version` is set if a retention rule allows it; then a tombstone is written."""

    run: str
    kind: str
    path: str
    files: tuple[str, ...]
    bytes: int
    why: str
    version: int | None = None

    @property
    def manifest(self) -> str:
        """The manifest of such a version."""
        return f"{self.path}.json"


def plan_removals(store: Store, rule: RetentionRule, *only: str) -> list[Removal]:
    """What `rule` allows to remove in the runs `only`, or in all; all runs are read to find what they need.

    Raises UserError: a run is damaged, so that its needs are unknown; the file is named.
    """
    runs = read_all_run_files(store)
    for name in only:
        if name not in runs:
            raise no_run(store, name)
    # the manifests of weights and checkpoints that any commit, or any stage `initialise`, names
    named = {path for run in runs.values() for path in (*reachable(run.commits, WeightsRef), *run.initial)}
    for run in runs.values():
        _check_whole(run, runs)
    needed, found = needed_weights(runs.values()), list[Removal]()
    for run in (runs[name] for name in only or runs):
        found += [*_unselected(run, named, rule), *_spooled(run, rule), *_temporary(run, rule)]
        found += [*_compactions(run, rule), *_retired(run, needed, named, rule)]
    return found


def _item(run: RunFiles, kind: str, path: str, files: Sequence[Entry], why: str, version: int | None = None) -> Removal:
    return Removal(run.name, kind, path, tuple(f.path for f in files), sum(f.bytes for f in files), why, version)


def _abandoned(run: RunFiles, files: Sequence[Entry], rule: RetentionRule) -> bool:
    """Whether no process can still be writing files that nothing selects."""
    newest = max(entry.modified for entry in files)
    return _old(run, files, rule) and (newest < run.owner_since or run.ended or run.now - run.newest >= IDLE_SECONDS)


def _old(run: RunFiles, files: Sequence[Entry], rule: RetentionRule) -> bool:
    return run.now - max(entry.modified for entry in files) >= rule.older_than


def _unselected(run: RunFiles, named: set[str], rule: RetentionRule) -> Iterator[Removal]:
    """Attempts of processes that crashed, and of writers whose record was not the first."""
    used = _used_by_stages(run)
    versions = {version.folder: version for version in run.versions}
    late = any(not commit.weights.written for commit in run.commits[-1:])  # the next commit may name its weights
    settled = len(run.commits) - late
    for folder, files in run.attempts.items():
        if not _abandoned(run, files, rule):
            continue
        if "/stage=" in folder:
            if folder not in used:
                yield _item(run, "attempt", folder, files, "no manifest selects it")
        elif folder.startswith((f"{run.name}/weights/", f"{run.name}/checkpoints/")):
            version = versions.get(folder)
            if version is None:
                yield _item(run, "attempt", folder, files, "it has no manifest")
            elif version.path not in named and version.version <= settled:
                whole = [*files, run.by_path[version.path]]
                yield _item(run, "attempt", folder, whole, "no commit selects it")


def _used_by_stages(run: RunFiles) -> set[str]:
    """The attempts that stage manifests name. A stage's folder with as many manifests as attempts is not read."""
    attempts = _by_folder(folder for folder in run.attempts if "/stage=" in folder)
    manifests = _by_folder(path for path in run.by_path if path.endswith(".json"))
    used: set[str] = set()
    for stage, folders in attempts.items():
        named = manifests.get(stage, [])
        if len(named) >= len(folders):
            used |= set(folders)
        else:
            used |= {one for path in named for one in attempts_of(path, read_record(run.store, path, StageManifest))}
    return used


def _by_folder(found: Iterable[str]) -> dict[str, list[str]]:
    """Paths by the folder that holds them."""
    folders: dict[str, list[str]] = {}
    for path in found:
        folders.setdefault(path.rpartition("/")[0], []).append(path)
    return folders


def _spooled(run: RunFiles, rule: RetentionRule) -> Iterator[Removal]:
    """Rows of groups that no later iteration can take, and attempts that no record names. Records stay."""
    starts = _by_folder(folder for folder in run.attempts if folder.startswith(f"{paths.spool(run.name)}/"))
    settled = settled_after(run.commits[-1] if run.commits else None)
    for start, folders in starts.items():
        names = [path for path in run.by_path if re.fullmatch(rf"{re.escape(start)}/\d+\.json", path)]
        read = zip(names, parallel(lambda path: read_record(run.store, path, SpoolRecord), names), strict=True)
        records = {folder: record for path, record in read for folder in attempts_of(path, record)}
        for folder in folders:
            files, record = run.attempts[folder], records.get(folder)
            if record is None:
                if _abandoned(run, files, rule):
                    yield _item(run, "attempt", folder, files, "no record of the spool names it")
            elif _old(run, files, rule) and all(group.index in settled for group in record.finished):
                yield _item(run, "spool", folder, files, "its groups are consumed or rejected")


def _temporary(run: RunFiles, rule: RetentionRule) -> Iterator[Removal]:
    """Partial files whose writer died. Hidden files within an attempt are removed with it."""
    for entry in run.files:
        hidden = entry.path.rsplit("/", 1)[-1].startswith(".") and not paths.attempt_folder(entry.path)
        if hidden and _abandoned(run, [entry], rule):
            yield _item(run, "temporary", entry.path, [entry], "it was never finished")


def _compactions(run: RunFiles, rule: RetentionRule) -> Iterator[Removal]:
    """Compactions that larger or newer ones have replaced, or that are not valid."""
    kept = {paths.compact_attempt(run.name, record.attempt) for record in valid_compactions(run.run)}
    below = f"{paths.compactions(run.name)}/"
    found = {folder: files for folder, files in run.attempts.items() if folder.startswith(below)}
    for path in (name.path for name in list_compactions(run.store, run.name) if name.path in run.by_path):
        folder = paths.compact_attempt(run.name, read_record(run.store, path, Compaction).attempt)
        # the manifest goes first: audit reads what it names
        found[folder] = [run.by_path[path], *found.get(folder, ())]
    for folder, files in found.items():
        age = run.now - max(entry.modified for entry in files)
        if folder not in kept and age >= max(rule.older_than, _COMPACT_SECONDS):
            yield _item(run, "compaction", folder, files, "another one replaces it")


def _retired(run: RunFiles, kept: set[str], named: set[str], rule: RetentionRule) -> Iterator[Removal]:
    """Versions that commits select, and that are older than the newest ones to keep."""
    for kind, keep in (("weights", rule.keep_weights), ("checkpoint", rule.keep_checkpoints)):
        stored = [v for v in run.versions if v.kind == kind and v.path in named and v.folder in run.attempts]
        newest = sorted({v.version for v in stored}, reverse=True)[:keep]  # all where no rule is given
        for version in stored:
            files = run.attempts[version.folder]
            if _old(run, files, rule) and version.version not in newest and version.path not in kept:
                why = f"--keep-{'weights' if kind == 'weights' else 'checkpoints'} {keep}"
                yield _item(run, kind, version.folder, files, why, version.version)


# ── what is needed ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Version:
    """Weights or a checkpoint that has a manifest: `kind` is `weights` or `checkpoint`."""

    kind: str
    version: int
    attempt: str
    path: str

    @property
    def folder(self) -> str:
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
        """The files of each attempt's folder, which are listed one after the other."""
        grouped = groupby(self.files, lambda entry: paths.attempt_folder(entry.path))
        return {folder: list(files) for folder, files in grouped if folder}

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
        """The references of derived runs that exist or may be about to begin."""
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
    return RunFiles(load_run(store, name), tuple(entries(store, name)), now)


def read_all_run_files(store: Store) -> dict[str, RunFiles]:
    now = store_time(store)
    return {name: read_run_files(store, name, now) for name in run_names(store)}


def needed_weights(runs: Collection[RunFiles]) -> set[str]:
    """The manifests of weights and checkpoints of these runs that no retention rule may touch.

    They are what a restart of any run loads, what derived runs refer to, what other runs began with, and what is
    tagged. A fork's history is its parent's too, so that a tag or a reference in the fork may mean files of its parent.
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


def _check_whole(run: RunFiles, runs: Mapping[str, RunFiles]) -> None:
    """StoreError if a record is missing without which files of a run, of its parent or of a start would seem unused."""
    check_owners(run.store, run.name, run.owner, [c.provenance.owner for c in run.commits if c.run == run.name])
    needed = [*reachable(run.commits, StageRef), *reachable(run.commits, WeightsRef)]
    if run.run.record.parent and run.run.record.schema_version > 1:
        needed.append(paths.reference(run.run.record.parent, run.name))
    for path in needed:
        listed = runs.get(path.split("/")[0])
        if (listed is None or path not in listed.by_path) and not run.store.exists(path):
            raise missing_before(run.store.uri(path))


def _restart(commits: Sequence[IterationCommit]) -> set[str]:
    """The weights and the checkpoint that a start after the last of `commits` loads, and those it has to evaluate."""
    if not commits:
        return set()
    made = [ref for commit in commits for ref in (commit.published, commit.weights) if ref is not None and ref.written]
    loaded = [*made[-1:], *commits[-1].stored]
    if (k := pending_evaluation(commits[-1])) is not None:
        around = [commit for commit in commits if commit.iteration in (k - 1, k)]
        loaded += [ref for commit in around for ref in commit.stored if ref.version == k]
    return {ref.path for ref in loaded}


def _referred(run: RunFiles, reference: Reference) -> set[str]:
    """What a derived run needs: a fork, what a start at its iteration loads; a replay, all history before that."""
    shared = run.commits[: reference.iteration]
    if reference.kind == "fork":
        return _restart(shared)
    if reference.kind == "weights":
        around = run.commits[reference.iteration - 1 : reference.iteration + 1]  # the later one may name them
        return {ref.path for commit in around for ref in commit.stored if ref.version == reference.iteration}
    return set(reachable(shared, WeightsRef))
