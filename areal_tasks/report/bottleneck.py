"""Where a run's time goes: what its services worked on and waited for, and the setting that would change it most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import duckdb

from areal_tasks.report.cost import Table, share

#: A wait of a smaller share of the time does not stand out.
STANDS_OUT: Final = 0.25
#: A process of Python code that uses so many cores, or a queue that is so full, limits what waits for it.
FULL_CORE, FULL_QUEUE = 0.9, 0.5

_SPENT: Final = """
SELECT regexp_replace(service, '-[0-9]+$', '') AS kind, part, entry.key AS what, sum(seconds * entry.value) AS seconds
FROM (SELECT service, seconds, 'works' AS part, unnest(map_entries(works)) AS entry FROM system
      UNION ALL SELECT service, seconds, 'waits', unnest(map_entries(waits)) FROM system)
WHERE entry.key <> 'start' GROUP BY ALL ORDER BY seconds DESC, what"""
_LOAD: Final = """
SELECT regexp_replace(service, '-[0-9]+$', '') AS kind, avg(cpu) AS cpu, avg(running / at_once) AS full FROM system
WHERE coalesce(waits['start'], 0) < 1 GROUP BY 1"""


@dataclass(frozen=True)
class Spent:
    """Of the services of one kind: seconds by what they worked on and waited for; mean cores, and share of the queue.

    The time before they had started does not count.
    """

    works: Mapping[str, float] = field(default_factory=dict)
    waits: Mapping[str, float] = field(default_factory=dict)
    cpu: float | None = None
    full: float | None = None

    @property
    def seconds(self) -> float:
        return sum(self.works.values()) + sum(self.waits.values())

    def waited(self, what: str) -> float:
        """The share of the time that they waited for `what`."""
        return self.waits.get(what, 0.0) / self.seconds if self.seconds else 0.0


def spent_of(connection: duckdb.DuckDBPyConnection) -> dict[str, Spent]:
    """By kind of service, of the view `system`: `trainer`, `inference`, `rollout`, `flow`; empty without samples."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for kind, part, what, seconds in connection.execute(_SPENT).fetchall():
        found.setdefault(kind, {"works": {}, "waits": {}})[part][what] = seconds
    load: dict[str, Sequence[Any]] = {kind: rest for kind, *rest in connection.execute(_LOAD).fetchall()}
    return {
        kind: Spent(**parts, cpu=load[kind][0], full=load[kind][1]) for kind, parts in found.items() if kind in load
    }


def bottleneck(spent: Mapping[str, Spent], eta: int) -> str:
    """A sentence that names what limits the run, and the setting to change; or that nothing stands out."""
    trainer, servers = spent.get("trainer", Spent()), spent.get("inference", Spent())
    waits = {what: trainer.waited(what) for what in trainer.waits}
    for what, advice in (
        ("store", "the store: a faster or nearer one (store.url), or fewer weights (trainer.weights_every)"),
        ("verdicts", "the verifiers: more of them (reward.workers)"),
        ("evaluation", "evaluations: fewer (evaluation.every)"),
    ):
        if waits.get(what, 0.0) >= STANDS_OUT:
            return f"Bottleneck: {advice}. The trainer waits for {what} {share(waits[what], 1)} of the time."
    if (lost := sum(waits.get(what, 0.0) for what in ("servers", "publish"))) >= STANDS_OUT:
        return f"Bottleneck: publication (inference.transport). The trainer waits for it {share(lost, 1)} of the time."
    if waits.get("groups", 0.0) >= STANDS_OUT:
        said = f"The trainer waits for groups {share(waits['groups'], 1)} of the time"
        return f"Bottleneck: generation: {_generation(spent, eta)}. {said}."
    if servers.waited("rule") >= STANDS_OUT and trainer.seconds and sum(waits.values()) < STANDS_OUT:
        said = f"The servers wait for it {share(servers.waited('rule'), 1)} of the time"
        return (
            f"Bottleneck: training: more ranks (trainer.ranks), or larger passes (trainer.micro_batch_tokens). {said}."
        )
    return "Bottleneck: none stands out."


def _generation(spent: Mapping[str, Spent], eta: int) -> str:
    """What would have groups finish earlier."""
    servers, workers, groups = (spent.get(kind, Spent()) for kind in ("inference", "rollout", "flow"))
    if (workers.cpu or 0.0) >= FULL_CORE:
        return "the rollout workers use their cores fully: more of them (rollout.workers)"
    if eta == 0 and servers.waited("rule") >= STANDS_OUT:
        return "it takes turns with training: let it run ahead (rollout.max_head_offpolicyness)"
    full = servers.full if servers.full is not None else groups.full
    if servers.waited("rule") >= STANDS_OUT or (eta and full is not None and full < FULL_QUEUE):
        return "the staleness rule lets too few groups begin: a larger rollout.max_head_offpolicyness, or rollout.pace"
    return "the servers are busy: more of them (inference.servers)"


def time_payload(spent: Mapping[str, Spent], eta: int) -> dict[str, Any] | None:
    """What the page shows; None for a run without samples."""
    if not any(one.seconds for one in spent.values()):
        return None
    rows = [[kind, _listed(one.works, one.seconds), _listed(one.waits, one.seconds)] for kind, one in spent.items()]
    table: Table = [["service", "worked on", "waited for"], *sorted(rows)]
    return {"says": bottleneck(spent, eta), "table": table}


def _listed(seconds: Mapping[str, float], whole: float) -> str:
    return ", ".join(f"{what} {share(part, whole)}" for what, part in seconds.items() if part >= 0.005 * whole) or "—"
