"""Derives the graph of an iteration from the declarations of its stages, as a data-flow graph.

The planner starts from target stages and adds the stages that write what these read. A cycle, a column that no stage
writes or a table that two stages write is rejected before anything starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from areal_tasks.stages.stage import Stage
from schemas.tables import TABLES


class PlanError(Exception):
    """The declared reads and writes form no valid graph. A mistake in the stages, not in a recipe."""


@dataclass(frozen=True)
class Plan:
    """The stages of one iteration in order, and for each the stages that it waits for.

    `producers`: for each table, the stage that writes it.
    """

    stages: tuple[Stage, ...]
    waits: Mapping[str, Set[str]]
    producers: Mapping[str, str]

    def levels(self) -> list[list[Stage]]:
        """Sets of stages that may run concurrently; each one as late as possible, so that evaluation overlaps train."""
        depth: dict[str, int] = {}
        for stage in reversed(self.stages):
            followers = [depth[s.name] for s in self.stages if stage.name in self.waits[s.name]]
            depth[stage.name] = 1 + max(followers, default=0)
        ranks = sorted(set(depth.values()), reverse=True)
        return [[s for s in self.stages if depth[s.name] == rank] for rank in ranks]

    def inputs(self, stage: Stage) -> tuple[str, ...]:
        """Names of the stages whose tables `stage` reads, in the order of its declaration."""
        return tuple(dict.fromkeys(self.producers[table] for table in stage.inputs))


def plan(available: Sequence[Stage], targets: Iterable[str]) -> Plan:
    """The part of `available` that `targets` need, in an order that respects every read. Raises PlanError."""
    producers = writers(available)
    by_name = {stage.name: stage for stage in available}
    needed = _closure(targets, by_name, producers)
    reads = {name: {producers[table] for table in by_name[name].inputs} for name in needed}
    waits = {name: (reads[name] | set(by_name[name].after)) & needed for name in needed}
    try:
        order = list(TopologicalSorter({name: sorted(waits[name]) for name in sorted(waits)}).static_order())
    except CycleError as error:
        raise PlanError(f"the stages wait for each other in a cycle: {' → '.join(error.args[1])}") from error
    return Plan(tuple(by_name[name] for name in order), waits, producers)


def writers(stages: Sequence[Stage]) -> dict[str, str]:
    """Which stage writes each table. Raises PlanError for a table with two writers or without a schema."""
    found: dict[str, str] = {}
    for stage in stages:
        for table in stage.writes:
            if table in found:
                raise PlanError(f"table {table!r} is written twice: by {found[table]!r} and by {stage.name!r}")
            if table not in TABLES:
                raise PlanError(f"stage {stage.name!r} writes {table!r}, which has no schema")
            found[table] = stage.name
    return found


def _closure(targets: Iterable[str], by_name: Mapping[str, Stage], producers: Mapping[str, str]) -> set[str]:
    """The targets and all stages that write what these read, directly or indirectly."""
    found: set[str] = set()
    queue = list(targets)
    while queue:
        if (name := queue.pop()) in found:
            continue
        found.add(name)
        for read in by_name[name].reads:
            table, column = read.split(".")
            if table not in producers or column not in TABLES[table].names:
                raise PlanError(f"stage {name!r} reads {read!r}, which no stage writes")
            queue.append(producers[table])
    return found
