"""Weights as versions of a run: listing and naming them, exporting Hugging Face folders, and comparing two versions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from areal_tasks.store import paths
from areal_tasks.store.backend import Store
from areal_tasks.store.commit import commit_once, find_record, new_attempt, read_folder
from areal_tasks.store.history.journal import append_log, current_user
from areal_tasks.store.objects.files import common_folder, have_file, read_weights
from areal_tasks.store.parallel import parallel
from areal_tasks.store.provenance import make_provenance, now
from areal_tasks.store.reachable import history, published_weights
from areal_tasks.store.retention.tombstones import check_kept, find_weights_tombstone
from areal_tasks.store.runs import Run
from schemas.errors import UserError
from schemas.manifest import Tag, WeightsRef


@dataclass(frozen=True)
class WeightsVersion:
    """One version of a run's weights. `state`: `written`, `not written` (sent to the servers only), `removed`."""

    version: int
    attempt: str
    state: str
    bytes: int
    committed: str
    tags: tuple[str, ...]
    protected: bool
    path: str


def list_weights(run: Run) -> list[WeightsVersion]:
    """All versions of a run, version 0 first, those of its parents included."""
    tags = read_tags(run.store, run.name)
    return parallel(lambda item: _version(run.store, *item, tags), _refs(run))


def find_weights(run: Run, name: str) -> WeightsRef:
    """The weights that `name` means: a version's number, a tag, or `newest`, the newest version in the store.

    Raises UserError: there are none, they were never written, or they were removed; the message names the nearest.
    """
    refs = [ref for ref, _ in _refs(run)]
    written = [ref for ref in refs if ref.written]
    if not written:
        raise UserError(f"Run {run.name!r} has no weights yet: there are some once its first iteration is committed.")
    if name == NEWEST:
        return written[-1]
    tag = None if name.isdecimal() else find_tag(run.store, run.name, name)
    version = int(name) if name.isdecimal() else tag.version if tag else None
    found = next((ref for ref in refs if ref.version == version), None)
    if found is None:
        known = ", ".join(sorted({t.tag for t in read_tags(run.store, run.name) if not t.tag.startswith(PROTECTED)}))
        raise UserError(
            f"Run {run.name!r} has no weights {name!r}: versions are 0 to {len(refs) - 1}, tags: {known or 'none'}."
        )
    if not found.written:
        made = found.version
        nearest = min(written, key=lambda ref: (abs(ref.version - made), ref.version))
        raise UserError(
            f"Version {made} of run {run.name!r} was handed to the servers and not written to the store: "
            f"version {nearest.version} is the nearest that was (trainer.weights_every)."
        )
    check_kept(run.store, found)
    return found


def export_weights(store: Store, ref: WeightsRef, into: Path) -> int:
    """Copy weights into a folder as Hugging Face reads it; returns their bytes. Every file's SHA-256 is verified.

    Raises UserError: the folder is not empty, or a file is damaged.
    """
    if into.exists() and any(into.iterdir()):
        raise UserError(f"{into} is not empty: name a folder that is, or that does not exist yet")
    files = read_weights(store, ref).files
    parallel(lambda file: have_file(store, file, into / file.path.removeprefix(f"{common_folder(files)}/")), files)
    return sum(file.bytes for file in files)


def _refs(run: Run) -> list[tuple[WeightsRef, str]]:
    """Each version's reference, and when it was committed."""
    commits = history(run)
    late = {ref.version: ref for commit in commits if (ref := commit.published) is not None}
    made = [
        (c.weights if c.weights.written else late.get(c.weights.version, c.weights), c.provenance.committed)
        for c in commits
        if c.weights.version == c.iteration + 1
    ]
    initial = next((ref for c in commits[:1] for ref in c.stages if ref.stage == "initialise"), None)
    if initial is None:
        return made
    manifest = run.read_stage(initial)
    return [(published_weights(run.store, manifest), manifest.provenance.committed), *made]


def _version(store: Store, ref: WeightsRef, committed: str, tags: Sequence[Tag]) -> WeightsVersion:
    mine = [tag.tag for tag in tags if (tag.version, tag.weights_attempt) == (ref.version, ref.attempt)]
    files = read_weights(store, ref).files if ref.written else ()
    removed = find_weights_tombstone(store, ref)
    return WeightsVersion(
        version=ref.version,
        attempt=ref.attempt,
        state="removed" if removed else "written" if ref.written else "not written",
        bytes=0 if removed else sum(file.bytes for file in files),
        committed=committed,
        tags=tuple(tag for tag in mine if not tag.startswith(PROTECTED)),
        protected=any(tag.startswith(PROTECTED) for tag in mine),
        path=ref.path,
    )


# ── differences of two versions ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class TensorDifference:
    """How one tensor differs between two versions, computed in float64."""

    tensor: str
    shape: tuple[int, ...]
    largest: float
    mean: float
    cosine: float


def compare_folders(left: Path, right: Path) -> list[TensorDifference]:
    """Each tensor's largest and mean absolute difference and cosine similarity, of two Hugging Face folders.

    Raises UserError: they are not of one architecture.
    """
    one, two = _tensors(left), _tensors(right)
    shapes = [{name: tuple(t.get_slice(name).get_shape()) for name, t in side.items()} for side in (one, two)]
    if shapes[0] != shapes[1]:
        different = sorted({name for name, shape in shapes[0].items() ^ shapes[1].items()})
        raise UserError(f"These are weights of different models: {', '.join(different[:5])} differ in shape or name.")
    return [_difference(name, one[name].get_tensor(name), two[name].get_tensor(name)) for name in sorted(one)]


def _tensors(folder: Path) -> dict[str, Any]:
    """Tensor name -> the open file that holds it: only safetensors, which cannot hold code."""
    from safetensors import safe_open

    files = [safe_open(file, framework="pt") for file in sorted(folder.glob("*.safetensors"))]
    return {name: file for file in files for name in file.keys()}  # type: ignore[no-untyped-call]  # noqa: SIM118


def _difference(name: str, left: Any, right: Any) -> TensorDifference:
    one, two = left.double().flatten(), right.double().flatten()
    gap, norms = (one - two).abs(), one.norm() * two.norm()
    cosine = float(one @ two / norms) if norms > 0 else float(bool((one == two).all()))
    return TensorDifference(name, tuple(left.shape), float(gap.max()), float(gap.mean()), cosine)


# ── tags ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9._-]*")
PROTECTED: Final = "protected-"
NEWEST: Final = "newest"


def tag_weights(store: Store, run: str, name: str, ref: WeightsRef) -> Tag:
    """Name the weights `ref` of `run`; `gc` keeps them from then on.

    Raises UserError: the name is invalid or names other weights, or these were removed.
    """
    if not _NAME.fullmatch(name) or name.startswith(PROTECTED):
        raise UserError(f"{name!r} cannot be a tag: begin with a letter; letters, digits, '.', '_' and '-' may follow.")
    if name == NEWEST:
        raise UserError(f"{NEWEST!r} cannot be a tag: it always means the newest weights. Choose another name.")
    return _write_tag(store, run, name, ref, "tagged")


def protect_weights(store: Store, run: str, ref: WeightsRef) -> Tag:
    """Protect the weights `ref` of `run` from `gc` permanently."""
    return _write_tag(store, run, f"{PROTECTED}{ref.version}-{ref.attempt}", ref, "protected")


def read_tags(store: Store, run: str) -> list[Tag]:
    """All tags of `run`, protections included, by name."""
    return read_folder(store, f"{run}/tags", Tag)


def find_tag(store: Store, run: str, name: str) -> Tag | None:
    return find_record(store, paths.tag(run, name), Tag)


def _write_tag(store: Store, run: str, name: str, ref: WeightsRef, action: str) -> Tag:
    tag = Tag(
        tag=name,
        version=ref.version,
        weights_attempt=ref.attempt,
        attempt=new_attempt(),
        user=current_user(),
        provenance=make_provenance(0, now()),
    )
    existing, mine = commit_once(store, paths.tag(run, name), tag)
    if (existing.version, existing.weights_attempt) != (ref.version, ref.attempt):
        raise UserError(
            f"The tag {name!r} of run {run!r} is version {existing.version} already, and tags are not moved: "
            "choose another name."
        )
    if mine:
        append_log(store, run, action, {"tag": name, "version": ref.version, "weights_attempt": ref.attempt})
    check_kept(store, ref)  # `gc` has seen the tag, or has left its tombstone before
    return existing
