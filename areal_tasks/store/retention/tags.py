"""Names for weights, and weights that `gc` must keep. A tag is given once and never moved."""

from __future__ import annotations

import re
from typing import Final

from areal_tasks.store import paths
from areal_tasks.store.backend import Store
from areal_tasks.store.commit import commit_once, find_record, new_attempt, read_record
from areal_tasks.store.history.journal import append, user
from areal_tasks.store.parallel import parallel
from areal_tasks.store.provenance import make_provenance, now
from areal_tasks.store.retention.tombstones import check_kept
from schemas.errors import UserError
from schemas.manifest import Tag, WeightsRef

_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9._-]*")
PROTECTED: Final = "protected-"
NEWEST: Final = "newest"


def tag_weights(store: Store, run: str, name: str, ref: WeightsRef) -> Tag:
    """Name the weights `ref` of `run`; `gc` keeps them from then on.

    Raises:
        UserError: the name is invalid or names other weights, or these were removed.
    """
    if not _NAME.fullmatch(name) or name.startswith(PROTECTED):
        raise UserError(f"{name!r} cannot be a tag: begin with a letter; letters, digits, '.', '_' and '-' may follow.")
    if name == NEWEST:
        raise UserError(f"{NEWEST!r} cannot be a tag: it always means the newest weights. Choose another name.")
    return _give(store, run, name, ref, "tagged")


def protect_weights(store: Store, run: str, ref: WeightsRef) -> Tag:
    """Keep the weights `ref` of `run` from `gc` for good."""
    return _give(store, run, f"{PROTECTED}{ref.version}-{ref.attempt}", ref, "protected")


def read_tags(store: Store, run: str) -> list[Tag]:
    """All tags of `run`, protections included, by name."""
    names = [name for name in store.children(f"{run}/tags") if name.endswith(".json")]
    return parallel(lambda name: read_record(store, f"{run}/tags/{name}", Tag), names)


def find_tag(store: Store, run: str, name: str) -> Tag | None:
    """The tag of this name; None if there is none."""
    return find_record(store, paths.tag(run, name), Tag)


def _give(store: Store, run: str, name: str, ref: WeightsRef, action: str) -> Tag:
    tag = Tag(
        tag=name,
        version=ref.version,
        weights_attempt=ref.attempt,
        attempt=new_attempt(),
        user=user(),
        provenance=make_provenance(0, now()),
    )
    there, mine = commit_once(store, paths.tag(run, name), tag)
    if (there.version, there.weights_attempt) != (ref.version, ref.attempt):
        raise UserError(
            f"The tag {name!r} of run {run!r} is version {there.version} already, and tags are not moved: "
            "choose another name."
        )
    if mine:
        append(store, run, action, {"tag": name, "version": ref.version, "weights_attempt": ref.attempt})
    check_kept(store, ref)  # `gc` has seen the tag, or has left its tombstone before
    return there
