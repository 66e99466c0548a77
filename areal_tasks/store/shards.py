"""Tables as immutable Parquet shards: written below an attempt, verified when read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from areal_tasks.store.backend import Store, StoreError
from areal_tasks.store.commit import verified
from areal_tasks.store.parallel import parallel
from schemas.manifest import ShardRef, TableRef
from schemas.tables import FLOATS, LATER, TABLES, TEXTS, VOLATILE

MAX_ROWS: Final = 8192
_SHARD_BYTES: Final = 256 << 20  # a shard of long samples holds fewer rows
_GROUP_ROWS: Final = 1024
_MARK: Final = b"arealsum"  # before the SHA-256 of a footer
_CHECKSUM_BYTES: Final = len(_MARK) + 32
_TAIL_BYTES: Final = 64 << 10  # holds nearly every footer; Arrow begins with as much


def write_table(
    store: Store, prefix: str, name: str, table: pa.Table, *, max_rows: int = MAX_ROWS, file: str = ""
) -> TableRef:
    """Write `table` as shards below `prefix` (an attempt's folder) and return the reference to commit.

    `file`: prefix of the shards' names, for one of several parts of a table; default: the table's name.

    Raises ValueError: it violates `schemas.tables.TABLES[name]`: other columns or types, nulls, lists that are not
    `num_tokens` long.
    """
    _check(name, table)
    row_bytes = table.nbytes // max(table.num_rows, 1) + 1
    step = max(1, min(max_rows, _SHARD_BYTES // row_bytes))
    starts = range(0, max(table.num_rows, 1), step)
    parts = [(f"{prefix}/{file or name}-{i:05d}.parquet", table.slice(start, step)) for i, start in enumerate(starts)]
    shards = parallel(lambda part: _write_shard(store, *part), parts)
    return TableRef(name=name, digest=content_digest(table), shards=tuple(shards))


def read_table(store: Store, ref: TableRef, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of `ref`, only `columns` if given, once the SHA-256 of every shard has been verified.

    Raises UserError: a shard is missing or damaged; the message names the file.
    """
    wanted = schema_of(ref.name, TABLES[ref.name].names if columns is None else columns)
    tables = parallel(lambda shard: read_shard(store, shard, wanted.names), ref.shards)
    return pa.concat_tables([table.cast(wanted) for table in tables])


def read_file(name: str, path: Path, columns: Sequence[str]) -> pa.Table:
    """`columns` of a verified file of the table `name` on this disk. Each page's checksum is verified again.

    Raises UserError: the file has been damaged since it was verified.
    """
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            table = _with_later(file, columns)
    except (OSError, pa.ArrowInvalid) as error:
        raise StoreError(
            f"{path} has been damaged since it was read: {error}. Restart the run, which reads it again."
        ) from error
    return table.cast(schema_of(name, columns))


def schema_of(name: str, columns: Sequence[str]) -> pa.Schema:
    return pa.schema([TABLES[name].field(column) for column in columns])


def _write_shard(store: Store, path: str, table: pa.Table) -> ShardRef:
    data = encode(table)
    store.put(path, data)
    return shard_ref(path, data, table)


def shard_ref(path: str, data: bytes, table: pa.Table) -> ShardRef:
    """The reference to a table that was encoded as `data` for `path`."""
    digest = hashlib.sha256(data).hexdigest()
    return ShardRef(path=path, sha256=digest, bytes=len(data), rows=table.num_rows, tokens=_tokens(table))


def encode(table: pa.Table, **layout: Any) -> bytes:
    """The table as the bytes of a Parquet file that can be verified in parts: SQL reads few columns of a large one.

    Each page has a CRC-32, and the footer a SHA-256 before it, for which Parquet has no place. Readers find the footer
    from the file's end, and the pages by their offsets in it, so they ignore what lies between.
    `layout`: options of Parquet that differ from those of a shard.
    """
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        compression="zstd",
        compression_level=1,
        write_page_checksum=True,
        **_layout(table.schema) | layout,
    )
    data = memoryview(sink.getvalue())
    footer = len(data) - int.from_bytes(data[-8:-4], "little") - 8
    return b"".join((data[:footer], _MARK, hashlib.sha256(data[footer:]).digest(), data[footer:]))


def footer_holds(file: pa.NativeFile, size: int) -> bool:
    """Whether an open file of `size` bytes has a checksum of its footer, and it holds; earlier versions wrote none."""
    tail: bytes = file.read_at(min(size, _TAIL_BYTES), max(size - _TAIL_BYTES, 0))
    footer = int.from_bytes(tail[-8:-4], "little") + 8
    long = footer + _CHECKSUM_BYTES
    if len(tail) < long <= size:
        tail = file.read_at(long, size - long)
    return tail[-long:-footer] == _MARK + hashlib.sha256(tail[-footer:]).digest()


def _layout(schema: pa.Schema) -> dict[str, Any]:
    """Options of Parquet. No dictionaries: zstd itself finds what a group's samples share."""
    return {
        "row_group_size": _GROUP_ROWS,
        "use_dictionary": False,
        "use_byte_stream_split": [f"{f.name}.list.element" for f in schema if f.type == FLOATS] or False,
        "write_statistics": [f.name for f in schema if not pa.types.is_list(f.type) and f.name not in TEXTS],
    }


def _tokens(table: pa.Table) -> int:
    """Number of tokens in the rows: their `num_tokens`, else the elements of their first list."""
    if "num_tokens" in table.column_names:
        return int(pc.sum(table.column("num_tokens")).as_py() or 0)
    lists = [f.name for f in table.schema if pa.types.is_list(f.type)]
    return sum(len(chunk.flatten()) for chunk in table.column(lists[0]).chunks) if lists else 0


def _check(name: str, table: pa.Table) -> None:
    wanted = TABLES[name]
    if not table.schema.equals(wanted):
        raise ValueError(f"table {name!r} violates its schema: {_difference(wanted, table.schema)}")
    tokens = table.column("num_tokens") if "num_tokens" in table.column_names else None
    for column, values in zip(table.column_names, table.columns, strict=True):
        is_list, where = pa.types.is_list(values.type), f"table {name!r}, column {column!r}"
        if values.null_count:
            raise ValueError(f"{where}: {values.null_count} nulls where none are allowed")
        if is_list and any(chunk.flatten().null_count for chunk in values.chunks):
            raise ValueError(f"{where}: a list holds nulls")
        if is_list and tokens is not None and not pc.list_value_length(values).equals(tokens):
            raise ValueError(f"{where}: its lists are not num_tokens long")


def _difference(wanted: pa.Schema, given: pa.Schema) -> str:
    missing = [f"{f.name} ({f.type})" for f in wanted if f.name not in given.names]
    surplus = [name for name in given.names if name not in wanted.names]
    other = [
        f"{f.name} is {given.field(f.name)}, not {f}"
        for f in wanted
        if f.name in given.names and not given.field(f.name).equals(f)
    ]
    parts = [*(f"{name} is missing" for name in missing), *(f"{name} is unknown" for name in surplus), *other]
    return "; ".join(parts) or f"columns are in another order: {given.names}"


def read_shard(store: Store, shard: ShardRef, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of one shard, verified; those of `columns` that it has (None: all)."""
    file = pq.ParquetFile(pa.BufferReader(verified(store, shard.path, shard.sha256)))
    names = file.schema_arrow.names if columns is None else list(columns)
    return _with_later(file, names)


def _with_later(file: pq.ParquetFile, names: Sequence[str]) -> pa.Table:
    """The columns `names` as far as the file has them, and those of LATER that it lacks."""
    lacking = [name for name in names if name in LATER and name not in file.schema_arrow.names]
    sources = {name: LATER[name] for name in lacking}
    table = file.read(columns=[*names, *filter(None, sources.values())], use_threads=False)
    for name, source in sources.items():
        table = table.append_column(name, all_false(table[source]) if source else pa.nulls(table.num_rows))
    return table.select([name for name in names if name in table.column_names])


def all_false(lists: pa.ChunkedArray) -> pa.ListArray:
    """For each list, a list of False of the same length."""
    whole = lists.combine_chunks()
    return pa.ListArray.from_arrays(whole.offsets, pa.array(np.zeros(len(whole.values), dtype=bool)))


# ── content digests ───────────────────────────────────────────────────────────────────────────────────────────────────


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
