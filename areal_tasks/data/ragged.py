"""Ragged Arrow columns (lists of different lengths) as flat NumPy arrays, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Flat = np.ndarray[tuple[int], np.dtype[Any]]


def lengths(column: pa.ChunkedArray) -> Flat:
    """The length of each list. [N] int64."""
    return np.asarray(pc.list_value_length(column).to_numpy().astype(np.int64))


def flat(column: pa.ChunkedArray) -> Flat:
    """All lists concatenated. [T]"""
    return np.asarray(pc.list_flatten(column).to_numpy())


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
