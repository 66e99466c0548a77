"""The cost of a run: tokens, seconds of the run and of each stage, GPU seconds. Reused stages are not counted."""

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
    """The cost of one run, or of several together. Tokens that are trained on twice count twice."""

    generated: int = 0
    evaluated: int = 0  # generated in evaluations
    trained: int = 0  # in the loss
    computed: int = 0  # processed by the trainer for these, prompts included
    iterations: int = 0
    stages: Mapping[str, float] = field(default_factory=dict)  # seconds, the longest first
    starts: Sequence[Start] = ()

    @property
    def seconds(self) -> float:
        """Wall time: of all starts together."""
        return sum(start.seconds for start in self.starts)

    @property
    def gpu_seconds(self) -> float:
        """Each start's GPUs times its wall time, used or not."""
        return sum(start.gpus * start.seconds for start in self.starts)

    def __add__(self, other: Cost) -> Cost:
        stages = Counter(self.stages) + Counter(other.stages)
        return Cost(
            self.generated + other.generated,
            self.evaluated + other.evaluated,
            self.trained + other.trained,
            self.computed + other.computed,
            self.iterations + other.iterations,
            dict(sorted(stages.items(), key=lambda stage: -stage[1])),
            (*self.starts, *other.starts),
        )

    def __str__(self) -> str:
        """One line: `190,000 tokens generated, 180,000 trained, 90 s (train 47 %, rollout 20 %), on the CPU`."""
        longest = ", ".join(f"{stage} {share(s, self.seconds)}" for stage, s in list(self.stages.items())[:2])
        devices = f"{self.gpu_seconds:,.0f} GPU seconds" if self.gpu_seconds else "on the CPU"
        tokens = f"{self.generated + self.evaluated:,} tokens generated, {self.trained:,} trained"
        return f"{tokens}, {self.seconds:,.0f} s ({longest}), {devices}"


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


def cost_payload(cost: Cost) -> dict[str, Table]:
    """The tables of the page."""
    return {"facts": cost_facts(cost), "stages": stage_rows(cost)}


def cost_facts(cost: Cost) -> Table:
    """Names and values."""
    generated = f"{cost.generated:,}" + (f", and {cost.evaluated:,} in evaluations" if cost.evaluated else "")
    return [
        ["tokens generated", generated],
        ["tokens trained", f"{cost.trained:,}, for which the trainer computed {cost.computed:,}, prompts included"],
        ["wall time", f"{cost.seconds:,.1f} s: {ends(cost.starts)}"],
        ["GPU seconds", devices(cost)],
    ]


def ends(starts: Sequence[Start]) -> str:
    """`2 starts of the flow, 1 until logged as failed, 1 until logged as finished`."""
    counts = Counter(_end(start.ended_by) for start in starts)
    known = ", ".join(f"{count} {end}" if len(counts) > 1 else end for end, count in counts.items())
    return f"{len(starts)} {'start' if len(starts) == 1 else 'starts'} of the flow, {known}"


def _end(ended_by: str) -> str:
    if ended_by == "last commit":
        return "until its last commit, as its end is not in the log"
    return f"until logged as {ended_by}" if ended_by else "that committed nothing and is not counted"


def devices(cost: Cost) -> str:
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
        [stage, f"{s:,.1f}", f"{s / max(cost.iterations, 1):.3f}", share(s, cost.seconds)]
        for stage, s in cost.stages.items()
    ]
    return [["stage", "seconds", "per iteration", "share of the wall time"], *rows]


def share(part: float, whole: float) -> str:
    """As a percentage."""
    return f"{100 * part / whole:.1f} %" if whole else "—"
