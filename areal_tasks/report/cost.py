"""What a run cost, and where its time went: tokens, seconds, GPU seconds, and what its services waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import duckdb

Table = list[list[str]]  # the first row names the columns

_SUMS: Final = {
    "generated": "sum(metrics['tokens']) FILTER (stage = 'rollout')",
    "evaluated": "sum(metrics['tokens']) FILTER (stage = 'evaluate')",
    "trained": "sum(metrics['tokens']) FILTER (stage = 'train')",
    "computed": "sum(metrics['total_tokens']) FILTER (stage = 'train')",
}
_STAGES: Final = "SELECT stage, sum(seconds) FROM stages WHERE run = $run GROUP BY 1 ORDER BY 2 DESC, 1"
_STARTS: Final = "SELECT coalesce(seconds, 0), coalesce(ended_by, ''), gpus, gpus_by FROM starts ORDER BY owner"


@dataclass(frozen=True)
class Start:
    """Seconds of a start of the flow, what ended it, the GPUs of its services, and the source of that number."""

    seconds: float
    ended_by: str
    gpus: int
    gpus_by: str


@dataclass(frozen=True)
class Cost:
    """The cost of a run. Tokens that are trained on twice count twice."""

    generated: int
    evaluated: int  # generated in evaluations
    trained: int  # in the loss
    computed: int  # processed by the trainer for these, prompts included
    iterations: int
    stages: Mapping[str, float]  # seconds, the longest first
    starts: Sequence[Start]

    @property
    def seconds(self) -> float:
        """Wall time: of all starts together."""
        return sum(start.seconds for start in self.starts)

    @property
    def gpu_seconds(self) -> float:
        """Each start's GPUs times its wall time, used or not."""
        return sum(start.gpus * start.seconds for start in self.starts)


def cost_of(connection: duckdb.DuckDBPyConnection, run: str) -> Cost:
    """The cost of the run that the connection's views show."""

    def ask(query: str, **values: str) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = connection.execute(query, values).fetchall()
        return rows

    [sums] = ask(f"SELECT {', '.join(_SUMS.values())} FROM stages WHERE run = $run", run=run)
    [(iterations,)] = ask("SELECT count(*) FROM commits WHERE run = $run", run=run)
    return Cost(
        **{name: int(value or 0) for name, value in zip(_SUMS, sums, strict=True)},
        iterations=iterations,
        stages=dict(ask(_STAGES, run=run)),
        starts=[Start(*row) for row in ask(_STARTS)],
    )


def cost_facts(cost: Cost) -> Table:
    """Names and values."""
    generated = f"{cost.generated:,}" + (f", and {cost.evaluated:,} in evaluations" if cost.evaluated else "")
    return [
        ["tokens generated", generated],
        ["tokens trained", f"{cost.trained:,}, for which the trainer computed {cost.computed:,}, prompts included"],
        ["wall time", f"{cost.seconds:,.1f} s: {starts_text(cost.starts)}"],
        ["GPU seconds", gpu_seconds_text(cost)],
    ]


def starts_text(starts: Sequence[Start]) -> str:
    """`2 starts of the flow, 1 until logged as failed, 1 until logged as finished`."""
    counts = Counter(_end_text(start.ended_by) for start in starts)
    known = ", ".join(f"{count} {end}" if len(counts) > 1 else end for end, count in counts.items())
    return f"{len(starts)} {'start' if len(starts) == 1 else 'starts'} of the flow, {known}"


def _end_text(ended_by: str) -> str:
    if ended_by == "last commit":
        return "until its last commit, as its end is not in the log"
    return f"until logged as {ended_by}" if ended_by else "that committed nothing and is not counted"


def gpu_seconds_text(cost: Cost) -> str:
    """The GPU seconds, and the source of the number of GPUs."""
    if not any(start.gpus for start in cost.starts):
        return "0, on the CPU, according to the log and the recipe"
    most = max(start.gpus for start in cost.starts)
    guessed = any(start.gpus and start.gpus_by == "recipe" for start in cost.starts)
    source = "according to the recipe, as the log has no number" if guessed else "according to the log"
    return f"{cost.gpu_seconds:,.1f}: {most} {'GPU' if most == 1 else 'GPUs'} for the wall time, {source}"


def stage_rows(cost: Cost) -> Table:
    """Seconds of each stage: total, per iteration, and as a share of the wall time."""
    rows = [
        [stage, f"{s:,.1f}", f"{s / max(cost.iterations, 1):.3f}", percent(s, cost.seconds)]
        for stage, s in cost.stages.items()
    ]
    return [["stage", "seconds", "per iteration", "share of the wall time"], *rows]


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "—"


#: A wait of a smaller share of the time does not stand out.
STANDS_OUT: Final = 0.25
#: A process of Python code that uses so many cores, or a queue that is so full, limits what waits for it.
FULL_CORE, FULL_QUEUE = 0.9, 0.5

_SPENT: Final = """
SELECT regexp_replace(service, '-[0-9.]+$', '') AS kind, part, entry.key AS what, sum(seconds * entry.value) AS seconds
FROM (SELECT service, seconds, 'works' AS part, unnest(map_entries(works)) AS entry FROM system
      UNION ALL SELECT service, seconds, 'waits', unnest(map_entries(waits)) FROM system)
WHERE entry.key <> 'start' GROUP BY ALL ORDER BY seconds DESC, what"""
_LOAD: Final = """
SELECT regexp_replace(service, '-[0-9.]+$', '') AS kind, avg(cpu) AS cpu, avg(running / at_once) AS full FROM system
WHERE coalesce(waits['start'], 0) < 1 GROUP BY 1"""


@dataclass(frozen=True)
class TimeSpent:
    """How the services of one kind spent their time: seconds by what they worked on, and by what they waited for.

    `cpu` is the mean number of cores used, `full` the mean share of the queue that was in use. The time before the
    services had started does not count.
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


def time_spent(connection: duckdb.DuckDBPyConnection) -> dict[str, TimeSpent]:
    """By kind of service, of the view `system`: `trainer`, `inference`, `rollout`, `flow`; empty without samples."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for kind, part, what, seconds in connection.execute(_SPENT).fetchall():
        found.setdefault(kind, {"works": {}, "waits": {}})[part][what] = seconds
    load: dict[str, Sequence[Any]] = {kind: rest for kind, *rest in connection.execute(_LOAD).fetchall()}
    return {
        kind: TimeSpent(**parts, cpu=load[kind][0], full=load[kind][1]) for kind, parts in found.items() if kind in load
    }


def bottleneck(spent: Mapping[str, TimeSpent], eta: int) -> str:
    """A sentence that names what limits the run, and the setting to change; or that nothing stands out."""
    trainer, servers = spent.get("trainer", TimeSpent()), spent.get("inference", TimeSpent())
    waits = {what: trainer.waited(what) for what in trainer.waits}
    for what, advice in (
        ("store", "the store: a faster or nearer one (store.url), or fewer weights (trainer.weights_every)"),
        ("verdicts", "the verifiers: more of them (reward.workers)"),
        ("evaluation", "evaluations: fewer (evaluation.every)"),
    ):
        if waits.get(what, 0.0) >= STANDS_OUT:
            return f"Bottleneck: {advice}. The trainer waits for {what} {percent(waits[what], 1)} of the time."
    if (lost := sum(waits.get(what, 0.0) for what in ("servers", "publish"))) >= STANDS_OUT:
        return (
            f"Bottleneck: publication (inference.transport). The trainer waits for it {percent(lost, 1)} of the time."
        )
    if waits.get("groups", 0.0) >= STANDS_OUT:
        said = f"The trainer waits for groups {percent(waits['groups'], 1)} of the time"
        return f"Bottleneck: generation: {_generation(spent, eta)}. {said}."
    idle = servers.waited("rule")
    if (idle >= STANDS_OUT or not servers.seconds) and trainer.seconds and sum(waits.values()) < STANDS_OUT:
        serving = f"The servers wait for it {percent(idle, 1)} of the time"
        said = serving if servers.seconds else "Nothing else takes long"
        return (
            f"Bottleneck: training: more ranks (trainer.ranks), or larger passes (trainer.micro_batch_tokens). {said}."
        )
    return "Bottleneck: none stands out."


def _generation(spent: Mapping[str, TimeSpent], eta: int) -> str:
    """What limits generation, and the setting to change."""
    servers, workers, groups = (spent.get(kind, TimeSpent()) for kind in ("inference", "rollout", "flow"))
    if (workers.cpu or 0.0) >= FULL_CORE:
        return "the rollout workers use their cores fully: more of them (rollout.workers)"
    if eta == 0 and servers.waited("rule") >= STANDS_OUT:
        return "it takes turns with training: let it run ahead (rollout.max_head_offpolicyness)"
    full = servers.full if servers.full is not None else groups.full
    if servers.waited("rule") >= STANDS_OUT or (eta and full is not None and full < FULL_QUEUE):
        return "the staleness rule lets too few groups begin: a larger rollout.max_head_offpolicyness, or rollout.pace"
    return "the servers are busy: more of them (inference.servers)"


def time_payload(spent: Mapping[str, TimeSpent], eta: int) -> dict[str, Any] | None:
    """What the page shows; None for a run without samples."""
    if not any(one.seconds for one in spent.values()):
        return None
    rows = [[kind, _listed(one.works, one.seconds), _listed(one.waits, one.seconds)] for kind, one in spent.items()]
    table: Table = [["service", "worked on", "waited for"], *sorted(rows)]
    return {"says": bottleneck(spent, eta), "table": table}


def _listed(seconds: Mapping[str, float], whole: float) -> str:
    return ", ".join(f"{what} {percent(part, whole)}" for what, part in seconds.items() if part >= 0.005 * whole) or "—"
