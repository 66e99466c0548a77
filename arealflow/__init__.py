"""arealflow from Python: `arealflow.connect("run")` is a DuckDB connection with the views of a run."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from arealflow.packages import check_packages

if TYPE_CHECKING:
    import duckdb


def connect(*runs: str, store: str = "") -> duckdb.DuckDBPyConnection:
    """A DuckDB connection with the views of `arealflow sql` (docs/reference/views.md), for the runs' current commits.

    It reads only what the runs' commits select, and can open no other file. Close it, or use it as a context manager.

    Args:
        runs: One or several: each view has the rows of all of them, and a column `run`. None given: all runs of the
            store, with a warning for each that cannot be read.
        store: Folder or URL of the store. Empty: AREALFLOW_STORE, else the default folder.

    Raises:
        ImportError: packages with the names of arealflow's hide them.
        schemas.errors.UserError: a run does not exist, or the store cannot be read.
    """
    check_packages()
    from areal_tasks.store.backend import open_store  # here: the `arealflow` command imports this module too
    from areal_tasks.store.query import Session
    from areal_tasks.store.run_list import list_runs

    place = open_store(store)
    every = [] if runs else list_runs(place)
    for run in every:
        if run.problem:
            warnings.warn(f"left out: run {run.name}: {run.problem}", stacklevel=2)
    names = runs or [run.name for run in every if not run.problem]
    return Session(place, *names, several=not runs).connection


__all__ = ["connect"]
