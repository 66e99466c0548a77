"""Removal that is safe for concurrent readers and writers: tombstone, second check, removal, log."""

from __future__ import annotations

from collections.abc import Sequence

from areal_tasks.store import paths
from areal_tasks.store.backend import Store
from areal_tasks.store.history.journal import append_log
from areal_tasks.store.objects.inventory import entries, remove, remove_folders
from areal_tasks.store.retention.gc import Removal, RetentionRule, plan_removals, read_all_run_files
from areal_tasks.store.retention.tombstones import tombstone_path, write_tombstone
from areal_tasks.store.runs import check_name, no_run
from schemas.errors import UserError


def remove_planned(store: Store, items: Sequence[Removal], rule: RetentionRule) -> list[Removal]:
    """Remove `items`, which `plan_removals` has found by this rule; returns those removed.

    It looks again once the tombstones of versions are written. What is needed by then stays, and so does an attempt
    that a writer which seemed dead has committed after all.
    """
    retired = {tombstone_path(item.manifest): item for item in items if item.version is not None}
    for path, item in retired.items():
        write_tombstone(store, path, item.kind, item.manifest, item.bytes, item.why, item.version)
    runs = dict.fromkeys(item.run for item in items)
    found = {(item.kind, item.path) for item in (plan_removals(store, rule, *runs) if runs else ())}
    gone = [item for item in items if (item.kind, item.path) in found]
    needed = {path: item for path, item in retired.items() if (item.kind, item.path) not in found}
    # not the tombstones of files that another removal has removed since
    remove(store, [path for path, item in needed.items() if any(map(store.exists, item.files))])
    for item in gone:
        remove(store, item.files)
    for run, kind in dict.fromkeys((item.run, item.kind) for item in gone):
        some = [item for item in gone if (item.run, item.kind) == (run, kind)]
        versions = " ".join(str(item.version) for item in some if item.version is not None)
        details: dict[str, bool | int | float | str] = {"what": kind, "count": len(some)}
        details |= {"bytes": sum(item.bytes for item in some), "why": some[0].why}
        append_log(store, run, "removed", details | ({"versions": versions} if versions else {}))
    return gone


# ── a whole run ─────────────────────────────────────────────────────────────────────────────────────────────────────


def plan_run_removal(store: Store, name: str, older_than: float) -> Removal:
    """All files of a run, if nothing needs them.

    Raises UserError: there is no such run, it may be running, or other runs refer to it.
    """
    check_name(name)
    begun = store.exists(paths.run_tombstone(name))  # a removal that was interrupted
    if not begun:
        _check_unused(store, name, older_than)
    files = [e for e in entries(store, name) if not _stays(name, e.path)]
    why = "its removal was interrupted" if begun else "it was named with --remove"
    first = [e for e in files if e.path == paths.run_record(name)]  # so that the rest is not taken for a run
    ordered = [*first, *(e for e in files if e not in first)]
    return Removal(name, "run", name, tuple(e.path for e in ordered), sum(e.bytes for e in files), why)


def remove_run(store: Store, item: Removal, older_than: float) -> None:
    """Remove a run. Its tombstone and its log stay. Raises UserError: it is needed by now; nothing is removed then."""
    path = paths.run_tombstone(item.run)
    interrupted_removals = store.exists(path)
    write_tombstone(store, path, "run", item.run, item.bytes, item.why)
    if not interrupted_removals:
        try:
            _check_unused(store, item.run, older_than)
        except UserError:
            remove(store, [path])
            raise
    append_log(
        store, item.run, "removed", {"what": "run", "files": len(item.files), "bytes": item.bytes, "why": item.why}
    )
    remove(store, item.files[:1])
    remove(store, [e.path for e in entries(store, item.run) if not _stays(item.run, e.path)])
    remove_folders(store, item.run)


def _stays(name: str, path: str) -> bool:
    return path == paths.run_tombstone(name) or path.startswith(f"{name}/log/")


def _check_unused(store: Store, name: str, older_than: float) -> None:
    runs = read_all_run_files(store)
    if name not in runs:
        raise no_run(store, name)
    run = runs[name]
    derived = {other.name for other in runs.values() if other.run.record.parent == name}
    borrowers = {n for n, other in runs.items() if any(folder.startswith(f"{name}/") for folder in other.borrowed)}
    users = sorted({*(r.child for r in run.references), *derived, *borrowers})
    if users:
        raise UserError(f"Run {name!r} stays: {', '.join(users)} would lose what they refer to. Remove those first.")
    if not run.ended and run.now - run.newest < older_than:
        raise UserError(
            f"Run {name!r} stays: its last start may still be running, since its log records no end, and it has "
            f"written within the last {older_than / 3600:g} hours (--older-than). Cancel its flow run first."
        )


def interrupted_removals(store: Store) -> list[str]:
    """The runs whose removal was interrupted."""
    removed = [name for name in store.children("") if store.exists(paths.run_tombstone(name))]
    return [name for name in removed if any(not _stays(name, entry.path) for entry in entries(store, name))]
