"""`arealflow audit`: checks every byte that a run's commits reference, and counts what else its folder holds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from areal_tasks.store import paths
from areal_tasks.store.backend import Store, StoreError
from areal_tasks.store.commit import listed_numbers
from areal_tasks.store.history.audit_history import Link, audit_history, audit_log, audit_spool, check_groups
from areal_tasks.store.history.audit_records import Defect, Findings, Progress
from areal_tasks.store.history.signing import root_hash
from areal_tasks.store.keys import combine_digests
from areal_tasks.store.objects.files import common_folder
from areal_tasks.store.objects.inventory import entries
from areal_tasks.store.parallel import parallel
from areal_tasks.store.reachable import INITIAL, Reached, files_of, named_weights, reachable
from areal_tasks.store.runs import has_begun, load_run
from areal_tasks.store.service_logs import stored_parts
from schemas.compaction import Compaction
from schemas.manifest import (
    ChangeRecord,
    IterationCommit,
    NodeRecord,
    OwnerRecord,
    Reference,
    ServiceRecord,
    Signature,
    StageManifest,
    StageRef,
    SystemRecord,
    Tag,
    Tombstone,
    WaitsRecord,
    WatchRecord,
    WeightsManifest,
    WeightsRef,
)
from schemas.record import StoredRecord

_FOLDERS: Final[dict[str, type[StoredRecord]]] = {"references": Reference, "tags": Tag, "signatures": Signature}
_FOLDERS_BY_OWNER: Final[dict[str, type[StoredRecord]]] = {"services": ServiceRecord, "nodes": NodeRecord}
_NUMBERED_BY_OWNER: Final[dict[str, tuple[Callable[[str, int, int], str], type[StoredRecord]]]] = {
    "waits": (paths.waits, WaitsRecord),
    "watches": (paths.watch, WatchRecord),
    "system": (paths.system, SystemRecord),
}
_MANIFEST: Final = re.compile(
    r"(iteration=\d+/stage=\w+/[0-9a-f]+|(weights|checkpoints)/version=\d+/attempt=\w+)\.json"
)


@dataclass(frozen=True)
class AuditReport:
    """An audit's result. `root` is the run's root hash; empty if a file that it covers is missing or damaged."""

    run: str
    root: str
    iterations: int
    files: int
    bytes: int
    defects: tuple[Defect, ...]
    removed: tuple[Tombstone, ...]  # weights and checkpoints that a user removed on purpose: not damage
    unselected_files: int
    unselected_bytes: int
    old_schema: bool = field(metadata={"help": "schema 1 has no seals: unreferenced records are only parsed"})

    @property
    def sound(self) -> bool:
        return not self.defects


def audit(store: Store, name: str, progress: Progress = lambda done, total: None) -> AuditReport:
    """Check everything that the run's commits reference, its other records, and the history of its parents.

    Raises UserError: there is no run of this name.
    """
    if not store.exists(paths.run_record(name)) and not has_begun(store, name):
        load_run(store, name)  # raises an error that lists the runs
    found = Findings(store, progress)
    links = audit_history(found, name)
    audit_log(found, name, links)
    tombstones = _tombstones(found, name, links)
    commits = [link.commit for link in links if link.commit]
    manifests = _stages(found, reachable(commits, StageRef))
    named = [ref for ref, _ in reachable(commits, WeightsRef).values()]
    for ref in [*named, *_initial_weights(found, manifests)]:
        _weights(found, ref, tombstones)
    _check_unwritten(found, commits, manifests)
    _records(found, name)
    spools = audit_spool(found, name, links)
    _compactions(found, name)
    found.check_queued()
    check_groups(found, links, manifests, spools)
    stray = [entry for entry in entries(store, name) if entry.path not in found.seen]
    manifests_left = [e.path for e in stray if _MANIFEST.fullmatch(e.path.removeprefix(f"{name}/"))]
    for path in manifests_left:  # of unfinished or abandoned work, which a later start may use
        found.record(path, StageManifest if "/stage=" in path else WeightsManifest)
    found.sequence(partial(paths.owner, name), OwnerRecord, 1, max(found.owners.get(name, ()), default=0))
    stray = [entry for entry in stray if entry.path not in found.seen]
    root = ""
    with suppress(StoreError):  # its defects are listed
        root = root_hash(load_run(store, name), len(links))
    return AuditReport(
        run=name,
        root=root,
        iterations=len(links),
        files=len(found.seen),
        bytes=found.total,
        defects=tuple(sorted(set(found.defects), key=lambda defect: defect.path)),
        removed=tuple(tombstones.values()),
        unselected_files=len(stray),
        unselected_bytes=sum(entry.bytes for entry in stray),
        old_schema=any(link.commit is not None and link.commit.schema_version < 2 for link in links),
    )


# ── stages ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _stages(found: Findings, named: Reached[StageRef]) -> dict[str, StageManifest]:
    """Check every stage manifest that a commit names, and that its inputs exist and have the content that it read.

    Queues the shards of these stages; returns the valid manifests by path.
    """
    read = parallel(lambda item: _stage(found, *item), list(named.values()))
    manifests = {path: m for path, m in zip(named, read, strict=True) if m is not None}
    for path, manifest in manifests.items():
        found.names[path] = f"{manifest.stage} of iteration {manifest.iteration}"
        for source in manifest.inputs:
            found.readers.setdefault(source.path, []).append(path)
    for path, manifest in manifests.items():
        if combine_digests({name: table.digest for name, table in manifest.tables.items()}) != manifest.digest:
            found.report(path, "its content digest is not that of its tables", found.downstream(path))
        for table in manifest.tables.values():
            found.add_table(path, table)
        for source in manifest.inputs:
            read_from = manifests.get(source.path)
            if read_from is None and source.path not in named:  # a replay reads what only its parent names
                read_from = found.record(source.path, StageManifest)
            if read_from is not None and read_from.digest != source.digest:
                found.report(source.path, f"replaced: {path} read other content from it", found.names[path])
    return manifests


def _stage(found: Findings, ref: StageRef, commit: IterationCommit) -> StageManifest | None:
    affects = f"the tables of {ref.stage}, and all that reads them"
    by = paths.iteration_commit(commit.run, commit.iteration)
    manifest = found.record(ref.path, StageManifest, ref.sha256, affects)
    if manifest is not None and (manifest.stage, manifest.key, manifest.digest) != (ref.stage, ref.key, ref.digest):
        found.report(ref.path, f"is not the result that {by} names", affects)
    return manifest


# ── weights and checkpoints ─────────────────────────────────────────────────────────────────────────────────────────


def _initial_weights(found: Findings, manifests: dict[str, StageManifest]) -> Iterator[WeightsRef]:
    """Weights version 0, with its content digest, from the table of the stage `initialise`."""
    for manifest in manifests.values():
        with suppress(StoreError):  # its shard is among the defects
            if INITIAL in manifest.tables:
                yield named_weights(found.store, manifest)


def _weights(found: Findings, ref: WeightsRef, tombstones: dict[str, Tombstone]) -> None:
    kind, _, _ = paths.version_of(ref.path)
    affects = f"loading and exporting version {ref.version}"
    if kind == "checkpoint":
        affects = f"restarts, which would retrain from version {ref.version}"
    manifest = found.record(ref.path, WeightsManifest, ref.sha256, affects)
    if manifest is None:
        return
    folder = common_folder(manifest.files)
    digest = combine_digests({file.path.removeprefix(f"{folder}/"): file.sha256 for file in manifest.files})
    if (manifest.kind, manifest.version, manifest.digest) != (kind, ref.version, ref.digest) or digest != ref.digest:
        found.report(ref.path, "is not the manifest of these files", affects)
    if ref.path not in tombstones:
        for file in manifest.files:
            found.add_file(file, affects)


def _check_unwritten(found: Findings, commits: Sequence[IterationCommit], manifests: dict[str, StageManifest]) -> None:
    """Check that weights that were sent but not written have the digest of the train stage that made them."""
    for commit in (c for c in commits if not c.weights.written):
        made = [ref for ref in commit.stages if ref.stage == "train" and ref.path in manifests]
        if made and made[0].digest != commit.weights.digest:
            path = paths.iteration_commit(commit.run, commit.iteration)
            found.report(path, f"its weights are not those that {made[0].path} made")


def _tombstones(found: Findings, name: str, links: Sequence[Link]) -> dict[str, Tombstone]:
    """The tombstones of this run and its parents, by the path of the removed manifest."""
    runs = dict.fromkeys([name, *(link.commit.run for link in links if link.commit)])
    read = [found.folder(f"{run}/tombstones", Tombstone) for run in runs]
    return {tombstone.path: tombstone for records in read for tombstone in records.values()}


# ── what no commit names ────────────────────────────────────────────────────────────────────────────────────────────


def _records(found: Findings, name: str) -> None:
    """Check changes, services, tags, signatures …, which only their seals protect; and that logs have all parts."""
    found.sequence(partial(paths.change, name), ChangeRecord, 1)
    for folder, model in _FOLDERS.items():
        found.folder(f"{name}/{folder}", model)
    for folder, model in _FOLDERS_BY_OWNER.items():
        for owner in found.store.children(f"{name}/{folder}"):
            found.folder(f"{name}/{folder}/{owner}", model)
    for folder, (path, model) in _NUMBERED_BY_OWNER.items():
        for n in listed_numbers(found.store, partial(paths.by_owner, name, folder)):
            for record in found.sequence(partial(path, name, n), model, 1).values():
                if isinstance(record, SystemRecord):
                    found.add_file(record.shard, "the view system")
    logs = stored_parts(entry.path for entry in entries(found.store, paths.logs(name)))
    for log, parts in logs.items():  # no record has digests of the parts
        found.seen.update(parts.values())
        for n in set(range(max(parts))) - parts.keys():
            found.report(log.part(name, n), "missing", "reading the log of this service from there on")


def _compactions(found: Findings, name: str) -> None:
    """Check compactions, derived copies that make queries fast; their sources are checked separately."""
    remedy = "nothing: it is a copy; remove it and compact the run again"
    for record in found.folder(paths.compactions(name), Compaction, remedy).values():
        for file in files_of(record):
            found.add_file(file, remedy)
