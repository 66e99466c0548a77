"""Replays a run in this process, as the flow does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stage_driver import drive, store_in

from areal_tasks.stages.build import Built
from areal_tasks.stages.jobs import Execute, Job, run_directly
from areal_tasks.stages.replay import replay_segments
from areal_tasks.store.backend import Store
from areal_tasks.store.fork import Origin
from areal_tasks.store.query import run_sql
from areal_tasks.store.runs import Run, load_run
from schemas.recipe.recipe import Recipe


def kept(start: str, original: str = "whole", at: int = 0, until: str = "") -> Origin:
    """A replay that keeps the recorded rollouts."""
    return Origin(original, at, "replay", True, start, until)


def segments(
    folder: Path, name: str, origin: Origin, *changes: str, store: Store | None = None
) -> list[tuple[int, Recipe]]:
    """The recipes of a replay, checked."""
    return replay_segments(load_run(store or store_in(folder), origin.parent), origin, name, changes)


def replay(
    folder: Path,
    name: str,
    origin: Origin,
    *changes: str,
    execute: Execute = run_directly,
    store: Store | None = None,
) -> Run:
    """Bring a replay to its end."""
    asked = segments(folder, name, origin, *changes, store=store)
    return drive(folder, name, asked[-1][1], execute, origin, asked, store)


def without_engines(jobs: Sequence[Job]) -> list[Built]:
    """Runs the jobs of a replay that needs no engine."""
    assert not jobs[0].context.engines.supervisor.services
    return run_directly(jobs)


def asked(folder: Path, name: str, query: str) -> list[dict[str, Any]]:
    return run_sql(store_in(folder), name, query).to_pylist()
