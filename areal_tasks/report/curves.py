"""The curves of a run: SQL queries, and the charts in which their columns are lines: short lists of numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import duckdb
import numpy as np
from numpy.typing import NDArray

from schemas.recipe.sections import REASONS

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
        band = {} if self.low is None or self.high is None else {"lo": rounded(self.low), "hi": rounded(self.high)}
        return {"name": self.name, "x": rounded(self.x), "y": rounded(self.y), **band}


def downsample(series: Series, points: int) -> Series:
    """At most `points` points: means of neighbours, with their least and greatest values as the band."""
    if len(series.x) <= points:
        return series
    parts = np.array_split(np.arange(len(series.x)), points)
    low, high = (series.y if bound is None else bound for bound in (series.low, series.high))
    return Series(
        series.name,
        np.array([series.x[part].mean() for part in parts]),
        np.array([_over_finite(np.mean, series.y[part]) for part in parts]),
        np.array([_over_finite(np.min, low[part]) for part in parts]),
        np.array([_over_finite(np.max, high[part]) for part in parts]),
    )


def _over_finite(reduce: Any, values: Numbers) -> float:
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


@dataclass(frozen=True)
class Chart:
    """A chart of the page; the x axis is always the iteration, or the version an iteration begins with."""

    id: str
    title: str
    about: str
    percent: bool = False
    scale: Literal["linear", "log", "either"] = "linear"  # of the y axis; "either" begins linear
    zero: bool = True  # the y axis begins at zero
    stacked: bool = False  # areas on top of each other, one chart per run


@dataclass(frozen=True)
class Line:
    """A column that is a line of a chart; `band` names the prefix of columns `<band>_low` and `<band>_high`."""

    chart: str
    column: str
    name: str = ""
    band: str = ""
    only_if_any: bool = False  # left out if all values are 0


@dataclass(frozen=True)
class Source:
    """A query, the tables it needs, and the lines in its result, which has a column `x`."""

    needs: frozenset[str]
    query: str
    lines: tuple[Line, ...]
    unless: str = ""  # a table whose presence disables this source


CHARTS: Final = (
    Chart("reward", "Reward", "Mean over the samples of an iteration that could be judged.", zero=False),
    Chart(
        "accuracy",
        "Accuracy",
        "Share of correct answers: held-out evaluations, and training samples.",
        True,
        zero=False,
    ),
    Chart(
        "length", "Length", "Generated tokens of a sample: mean; the band holds 80 % of the samples.", scale="either"
    ),
    Chart("truncated", "Truncated", "Share of samples that ended at the length limit.", True),
    Chart(
        "loss",
        "Loss",
        "Mean over an iteration's optimizer steps; the band is their least and greatest.",
        scale="either",
        zero=False,
    ),
    Chart("kl", "KL", "Against the reference, and against the policy that sampled, in nats per token.", scale="either"),
    Chart("entropy", "Entropy", "Of the policy over the vocabulary, in nats per token.", scale="either"),
    Chart("clip", "Clip fraction", "Share of tokens whose ratio the clip cut.", True),
    Chart(
        "grad_norm",
        "Gradient norm",
        "Before clipping; the band is the least and greatest step.",
        scale="log",
        zero=False,
    ),
    Chart("lr", "Learning rate", "Of the last optimizer step of an iteration.", scale="either"),
    Chart("signal", "Groups without signal", "Share of groups whose rewards are all equal.", True),
    Chart("unjudged", "Not judged", "Share of samples without a readable answer, or whose verifier failed.", True),
    Chart("rejected", "Rejected groups", "Groups that failed, or that filters rejected, since the iteration before."),
    Chart("dropped", "Dropped", "Share of samples that training left out.", True),
    Chart("lag", "Token lag", "Versions between the weights that sampled a token and those trained."),
    Chart(
        "weights",
        "Behaviour weights",
        "Effective sample size, and tokens whose weight is capped or masked, as shares of the tokens.",
        True,
    ),
    Chart("stale_kv", "Stale KV cache", "Share of tokens sampled over the KV cache of older weights.", True),
    Chart(
        "lags",
        "Samples by lag",
        "Versions between a sample's oldest token and the weights trained: shares, by generated tokens.",
        True,
        stacked=True,
    ),
    Chart(
        "gap",
        "Train–inference mismatch",
        "Trainer against server, on tokens of the trainer's own version or that a server has scored, in nats.",
        scale="log",
        zero=False,
    ),
    Chart("outside", "Ratio outside", "Share of tokens whose ratio trainer / server is not within [0.9, 1.1].", True),
    Chart("skipped", "Skipped steps", "Steps that were skipped because loss or gradient was not finite."),
    Chart("throughput", "Throughput", "Tokens per second of the whole iteration.", scale="either"),
    Chart("stages", "Time per stage", "Seconds of each stage; stages may run concurrently.", stacked=True),
)

_REJECTED: Final = ", ".join(f"coalesce(metrics['rejected_{reason}'], 0) AS {reason}" for reason in REASONS)

_STEPS: Final = """
SELECT {x} AS x, avg(made.loss) AS loss, min(made.loss) AS loss_low, max(made.loss) AS loss_high, avg(made.kl) AS kl,
       avg(made.approx_kl) AS approx_kl, avg(made.entropy) AS entropy, avg(made.clip_fraction) AS clip,
       avg(made.grad_norm) AS grad_norm, min(made.grad_norm) AS grad_norm_low, max(made.grad_norm) AS grad_norm_high,
       arg_max(lr, step) AS lr, avg(logprob_gap_mean) AS gap, max(logprob_gap_max) AS gap_max,
       avg(ratio_outside) AS outside, sum(skipped::int) AS skipped
FROM (SELECT *, CASE WHEN tokens > 0 AND NOT skipped THEN steps END AS made FROM {source} AS steps)
GROUP BY 1 ORDER BY 1"""

_STEP_LINES: Final = (
    Line("loss", "loss", band="loss"),
    Line("entropy", "entropy"),
    Line("grad_norm", "grad_norm", band="grad_norm"),
    Line("lr", "lr"),
    Line("skipped", "skipped", only_if_any=True),
)

_TOKENS: Final = """
SELECT commits.iteration AS x, {generated} / any_value(commits.seconds) AS generated,
       any_value(trained.tokens) / any_value(commits.seconds) AS trained
FROM commits {join}
LEFT JOIN (SELECT iteration, sum(total_tokens) AS tokens FROM train_steps GROUP BY 1) AS trained USING (iteration)
WHERE commits.seconds > 0 GROUP BY 1 ORDER BY 1"""

_TOKEN_LINES: Final = (
    Line("throughput", "generated", "generated", only_if_any=True),
    Line("throughput", "trained", "trained"),
)

SOURCES: Final = (
    Source(
        frozenset({"scalars"}),
        """
        SELECT iteration AS x, avg(reward) AS reward, avg((verdict = 'correct')::int) AS correct,
               avg(num_generated) AS length, quantile_cont(num_generated, 0.1) AS length_low,
               quantile_cont(num_generated, 0.9) AS length_high, avg(truncated::int) AS truncated,
               avg((verdict = 'unparseable')::int) AS unparseable,
               avg((verdict IN ('timeout', 'error'))::int) AS unverified, avg((NOT kept)::int) AS dropped
        FROM scalars GROUP BY 1 ORDER BY 1""",
        (
            Line("reward", "reward"),
            Line("accuracy", "correct", "training samples", only_if_any=True),
            Line("length", "length", "training samples", band="length"),
            Line("truncated", "truncated", "training samples"),
            Line("unjudged", "unparseable", "no readable answer", only_if_any=True),
            Line("unjudged", "unverified", "verifier failed", only_if_any=True),
            Line("dropped", "dropped", only_if_any=True),
        ),
    ),
    Source(
        frozenset({"scalars"}),
        """
        SELECT iteration AS x, avg((spread = 0)::int) AS signal FROM (
          SELECT iteration, max(reward) - min(reward) AS spread
          FROM scalars GROUP BY iteration, group_id HAVING count(*) > 1
        ) GROUP BY 1 ORDER BY 1""",
        (Line("signal", "signal"),),
    ),
    Source(
        frozenset({"evaluate"}),
        """
        SELECT weights_version AS x, avg((verdict = 'correct')::int) AS correct, avg(num_generated) AS length,
               avg(truncated::int) AS truncated
        FROM evaluate GROUP BY 1 ORDER BY 1""",
        (
            Line("accuracy", "correct", "evaluation"),
            Line("length", "length", "evaluation"),
            Line("truncated", "truncated", "evaluation"),
        ),
    ),
    Source(
        frozenset({"train_steps"}),
        _STEPS.format(x="iteration", source="train_steps"),
        (
            *_STEP_LINES,
            Line("kl", "kl", "reference", only_if_any=True),
            Line("kl", "approx_kl", "sampling policy"),
            Line("clip", "clip"),
            Line("gap", "gap", "mean"),
            Line("gap", "gap_max", "greatest"),
            Line("outside", "outside"),
        ),
        unless="batch",
    ),
    Source(
        frozenset({"stages", "rollout"}),
        f"SELECT iteration AS x, {_REJECTED} FROM stages WHERE stage = 'rollout' ORDER BY 1",
        tuple(Line("rejected", reason, reason.replace("_", " "), only_if_any=True) for reason in REASONS),
    ),
    Source(  # what `train` measures if tokens may be older than the policy
        frozenset({"stages", "train_steps"}),
        """
        SELECT iteration AS x, metrics['lag_mean'] AS lag, metrics['lag_max'] AS lag_max,
               metrics['stale_kv'] AS stale_kv, metrics['effective_sample_size'] AS effective,
               metrics['behaviour_clipped'] AS clipped
        FROM stages WHERE stage = 'train' ORDER BY 1""",
        (
            Line("lag", "lag", "mean"),
            Line("lag", "lag_max", "greatest"),
            Line("weights", "effective", "effective sample size"),
            Line("weights", "clipped", "capped or masked"),
            Line("stale_kv", "stale_kv", only_if_any=True),
        ),
        unless="batch",
    ),
    Source(  # the agreement with servers that have scored tokens, where samples are too old to measure it
        frozenset({"stages", "scored"}),
        """
        SELECT iteration AS x, metrics['logprob_gap_mean'] AS gap, metrics['logprob_gap_max'] AS gap_max,
               metrics['ratio_outside'] AS outside
        FROM stages WHERE stage = 'publish' AND metrics['compared'] IS NOT NULL ORDER BY 1""",
        (
            Line("gap", "gap", "scored tokens: mean"),
            Line("gap", "gap_max", "scored tokens: greatest"),
            Line("outside", "outside", "scored tokens"),
        ),
    ),
    Source(  # a supervised iteration is many steps long: each is a point between two iterations
        frozenset({"train_steps", "batch"}),
        _STEPS.format(
            x="iteration + (step - first) / count",
            source="(SELECT *, min(step) OVER w AS first, count(*) OVER w AS count FROM train_steps"
            " WINDOW w AS (PARTITION BY iteration))",
        ),
        _STEP_LINES,
    ),
    Source(
        frozenset({"train_steps", "scalars"}),
        _TOKENS.format(
            generated="any_value(sampled.tokens)",
            join="LEFT JOIN (SELECT iteration, sum(num_generated) AS tokens FROM scalars GROUP BY 1) AS sampled"
            " USING (iteration)",
        ),
        _TOKEN_LINES,
    ),
    Source(frozenset({"train_steps", "batch"}), _TOKENS.format(generated="0", join=""), _TOKEN_LINES),
)

#: Lags from this one on share an area: more areas would be indistinguishable.
MOST_LAG: Final = 10

#: Stacked charts: iteration, area and value, in the order of the iterations.
_STAGES: Final = "SELECT iteration, stage, sum(seconds) FROM stages GROUP BY ALL ORDER BY 1, 2"
_LAGS: Final = f"""
SELECT iteration, least(iteration - version_min, {MOST_LAG}) AS lag,
       sum(num_generated) / sum(sum(num_generated)) OVER (PARTITION BY iteration)
FROM scalars WHERE num_generated > 0 GROUP BY 1, 2 ORDER BY 1, 2"""


def tables_of(connection: duckdb.DuckDBPyConnection) -> set[str]:
    return {str(row[0]) for row in connection.execute("SHOW TABLES").fetchall()}


def curves(connection: duckdb.DuckDBPyConnection, points: int) -> dict[str, list[dict[str, Any]]]:
    """Chart id -> its lines, at most `points` points each; charts without data are left out."""
    tables = tables_of(connection)
    found: dict[str, list[dict[str, Any]]] = {}
    for source in SOURCES:
        if source.needs <= tables and source.unless not in tables:
            for chart, line in _lines(connection, source):
                found.setdefault(chart, []).append(downsample(line, points).payload())
    times = sorted(_areas(connection, _STAGES).values(), key=lambda area: float(area.y.sum()), reverse=True)
    stacks = {"lags": lags(connection) if "scalars" in tables else [], "stages": times}
    for chart, areas in stacks.items():
        if areas:
            found[chart] = [replace(downsample(area, points), low=None, high=None).payload() for area in areas]
    return found


def _lines(connection: duckdb.DuckDBPyConnection, source: Source) -> Iterator[tuple[str, Series]]:
    answer = connection.sql(source.query).to_arrow_table()
    columns = {name: np.array(answer[name].to_pylist(), np.float64) for name in answer.column_names}  # NaN for NULL
    for line in source.lines:
        y = columns[line.column]
        known = y[np.isfinite(y)]
        if len(known) and (known.any() or not line.only_if_any):
            band = [columns[f"{line.band}_{end}"] if line.band else None for end in ("low", "high")]
            yield line.chart, Series(line.name, columns["x"], y, *band)


def lags(connection: duckdb.DuckDBPyConnection) -> list[Series]:
    """The share of each lag in the generated tokens of each iteration; empty for a run without any lag."""
    shares = _areas(connection, _LAGS)
    if not shares.keys() - {"0"}:
        return []
    ordered = [shares[lag] for lag in sorted(shares, key=int)]
    return [replace(area, name=f"{area.name} or more") if area.name == str(MOST_LAG) else area for area in ordered]


def _areas(connection: duckdb.DuckDBPyConnection, query: str) -> dict[str, Series]:
    """The areas of a stacked chart by name, with a value for every iteration: 0 where the result has none."""
    rows = connection.execute(query).fetchall()
    iterations = sorted({row[0] for row in rows})
    place = {iteration: i for i, iteration in enumerate(iterations)}
    found: dict[str, Numbers] = {}
    for iteration, name, value in rows:
        found.setdefault(str(name), np.zeros(len(iterations)))[place[iteration]] = value
    return {name: Series(name, np.array(iterations, dtype=np.float64), y) for name, y in found.items()}
