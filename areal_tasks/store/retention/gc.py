"""`arealflow gc`: which files are not needed, and why. Planning changes nothing; `gc_remove` removes them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from areal_tasks.rollout.settled import settled_after
from areal_tasks.store import paths
from areal_tasks.store.backend import Store
from areal_tasks.store.catalog import list_compactions, valid_compactions
from areal_tasks.store.commit import read_record
from areal_tasks.store.objects.inventory import Entry
from areal_tasks.store.parallel import parallel
from areal_tasks.store.reachable import attempts_of
from areal_tasks.store.retention.gc_live import RunFiles, needed_weights, read_all_run_files, selected_weights
from areal_tasks.store.runs import no_run
from schemas.compaction import Compaction
from schemas.errors import UserError
from schemas.manifest import SpoolRecord, StageManifest

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
    named, needed = selected_weights(runs.values()), needed_weights(runs.values())
    return [item for name in only or runs for item in _of_run(runs[name], named, needed, rule)]


def _of_run(run: RunFiles, named: set[str], needed: set[str], rule: RetentionRule) -> Iterator[Removal]:
    yield from _unselected(run, named, rule)
    yield from _spooled(run, rule)
    yield from _temporary(run, rule)
    yield from _compactions(run, rule)
    yield from _retired(run, needed, named, rule)


def _item(run: RunFiles, kind: str, path: str, files: Sequence[Entry], why: str, version: int | None = None) -> Removal:
    return Removal(run.name, kind, path, tuple(f.path for f in files), sum(f.bytes for f in files), why, version)


def _abandoned(run: RunFiles, files: Sequence[Entry], rule: RetentionRule) -> bool:
    """Whether no process can still be writing files that nothing selects."""
    newest = max(entry.modified for entry in files)
    return _old(run, files, rule) and (newest < run.owner_since or not run.may_write)


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
        records = _spool_records(run, start)
        for folder in folders:
            files, record = run.attempts[folder], records.get(folder)
            if record is None:
                if _abandoned(run, files, rule):
                    yield _item(run, "attempt", folder, files, "no record of the spool names it")
            elif _old(run, files, rule) and all(group.index in settled for group in record.finished):
                yield _item(run, "spool", folder, files, "its groups are consumed or rejected")


def _spool_records(run: RunFiles, start: str) -> dict[str, SpoolRecord]:
    """The records in the folder of a start, by the folders of their shards."""
    names = [path for path in run.by_path if re.fullmatch(rf"{re.escape(start)}/\d+\.json", path)]
    records = parallel(lambda path: read_record(run.store, path, SpoolRecord), names)
    named = zip(names, records, strict=True)
    return {folder: record for path, record in named for folder in attempts_of(path, record)}


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
