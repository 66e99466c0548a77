"""Curves as short lists of numbers: thinned with their extremes kept, and rounded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

DIGITS: Final = 5  # significant; a screen shows three

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    """One line of a chart; `low` and `high` bound the band around it, where it has one."""

    name: str
    x: Numbers
    y: Numbers
    low: Numbers | None = None
    high: Numbers | None = None

    def payload(self) -> dict[str, Any]:
        """As the page reads it."""
        band = {} if self.low is None or self.high is None else {"lo": rounded(self.low), "hi": rounded(self.high)}
        return {"name": self.name, "x": rounded(self.x), "y": rounded(self.y), **band}


def thin(series: Series, points: int) -> Series:
    """At most `points` points: means of neighbours, with their least and greatest values as the band."""
    if len(series.x) <= points:
        return series
    parts = np.array_split(np.arange(len(series.x)), points)
    low, high = (series.y if bound is None else bound for bound in (series.low, series.high))
    return Series(
        series.name,
        np.array([series.x[part].mean() for part in parts]),
        np.array([_finite(np.mean, series.y[part]) for part in parts]),
        np.array([_finite(np.min, low[part]) for part in parts]),
        np.array([_finite(np.max, high[part]) for part in parts]),
    )


def _finite(reduce: Any, values: Numbers) -> float:
    """`reduce` over the finite values; NaN where there are none."""
    finite = values[np.isfinite(values)]
    return float(reduce(finite)) if len(finite) else math.nan


def rounded(values: Numbers) -> list[float | None]:
    return [number(value) for value in values.tolist()]


def number(value: float | None, digits: int = DIGITS) -> float | None:
    """A number rounded to `digits` significant digits; None if it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    if not math.isfinite(short):  # the largest numbers may round to infinity
        return None
    return int(short) if short.is_integer() and abs(short) < 1e16 else short
