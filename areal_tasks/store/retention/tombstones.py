"""Tombstones: records of what was removed on purpose, written before the removal.

`gc` writes a tombstone and then reads references; a derived run writes a reference and then reads tombstones. The
later of the two sees the other's record, so that files to which a derived run refers are never removed.
"""

from __future__ import annotations

from areal_tasks.store import paths
from areal_tasks.store.backend import Store
from areal_tasks.store.commit import commit_once, find_record, new_attempt
from areal_tasks.store.history.journal import current_user
from areal_tasks.store.provenance import make_provenance, now
from schemas.errors import UserError
from schemas.manifest import Tombstone, WeightsRef


def write_tombstone(
    store: Store, path: str, kind: str, named: str, size: int, reason: str, version: int | None = None
) -> Tombstone:
    """Write a tombstone at `path` for the files of `named`, unless there is one; returns the one there."""
    tombstone = Tombstone(
        kind=kind,
        path=named,
        version=-1 if version is None else version,
        bytes=size,
        attempt=new_attempt(),
        user=current_user(),
        reason=reason,
        provenance=make_provenance(0, now()),
    )
    return commit_once(store, path, tombstone)[0]


def find_weights_tombstone(store: Store, ref: WeightsRef) -> Tombstone | None:
    """The tombstone of weights or a checkpoint, if `gc` has removed their files."""
    return find_record(store, tombstone_path(ref.path), Tombstone) if ref.written else None


def tombstone_path(manifest: str) -> str:
    """The path of the tombstone of the weights or checkpoint with this manifest."""
    return paths.tombstone(manifest.split("/")[0], *paths.version_of(manifest))


def check_kept(store: Store, ref: WeightsRef) -> None:
    """UserError if the files of these weights or this checkpoint were removed on purpose."""
    tombstone = find_weights_tombstone(store, ref)
    if tombstone is not None:
        raise UserError(
            f"The {tombstone.kind} of version {ref.version} of run {ref.path.split('/')[0]!r} were removed by "
            f"{tombstone.user} on {tombstone.provenance.committed[:10]} ({tombstone.reason}): name another version; "
            "`arealflow weights RUN` lists those that are there."
        )


def check_run_kept(store: Store, run: str) -> None:
    """UserError if the whole run was removed on purpose, or is about to be."""
    tombstone = find_record(store, paths.run_tombstone(run), Tombstone)
    if tombstone is not None:
        raise UserError(
            f"Run {run!r} was removed by {tombstone.user} on {tombstone.provenance.committed[:10]}: choose another "
            "name (run=NAME); `arealflow log` shows its removal."
        )
