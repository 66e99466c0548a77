"""The files of a checkpoint: what each rank writes into which, in pieces that are hashed on their way.

DCP's own reader reads them. Its writer would copy every tensor into new pageable memory and compute an unused checksum
(CRC32), and the files would then be read again for their SHA-256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.serialization import set_crc32_options

from areal_tasks.store.parallel import parallel

#: A rank writes files of about this size, or larger ones if they would be more than MOST_FILES.
FILE_BYTES: Final = 256 * 2**20
MOST_FILES: Final = 32
#: A larger tensor is split along its first dimension, so that no file has to hold all of it.
PIECE_BYTES: Final = 32 * 2**20
#: Bytes that are hashed and then written at a time, while in a CPU cache; each time the GIL is released twice.
_RUN_BYTES: Final = 4 * 2**20

#: Called with the name of each file that is complete.
Put = Callable[[str], object]
#: A tensor and its place in the checkpoint.
Piece = tuple[WriteItem, Tensor]


class PiecesPlanner(DefaultSavePlanner):  # type: ignore[misc]
    """DCP's planner, with tensors split into pieces of at most PIECE_BYTES (or one row if that is larger).

    The first rank writes what every rank reads. Else every machine would need nearly all files to restore its share.
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
        first, *others = item.tensor_data.chunk.offsets
        cut = []
        for part in parts:
            offsets = torch.Size([first, *others])
            index = MetadataIndex(item.index.fqn, offsets)
            data = replace(item.tensor_data, chunk=ChunkStorageMetadata(offsets, part.shape))
            self.pieces[index] = part
            cut.append(replace(item, index=index, type=WriteItemType.SHARD, tensor_data=data))
            first += len(part)
        return cut


def _is_for_all(item: WriteItem) -> bool:
    """Whether every rank reads it, however many there are: the step count of a parameter, random state, progress."""
    name: str = item.index.fqn
    return name in ("rng", "progress") or name.endswith(".step")


def _size(item: WriteItem) -> int:
    """Bytes that this item adds to a file."""
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


@dataclass(frozen=True)
class Hashed(WriteResult):  # type: ignore[misc]
    """Where a tensor was written."""

    file_sha256: str  # of the whole file
    file_bytes: int


def write_files(folder: Path, prefix: str, pieces: Sequence[Piece], put: Put, threads: int) -> list[Hashed]:
    """Write `pieces` into files of `folder` whose names begin with `prefix`, each byte once; `put` each file."""
    for_all = [piece for piece in pieces if _is_for_all(piece[0])]
    others = [piece for piece in pieces if not _is_for_all(piece[0])]
    others.sort(key=lambda piece: _size(piece[0]), reverse=True)
    files = min(max(sum(_size(item) for item, _ in others) // FILE_BYTES, 1), MOST_FILES)
    shares = [for_all, *(others[share::files] for share in range(files))]  # of about FILE_BYTES
    named = [(f"{prefix}{n}{DEFAULT_SUFFIX}", share) for n, share in enumerate(filter(None, shares))]

    def write(one: tuple[str, Sequence[Piece]]) -> list[Hashed]:
        written = _write_file(folder, *one)
        put(one[0])
        return written

    return [result for of_file in parallel(write, named, threads) for result in of_file]


def _write_file(folder: Path, name: str, pieces: Sequence[Piece]) -> list[Hashed]:
    """Write the tensors of `pieces` one after another, each in torch.save's format."""
    places = []
    set_crc32_options(False)  # in this thread: torch.load does not check it, and the store keeps a SHA-256
    with (folder / name).open("wb") as file:
        sink = _Sink(file)
        for _, tensor in pieces:
            start = sink.length
            try:
                torch.save(with_own_storage(tensor.cpu().contiguous()), cast(Any, sink))
            except RuntimeError as error:
                if isinstance(error.__context__, OSError):  # the disk's; torch.save hides it behind one of its own
                    raise error.__context__ from None
                raise
            places.append(_StorageInfo(name, start, sink.length - start))
    digest = sink.sha256.hexdigest()
    written = zip(pieces, places, strict=True)
    return [Hashed(item.index, at.length, at, digest, sink.length) for (item, _), at in written]


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


# ── copies in host memory ───────────────────────────────────────────────────────────────────────────────────────────

#: Copies lie in blocks of this size: torch rounds the size of page-locked memory up to a power of two.
BLOCK_BYTES: Final = 256 * 2**20
_ALIGNED: Final = 64  # bytes; a tensor begins at a multiple


class Copies:
    """Copies of tensors in host memory, page-locked for those of a GPU, in blocks that stay for the next copies."""

    def __init__(self) -> None:
        self.blocks: list[Tensor] = []

    def lacking(self, sizes: Sequence[int]) -> int:
        """Bytes that copies of tensors of these sizes take beyond the blocks that there are."""
        return max(sum(_packed(sizes)[1]) - sum(map(len, self.blocks)), 0)

    def allocate(self, sizes: Sequence[int], page_locked: bool) -> list[tuple[int, int]]:
        """Allocate the blocks for copies of tensors of these sizes, unless they are there; of each its block and place.

        Raises RuntimeError or MemoryError if the host has no room.
        """
        places, blocks = _packed(sizes)
        if list(map(len, self.blocks)) != blocks:
            self.blocks = []  # freed before others are allocated
            self.blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=page_locked) for size in blocks]
        return places

    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies of `tensors`, which may change when this returns. They are valid until the next call."""
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        places = self.allocate([tensor.nbytes for tensor in tensors], on_gpu)
        copies = [self._copy(tensor, *place) for tensor, place in zip(tensors, places, strict=True)]
        if on_gpu:
            torch.cuda.synchronize()
        return copies

    def _copy(self, tensor: Tensor, block: int, at: int) -> Tensor:
        memory = self.blocks[block][at : at + tensor.nbytes]
        return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)


def _packed(sizes: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """For each of these sizes its block and place there; and the sizes of the blocks."""
    places: list[tuple[int, int]] = []
    blocks = [0]
    for size in sizes:
        if blocks[-1] + size > BLOCK_BYTES and blocks[-1]:
            blocks.append(0)
        places.append((len(blocks) - 1, blocks[-1]))
        blocks[-1] += -(-size // _ALIGNED) * _ALIGNED
    return places, blocks


def with_own_storage(tensor: Tensor) -> Tensor:
    """A contiguous tensor's bytes in a storage that holds nothing else: torch.save writes whole storages."""
    if not tensor.nbytes:
        return torch.empty_like(tensor)
    raw = torch.from_numpy(tensor.view(-1).view(torch.uint8).numpy())
    return raw.view(tensor.dtype).view(tensor.shape)
