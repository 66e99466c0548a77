"""The content digest of a table, which does not depend on its chunks, row groups or shards."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from areal_tasks.store.parallel import parallel
from schemas.tables import VOLATILE

Update = Callable[[Any], None]

_PARALLEL_BYTES: Final = 8 << 20


def content_digest(table: pa.Table) -> str:
    """SHA-256 over names, types and values of the columns, without those of `schemas.tables.VOLATILE`.

    It depends on the order of columns and rows and on every bit of every value, and on nothing else: a column is
    hashed as the concatenated lengths of its strings and lists, then their concatenated contents. No nulls.
    """
    columns = [(f.name, _type_name(f.type), table.column(f.name)) for f in table.schema if f.name not in VOLATILE]
    chunked = [column for _, _, column in columns]
    large = table.nbytes > _PARALLEL_BYTES
    digests = parallel(_column_digest, chunked) if large else [_column_digest(column) for column in chunked]
    whole = hashlib.sha256(f"{table.num_rows}".encode())
    for (name, kind, _), digest in zip(columns, digests, strict=True):
        whole.update(f"\n{name}\t{kind}\t".encode() + digest)
    return whole.hexdigest()


def _type_name(kind: pa.DataType) -> str:
    """A type's name without Parquet's name for the elements of a list."""
    return f"list<{_type_name(kind.value_type)}>" if pa.types.is_list(kind) else str(kind)


def _column_digest(column: pa.ChunkedArray) -> bytes:
    digest = hashlib.sha256()
    _hash(column.type, column.chunks, digest.update)
    return digest.digest()


def _hash(kind: pa.DataType, chunks: Sequence[pa.Array], update: Update) -> None:
    """Feed the values of `chunks` to `update`, depth first."""
    if any(chunk.null_count for chunk in chunks):
        raise ValueError("a content digest is defined for values without nulls")
    if pa.types.is_list(kind):
        _hash(kind.value_type, [_elements(chunk, update) for chunk in chunks], update)
    elif pa.types.is_string(kind):
        for text in [_text(chunk, update) for chunk in chunks]:
            update(text)
    else:
        for chunk in chunks:
            update(_flat(kind, chunk))


def _elements(chunk: pa.ListArray, update: Update) -> pa.Array:
    """Feed the lists' lengths; returns their concatenated elements."""
    offsets = _offsets(chunk, update)
    return chunk.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))


def _text(chunk: pa.StringArray, update: Update) -> memoryview:
    """Feed the strings' lengths; returns their concatenated UTF-8."""
    offsets = _offsets(chunk, update)
    data = chunk.buffers()[2]
    return memoryview(data or b"")[int(offsets[0]) : int(offsets[-1])]


def _offsets(chunk: pa.Array, update: Update) -> npt.NDArray[np.int32]:
    buffer = chunk.buffers()[1]
    if len(chunk) == 0 or buffer is None:
        return np.zeros(1, np.int32)
    offsets = np.frombuffer(buffer, np.int32, len(chunk) + 1, chunk.offset * 4)
    update(np.diff(offsets))
    return offsets


def _flat(kind: pa.DataType, chunk: pa.Array) -> npt.NDArray[Any]:
    """The values of a chunk of numbers or booleans, contiguous in memory."""
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise TypeError(f"no content digest is defined for {kind}")
    return np.ascontiguousarray(chunk.to_numpy(zero_copy_only=not pa.types.is_boolean(kind)))
