"""Python's garbage collector: off during imports, rare during iterations. Imports the standard library alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

#: More than the number of objects in all answers in flight: each sample has lists with an element per token.
YOUNG_OBJECTS: Final = 50_000


@contextmanager
def importing() -> Iterator[None]:
    """While inside, the garbage collector is off: modules consist of a million objects that are never freed.

    The collector would traverse all of them repeatedly: importing a flow takes 5.1 CPU seconds with it and 4.0
    without (torch 2.13, transformers 5.23, Prefect 3.8). Objects that exist on leaving stay exempt (`gc.freeze`).
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if on:
            gc.enable()


@contextmanager
def rare_collections() -> Iterator[None]:
    """While inside, the garbage collector waits for `YOUNG_OBJECTS` new objects.

    With Python's 700, reading an iteration's answers makes it traverse all objects of the process several times (0.4 s
    with Prefect and torch loaded), although lists of numbers have no cycles and need no collector.
    """
    before = gc.get_threshold()
    if before[0]:  # 0: the caller has turned it off
        gc.set_threshold(max(before[0], YOUNG_OBJECTS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
