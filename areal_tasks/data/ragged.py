"""Ragged Arrow columns (lists of different lengths) as flat NumPy arrays, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

Flat = np.ndarray[tuple[int], np.dtype[Any]]


def lengths(column: pa.ChunkedArray) -> Flat:
    """The length of each list. [N] int64."""
    combined = _combined(column)
    return np.diff(np.asarray(combined.offsets)).astype(np.int64)


def flat(column: pa.ChunkedArray) -> Flat:
    """All lists concatenated. [T]"""
    return np.asarray(_combined(column).flatten().to_numpy(zero_copy_only=False))


def ragged(values: Flat, sizes: Flat, kind: pa.ListType) -> pa.ListArray:
    """Splits `values` into lists of `sizes`. ValueError if the sizes do not add up to the number of values."""
    if len(values) != int(sizes.sum()):
        raise ValueError(f"{len(values)} values for lists of {int(sizes.sum())} elements in all")
    offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(sizes, dtype=np.int32)])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, type=kind.value_type))


def scatter(values: Flat, mask: Flat) -> Flat:
    """`values` (one per True of `mask`) at the positions of the Trues; 0 elsewhere. [T]"""
    full = np.zeros(len(mask), dtype=values.dtype)
    full[mask] = values
    return full


def _combined(column: pa.ChunkedArray) -> pa.ListArray:
    combined = column.combine_chunks()
    return combined.chunk(0) if isinstance(combined, pa.ChunkedArray) else combined
