"""The parent's files that the first start of a child loads, and checks of them before the child begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from areal_tasks.store.backend import Missing, Newer, Store, StoreError, Unavailable
from areal_tasks.store.fork import Origin
from areal_tasks.store.objects.files import newest_written, read_weights
from areal_tasks.store.objects.verified_files import check_file
from areal_tasks.store.parallel import parallel
from areal_tasks.store.reachable import files_of, published_weights
from areal_tasks.store.retention.tombstones import check_kept
from schemas.errors import UserError
from schemas.manifest import FileRef, WeightsRef

if TYPE_CHECKING:
    from areal_tasks.store.runs import Run

_ONCE: Final = ("initialise", "prompts")  # stages that are built once per run, whose tables every start reads


def check_first_start(parent: Run, origin: Origin) -> list[WeightsRef]:
    """Check everything that the first start of the child which `origin` describes loads; returns its weights.

    Weights and checkpoints: existence and size. Tables: `check_file`.

    Raises:
        UserError: a file, which is named, is missing, damaged or written by a newer version; or weights were removed
            on purpose.
    """
    refs: list[WeightsRef] = []
    try:
        refs = loaded_weights(parent, origin)
        check_all_kept(parent.store, refs)
        files = [file for ref in refs for file in read_weights(parent.store, ref).files]
        parallel(lambda file: _check_size(parent.store, file), files)
        if refs:  # an engine will be started
            parallel(lambda shard: check_file(parent.store, shard), list(_shards(parent, origin.iteration)))
    except (Unavailable, Newer):  # nothing has to be restored
        raise
    except StoreError as error:
        with suppress(StoreError):
            check_all_kept(parent.store, refs)  # they may have been removed since the first check
        what = f"{error.where} does not exist" if isinstance(error, Missing) else str(error).split(". Restore")[0]
        raise UserError(
            f"No child of run {parent.name!r} can begin at iteration {origin.iteration}: it would load a missing or "
            f"damaged file: {what}. Restore it from a backup, or begin at another iteration; "
            f"`arealflow audit {parent.name}` lists all damage."
        ) from error
    return refs


def check_all_kept(store: Store, refs: Sequence[WeightsRef]) -> None:
    """UserError if any of these weights and checkpoints were removed on purpose."""
    parallel(lambda ref: check_kept(store, ref), refs)


def loaded_weights(parent: Run, origin: Origin) -> list[WeightsRef]:
    """The weights and the checkpoint in the store that the first start of a child loads, each once.

    They are the initial weights; the checkpoint that the trainer begins with; the last weights, which it is compared
    with; and for servers the newest written weights, if the last ones were not written.
    """
    starts = not origin.replay_until and parent.record.flow != "evaluate"  # an engine
    if not starts or not parent.store.exists(parent.commit_path(0)):
        return []
    initial = next((ref for ref in parent.commit(0).stages if ref.stage == "initialise"), None)
    found = [published_weights(parent.store, parent.read_stage(initial))] if initial else []
    if origin.iteration:
        last = parent.commit(origin.iteration - 1)
        served = parent.record.flow == "rlhf" and not origin.counterfactual
        written = newest_written(parent, last) if served else None
        found += [ref for ref in (last.weights, written, last.checkpoint) if ref is not None and ref.written]
    return list({ref.path: ref for ref in found}.values())


def _check_size(store: Store, file: FileRef) -> None:
    size = store.size(file.path)
    if size != file.bytes:
        raise StoreError(f"{store.uri(file.path)} is damaged: it has {size} bytes, and {file.bytes} were recorded")


def _shards(run: Run, iteration: int) -> Iterator[FileRef]:
    """The shards that every start reads, and those of the iterations since the checkpoint, which are retrained."""
    last = run.commit(max(iteration - 1, 0))
    manifests = [run.read_stage(ref) for ref in last.stages if ref.stage in _ONCE]
    begin = last.checkpoint.version if last.checkpoint else 0
    for commit in (run.commit(k) for k in range(begin, iteration)):
        for train in (run.read_stage(ref) for ref in commit.stages if ref.stage == "train"):
            yield from train.tables["train_samples"].shards
            manifests += [run.read_manifest(source.path) for source in train.inputs]
    for manifest in manifests:
        yield from files_of(manifest)
