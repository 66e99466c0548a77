"""The policy as it is published: full tensors under their checkpoint's names, kept on the device between versions.

All versions use the same memory: a server that shares the GPU maps it once; page-locked memory is allocated once.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file
from torch import Tensor

from areal_tasks.engines.empty import empty_model
from areal_tasks.engines.names import Names
from areal_tasks.engines.shallow import read_config
from areal_tasks.engines.trainer.attention import NAME
from areal_tasks.store.backend import Content, Store
from areal_tasks.store.parallel import parallel
from schemas.manifest import FileRef

Named = Mapping[str, Tensor]
Wait = Callable[[], object]

SHARD_BYTES: Final = 128 * 2**20  # files of about this size are written and hashed concurrently
_THREADS: Final = 16  # at least: a disk takes several files at once
#: Suffixes of the files that describe a model and its tokenizer, published with new weights.
DESCRIPTION: Final = frozenset({".json", ".txt", ".model", ".jinja"})
#: safetensors' names for the dtypes of weights and buffers.
TYPES: Final = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float64: "F64", torch.int64: "I64", torch.int32: "I32", torch.bool: "BOOL",
}  # fmt: skip


class Snapshot:
    """The full tensors of one version, on the device, and their page-locked mirror on the host."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.lock = threading.RLock()  # held to change the tensors, and to read them concurrently with commands
        self.tensors: dict[str, Tensor] = {}
        self.mirror: dict[str, Tensor] = {}

    def take(self, version: int, named: Iterable[tuple[str, Tensor]], keep: bool = True) -> None:
        """Copy the weights of `version`, given one tensor at a time, with the same shapes in every version.

        A rank that does not `keep` them only takes part in gathering.
        """
        with self.lock:
            self.version = None
            names = set()
            for name, tensor in named:
                if keep:
                    _copy_into(self.tensors, name, tensor, tensor.device)
                    names.add(name)
            for name in self.tensors.keys() - names:  # of a policy that was loaded from other names
                del self.tensors[name]
            self.version = version

    def save(self, store: Store, prefix: str, others: Mapping[str, bytes]) -> tuple[FileRef, ...]:
        """Write the tensors as safetensors under `prefix`, in files of about SHARD_BYTES, and `others` by their names.

        Writing and hashing run concurrently, and together take as long as the longer of the two, which for a large file
        may be hashing. Returns the files sorted by path.
        """
        shards = _shards(self.tensors)
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        names = names if len(shards) > 1 else ["model.safetensors"]
        largest_first = sorted(zip(names, shards, strict=True), key=lambda one: -_size(one[1]))
        index = {} if len(shards) == 1 else {"model.safetensors.index.json": _index(names, shards)}
        coming: list[tuple[str, Callable[[], Content]]] = [
            *((f"{prefix}/{name}", partial(_content, *self._copied(shard))) for name, shard in largest_first),
            *((f"{prefix}/{name}", partial(list, [data])) for name, data in {**others, **index}.items()),
        ]
        work = [partial(make, *one) for one in coming for make in (_named, partial(_put, store))]
        made = parallel(lambda make: make(), work, max(_THREADS, os.cpu_count() or 1))
        return tuple(sorted((file for file in made if file is not None), key=lambda file: file.path))

    def host(self) -> Named:
        held, wait = self._copied(self.tensors)
        wait()
        return held

    def _copied(self, tensors: Named) -> tuple[Named, Wait]:
        """`tensors` in host memory, and a function that waits until their bytes are there."""
        if not any(tensor.is_cuda for tensor in tensors.values()):
            return tensors, lambda: None
        for name, tensor in tensors.items():
            _copy_into(self.mirror, name, tensor, torch.device("cpu"))
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record()
        return {name: self.mirror[name] for name in tensors}, done.synchronize


def read_description(folder: Path, dtype: torch.dtype) -> dict[str, bytes]:
    """The files of `folder` that describe model and tokenizer, by name, for weights in `dtype`."""
    config = json.loads((folder / "config.json").read_bytes())
    config.pop("torch_dtype", None)  # the key's older name
    text = json.dumps({**config, "dtype": str(dtype).removeprefix("torch.")}, indent=2)
    files = [f for f in folder.iterdir() if f.suffix in DESCRIPTION and not f.name.endswith(".index.json")]
    return {file.name: file.read_bytes() for file in files} | {"config.json": text.encode()}


def largest_difference(tensors: Named, folder: Path) -> float:
    """The largest difference between a weight of `tensors` and the same one in the Hugging Face folder `folder`.

    If the names differ, both are compared as the model's tensors: earlier versions of this program published those, and
    UserError if transformers cannot make them. Infinite if a tensor is missing, or of another shape, on one side.
    """
    stored: Named = {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}
    if tensors.keys() != stored.keys():
        model = empty_model(read_config(folder), NAME)
        tensors, stored = (Names(model, one).to_model(one) for one in (tensors, stored))
    if tensors.keys() != stored.keys() or any(tensors[name].shape != stored[name].shape for name in stored):
        return math.inf
    return max((_difference(tensors[name], stored[name]) for name in stored), default=0.0)


def _difference(one: Tensor, other: Tensor) -> float:
    """0 only if both are bitwise identical, except for signs of zeros; infinite if only one holds a NaN at a place."""
    if torch.equal(one, other):
        return 0.0
    alike = (one == other) | (one.isnan() & other.isnan())
    return float(torch.where(alike, 0.0, (one.float() - other.float()).abs()).nan_to_num(nan=math.inf).max())


def _copy_into(held: dict[str, Tensor], name: str, tensor: Tensor, device: torch.device) -> None:
    if name not in held:
        pinned = device.type == "cpu" and tensor.is_cuda
        held[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device, pin_memory=pinned)
    held[name].copy_(tensor, non_blocking=True)


def _shards(tensors: Named) -> list[Named]:
    """The tensors in their order, cut into runs of at least SHARD_BYTES."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if size >= SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return list(shards)


def _size(shard: Named) -> int:
    return sum(tensor.nbytes for tensor in shard.values())


def _index(names: Sequence[str], shards: Sequence[Named]) -> bytes:
    """The index that Hugging Face's loaders read to find each tensor."""
    total = sum(_size(shard) for shard in shards)
    places = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=1).encode()


def _content(tensors: Named, wait: Wait) -> Content:
    """The bytes of a safetensors file, in parts (an 8-byte length, a JSON header, the tensors' bytes end to end).

    The library first copies every tensor to Python bytes, holding the GIL, so that threads cannot write at once.
    """
    wait()
    as_bytes = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors.values())
    return [_header(tensors), *(memoryview(data.numpy()) for data in as_bytes)]  # type: ignore[arg-type]


def _put(store: Store, path: str, content: Callable[[], Content]) -> None:
    store.put_pieces(path, content())


def _named(path: str, content: Callable[[], Content]) -> FileRef:
    found, size = hashlib.sha256(), 0
    for data in content():
        size += len(data)
        found.update(data)
    return FileRef(path=path, sha256=found.hexdigest(), bytes=size)


def _header(tensors: Named) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.nbytes
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text
