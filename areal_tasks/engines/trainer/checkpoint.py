"""Training state on disk through torch.distributed.checkpoint (DCP): any backend on any number of ranks can load it.

A checkpoint holds only tensors: for every parameter, under its Hugging Face name, the fp32 weight and AdamW's state;
the random state; and the progress. Loading treats files as data and runs no code that they name.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

from areal_tasks.engines.trainer.backend import Fetch, Progress, all_there
from areal_tasks.engines.trainer.memory import ran_out
from areal_tasks.engines.trainer.optimizer import local_share, prepare_state
from areal_tasks.store.parallel import parallel
from schemas.errors import UserError

#: A parameter's `weight` and its AdamW state: `step`, `exp_avg`, `exp_avg_sq`. Sharded tensors are DTensors.
Parameter = Mapping[str, Tensor]
Parameters = Mapping[str, Parameter]
#: The file of a checkpoint that says where in its other files each tensor is.
METADATA: Final = ".metadata"
#: A rank writes files of about this size, or larger ones if they would be more than MOST_FILES.
FILE_BYTES: Final = 256 * 2**20
MOST_FILES: Final = 32
#: Modules and names in DCP's pickled metadata; some since torch 2.11, some before it.
_MODULES: Final = ("torch.distributed.checkpoint.", "torch.distributed.tensor.")
_NAMES: Final = frozenset(
    {
        "torch.Size", "torch.device", "torch.serialization._get_layout", "torch._utils._rebuild_device",
        "collections.OrderedDict", "pathlib.PosixPath", "pathlib._local.PosixPath", "_codecs.encode",
        *(f"torch.{kind}" for kind in ("float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8", "bool")),
    }
)  # fmt: skip


def held_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> Parameters:
    """The tensors that `model` and `optimizer` hold themselves, whole or sharded."""
    return {
        name: {"weight": parameter.detach(), **prepare_state(optimizer, parameter)}
        for name, parameter in model.named_parameters()
    }


def save_parameters(folder: Path, parameters: Parameters, progress: Progress) -> Mapping[str, str]:
    """Write `parameters`, RNG and progress into `folder`, which must be fresh. Every rank takes part.

    Returns, on rank 0, the SHA-256 of the files that hold tensors, by name. Raises OSError if writing fails.
    """
    counts = torch.tensor([progress.step, progress.skipped_in_row])
    state = {"parameters": parameters, "rng": torch.get_rng_state(), "progress": counts}
    writer = HashingWriter(folder, _files(parameters))
    try:
        with _without_warnings():
            dcp.save(state, storage_writer=writer, planner=PiecesPlanner(), no_dist=_is_single_process())
    except CheckpointException as error:  # a BaseException, which hides its cause
        raise _cause(error) from error
    return writer.digests


def _files(parameters: Parameters) -> int:
    """How many files this rank writes; they are written and hashed concurrently."""
    held = sum(local_share(tensor).nbytes for parameter in parameters.values() for tensor in parameter.values())
    return min(max(held // FILE_BYTES, 1), MOST_FILES)


def load_parameters(folder: Path, parameters: Parameters, fetch: Fetch = all_there) -> Progress:
    """Restore what `save_parameters` wrote, bitwise, into the tensors of `parameters`.

    `folder` holds METADATA at least; the files that this rank reads are fetched.

    Raises:
        UserError: the checkpoint belongs to another model, is damaged, cannot be fetched, or holds more than tensors.
        Exception: memory ran out.
    """
    rng, counts = torch.get_rng_state(), torch.zeros(2, dtype=torch.int64)
    state = {"parameters": parameters, "rng": rng, "progress": counts}
    check_metadata(folder)
    try:
        with _without_warnings():
            reader = _FetchingReader(folder, fetch)
            dcp.load(state, storage_reader=reader, planner=_TensorsOnly(), no_dist=_is_single_process())
    except (CheckpointException, RuntimeError, ValueError) as error:
        if isinstance(cause := _first(error), UserError) or ran_out(cause):
            raise cause from error
        raise UserError(f"the checkpoint in {folder} is not one of this model: {_reason(error)}") from error
    torch.set_rng_state(rng)
    step, skipped = counts.tolist()
    return Progress(step, skipped)


def check_metadata(folder: Path) -> None:
    """Raise UserError if the checkpoint's index, which DCP unpickles, names more than DCP's types and `_NAMES`."""
    with (folder / METADATA).open("rb") as file:
        _Guarded(file).load()


class _Guarded(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if self._known(module, name) else None
        if f"{module}.{name}" not in _NAMES and (not isinstance(found, type) or found.__module__ != module):
            raise UserError(
                f"the checkpoint names {module}.{name}, which no checkpoint of a model needs: do not use it"
            )
        return found

    @staticmethod
    def _known(module: str, name: str) -> bool:
        """No dotted names, which reach imported modules: DCP's `filesystem` imports `os` and thus has `os.system`."""
        return f"{module}.{name}" in _NAMES or (f"{module}.".startswith(_MODULES) and "." not in name)


class _TensorsOnly(DefaultLoadPlanner):  # type: ignore[misc]
    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise ValueError(f"{read_item.dest_index.fqn} is not a tensor")


class _FetchingReader(dcp.FileSystemReader):  # type: ignore[misc]
    """Reads no file that no tensor of this rank is in: it need not be there."""

    def __init__(self, folder: Path, fetch: Fetch) -> None:
        super().__init__(folder)
        self.fetch = fetch

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self.fetch({self.storage_data[item.storage_index].relative_path for item in plan.items})
        read: Future[None] = super().read_data(plan, planner)
        return read


def _is_single_process() -> bool:
    return not dist.is_initialized()


def _without_warnings() -> warnings.catch_warnings[None]:
    """DCP warns if there is no process group, as in a single process."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)


def _cause(error: CheckpointException) -> Exception:
    first = _first(error)
    return first if isinstance(first, Exception) else RuntimeError(_reason(error))


def _first(error: BaseException) -> BaseException:
    """The first failure of any rank."""
    failures = getattr(error, "failures", {})
    return next((cause for cause, _ in failures.values()), error)


def _reason(error: BaseException) -> str:
    first = _first(error)
    return str(first).splitlines()[0] if str(first) else type(first).__name__


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────────────


#: A larger tensor is split along its first dimension, so that no file and no page-locked buffer has to hold all of it.
PIECE_BYTES: Final = 32 * 2**20
#: Bytes that are hashed and then written at a time, while in a CPU cache; each time the GIL is released twice.
_RUN_BYTES: Final = 4 * 2**20


class PiecesPlanner(DefaultSavePlanner):  # type: ignore[misc]
    """DCP's planner, with tensors split into pieces of at most PIECE_BYTES (or one row if that is larger).

    What every rank reads is written by the first one. DCP would spread it over the files of all ranks, so that every
    machine would need nearly all files to restore its share.
    """

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.pieces: dict[MetadataIndex, Tensor] = {}
        self.plan = replace(plan, items=[piece for item in plan.items for piece in self._cut(item)])
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        first, *others = all_plans
        by_first = {item.index for item in first.items if _is_for_all(item)}
        others = [replace(p, items=[item for item in p.items if item.index not in by_first]) for p in others]
        made: tuple[list[SavePlan], Metadata] = super().create_global_plan([first, *others])
        return made

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.pieces.get(index)
        return super().lookup_object(index) if found is None else found

    def _cut(self, item: WriteItem) -> list[WriteItem]:
        """The item, or the pieces that replace it, whose tensors are views."""
        if item.tensor_data is None or _size(item) <= PIECE_BYTES:
            return [item]
        rows = item.tensor_data.chunk.sizes[0]
        parts = self.lookup_object(item.index).split(max(PIECE_BYTES * rows // _size(item), 1))
        cut, at = [], 0
        for part in parts:
            piece = _piece(item, at, part)
            self.pieces[piece.index] = part
            cut.append(piece)
            at += len(part)
        return cut


def _piece(item: WriteItem, at: int, part: Tensor) -> WriteItem:
    """The item for `part`, which begins `at` rows after the beginning of `item`."""
    first, *others = item.tensor_data.chunk.offsets
    offsets = torch.Size([first + at, *others])
    data = replace(item.tensor_data, chunk=ChunkStorageMetadata(offsets, part.shape))
    return replace(item, index=MetadataIndex(item.index.fqn, offsets), type=WriteItemType.SHARD, tensor_data=data)


def _is_for_all(item: WriteItem) -> bool:
    """Whether every rank reads it, however many there are: the step count of a parameter, random state, progress."""
    name: str = item.index.fqn
    return name in ("rng", "progress") or name.endswith(".step")


def _size(item: WriteItem) -> int:
    """Bytes that this item adds to a file."""
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


@dataclass(frozen=True)
class _Hashed(WriteResult):  # type: ignore[misc]
    sha256: str  # of the whole file


class HashingWriter(dcp.FileSystemWriter):  # type: ignore[misc]
    """Writes tensors in pieces, by as many threads as there are cores, each byte once; DCP's own reader reads them.

    DCP's writer would copy every tensor into new pageable memory and compute an unused checksum (CRC32); the files
    would then be read again for their SHA-256. Here each thread copies its pieces from the device into one page-locked
    buffer that it reuses, and hashes and writes them from there. `digests` (rank 0): SHA-256 by name, of every rank's
    files.
    """

    def __init__(self, folder: Path, files: int) -> None:
        super().__init__(folder, sync_files=False)
        self.files = files
        self.digests: dict[str, str] = {}

    def write_data(self, plan: SavePlan, planner: PiecesPlanner) -> Future[list[WriteResult]]:
        for_all = [item for item in plan.items if _is_for_all(item)]
        others = [item for item in plan.items if not _is_for_all(item)]
        shares = [share for share in (for_all, *_distributed(others, self.files)) if share]
        named = [(f"{plan.storage_data.prefix}{n}{DEFAULT_SUFFIX}", share) for n, share in enumerate(shares)]
        written = parallel(lambda one: _write_file(self.path, planner, *one), named, os.cpu_count() or 1)
        future: Future[list[WriteResult]] = Future()
        future.set_result([result for results in written for result in results])
        return future

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        self.digests = {one.storage_data.relative_path: one.sha256 for of_rank in results for one in of_rank}
        super().finish(metadata, results)


def _distributed(items: Sequence[WriteItem], files: int) -> list[list[WriteItem]]:
    """The items in `files` shares of about the same size: the largest first, each into the smallest share."""
    shares: list[list[WriteItem]] = [[] for _ in range(files)]
    sizes = [0] * files
    for item in sorted(items, key=_size, reverse=True):
        smallest = sizes.index(min(sizes))
        shares[smallest].append(item)
        sizes[smallest] += _size(item)
    return shares


def _write_file(folder: Path, planner: PiecesPlanner, name: str, items: Sequence[WriteItem]) -> list[_Hashed]:
    """Write the tensors of `items` one after another, each in torch.save's format."""
    places, host = [], Host()
    with (folder / name).open("wb") as file, _no_checksums():
        sink = _Sink(file)
        for item in items:
            start = sink.length
            torch.save(host.take(planner.resolve_data(item).detach()), cast(Any, sink))
            places.append(_StorageInfo(name, start, sink.length - start))
    digest = sink.sha256.hexdigest()
    return [_Hashed(item.index, at.length, at, digest) for item, at in zip(items, places, strict=True)]


class _Sink:
    """The file object for torch.save: writes to a file and updates its SHA-256."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.sha256 = hashlib.sha256()
        self.length = 0

    def write(self, data: memoryview) -> int:
        for start in range(0, len(data), _RUN_BYTES):
            run = data[start : start + _RUN_BYTES]
            self.sha256.update(run)
            self.file.write(run)
        self.length += len(data)
        return len(data)

    def flush(self) -> None:
        """torch.save calls this after every tensor; closing the file is enough."""


class Host:
    """Copies tensors to host memory through one thread's buffer. Each copy is valid until the next one is made."""

    def __init__(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, tensor: Tensor) -> Tensor:
        """`tensor` in host memory, contiguous and alone in its storage."""
        return with_own_storage(tensor.contiguous() if tensor.device.type == "cpu" else self.through_buffer(tensor))

    def through_buffer(self, tensor: Tensor) -> Tensor:
        """A copy at the beginning of the buffer, which is page-locked for tensors of a GPU."""
        if tensor.nbytes > len(self.buffer):
            room = max(tensor.nbytes, PIECE_BYTES)
            self.buffer = torch.empty(room, dtype=torch.uint8, pin_memory=tensor.is_cuda)
        there = self.buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return there.copy_(tensor)


def with_own_storage(tensor: Tensor) -> Tensor:
    """A contiguous tensor's bytes in a storage that holds nothing else: torch.save writes whole storages."""
    if not tensor.nbytes:
        return torch.empty_like(tensor)
    raw = torch.from_numpy(tensor.view(-1).view(torch.uint8).numpy())
    return raw.view(tensor.dtype).view(tensor.shape)


@contextmanager
def _no_checksums() -> Iterator[None]:
    """Turn off torch.save's CRC32 in this thread: torch.load does not check it, and the store keeps a SHA-256."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)
