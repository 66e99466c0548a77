"""Kill points for the matrix: every Python process below it imports this at its start (by PYTHONPATH).

The file that AREAL_CHAOS_POINT names holds `{"when": "before" | "after", "match": REGEX, "pid": N}`. The first process
that is about to write an object whose path matches (or that has just written it) takes the file away and kills `pid`;
with `"own": true` only the process `pid` itself does so.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

POINT = os.environ.get("AREAL_CHAOS_POINT", "")
MODULE = "areal_tasks.store.backend"


class Armed(MetaPathFinder):
    """Wraps the store's writes once their module is imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            tracked = module.tracked
            module.tracked = lambda operation: tracked(wrapped(operation))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def wrapped(write: Any) -> Any:
    if write.__name__ not in ("create", "put_file", "put_pieces"):
        return write

    @wraps(write)
    def call(store: Any, path: str, *arguments: Any) -> Any:
        strike("before", path)
        result = write(store, path, *arguments)
        strike("after", path)
        return result

    return call


def strike(when: str, path: str) -> None:
    try:
        with open(POINT) as file:
            point = json.load(file)
        if point["when"] != when or not re.search(point["match"], path):
            return
        if point.get("own") and point["pid"] != os.getpid():
            return
        os.rename(POINT, f"{POINT}.struck")
    except (FileNotFoundError, ValueError):
        return  # no point is set, or another process was faster
    os.kill(point["pid"], signal.SIGKILL)


if POINT:
    sys.meta_path.insert(0, Armed())
