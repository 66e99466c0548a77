"""Reward against iteration and against the clock, by variant, as an SVG that needs no library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.asynchrony_learning import VARIANTS, Learned

Line = NDArray[np.float64]
WIDTH, HEIGHT, LEFT, TOP = 520.0, 340.0, 50.0, 40.0  # of a chart, and its place in its half
TICKS: Final = 5
SMOOTHED: Final = 10  # iterations that a point is the mean of
COLOURS: Final = ("#1f77b4", "#2ca02c", "#d62728", "#9467bd")


def plot(learned: Sequence[Learned], folder: Path) -> None:
    """Write reward.svg: the mean over seeds as a line, each seed as a fainter one."""
    charts = [
        *_chart(learned, lambda one: np.arange(len(one.rewards), dtype=float), "iteration", 0.0),
        *_chart(learned, lambda one: np.array(one.elapsed), "seconds since the first iteration ended", LEFT + WIDTH),
    ]
    width, height = 2 * (LEFT + WIDTH) + 20, TOP + HEIGHT + 50
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-family="sans-serif"'
    svg = [f'{head} font-size="12">', '<rect width="100%" height="100%" fill="white"/>', *charts, *_names(learned)]
    (folder / "reward.svg").write_text("\n".join([*svg, "</svg>"]), encoding="utf-8")


def _chart(learned: Sequence[Learned], x_of: Callable[[Learned], Line], label: str, shift: float) -> Iterator[str]:
    most = max(float(x_of(one)[-1]) for one in learned)
    top = max(0.1, float(np.ceil(max(_smooth(one.rewards).max() for one in learned) * 10) / 10))
    to_x, to_y = (lambda x: shift + LEFT + x / most * WIDTH), (lambda y: TOP + HEIGHT - y / top * HEIGHT)
    yield from _axes(most, top, label, shift)
    for variant, colour in zip(VARIANTS, COLOURS, strict=True):
        runs = [one for one in learned if one.variant == variant]
        lines = [(_smooth(x_of(one)), _smooth(one.rewards)) for one in runs]
        for x, y in lines:
            yield _line(to_x(x), to_y(y), colour, 0.25)
        if lines:
            x, y = (np.mean([line[axis] for line in lines], axis=0) for axis in (0, 1))
            yield _line(to_x(x), to_y(y), colour, 1.0)


def _axes(most: float, top: float, label: str, shift: float) -> Iterator[str]:
    left, bottom = shift + LEFT, TOP + HEIGHT
    yield f'<path d="M{left:.1f} {TOP}V{bottom}h{WIDTH}" fill="none" stroke="#444"/>'
    yield f'<text x="{left + WIDTH / 2:.1f}" y="{bottom + 36:.1f}" text-anchor="middle">{escape(label)}</text>'
    yield f'<text x="{left + 8:.1f}" y="{TOP:.1f}">mean reward of {SMOOTHED} iterations</text>'
    for share in np.linspace(0, 1, TICKS):
        x, y = left + share * WIDTH, bottom - share * HEIGHT
        yield f'<text x="{x:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{share * most:.0f}</text>'
        yield f'<text x="{left - 5:.1f}" y="{y + 4:.1f}" text-anchor="end">{share * top:.2f}</text>'


def _names(learned: Sequence[Learned]) -> Iterator[str]:
    runs = Counter(one.variant for one in learned)
    for place, (variant, colour) in enumerate(zip(VARIANTS, COLOURS, strict=True)):
        if variant in runs:
            text = f"{variant}, {runs[variant]} run{'s' if runs[variant] > 1 else ''}"
            yield f'<text x="{LEFT + place * 155:.1f}" y="20" fill="{colour}">{escape(text)}</text>'


def _line(x: Line, y: Line, colour: str, opacity: float) -> str:
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5" opacity="{opacity}"/>'


def _smooth(values: Sequence[float] | Line) -> Line:
    """Means of `SMOOTHED` neighbouring values; the values themselves if there are fewer."""
    if len(values) < SMOOTHED:
        return np.asarray(values, float)
    return np.convolve(values, np.ones(SMOOTHED) / SMOOTHED, mode="valid")
