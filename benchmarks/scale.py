"""Queries of a run of ten million samples on two cores, compared to a naive layout: their cost and what they read.

    python -m benchmarks.scale [--iterations 10000] [--samples 1000] [--folder F] [--real STORE RUN]

The run is made up (`scale_rows`) and written by the store's own code: of every iteration the tables `scalars`,
`train_steps`, `train_samples` and `publish` with all samples, six stage manifests and a commit. The first
`--token-iterations` have tokens and texts, too; in the others the tables `rollout`, `verify` and `advantage` are empty.
Files are not fsynced. The naive layout is one uncompressed Parquet file per iteration with the same scalars,
read by DuckDB itself by a glob. `--real` adds the bytes per token of a run of a real model.

Times are the best of three, each in a fresh session (catalog, compactions and views included); what a cold start of
the command adds is measured too. `CPU` is the seconds of all threads together. A machine that does other work meanwhile
makes the clock useless: `at rest` is half the CPU seconds, what two cores would take at best.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.catalog import valid_compactions
from areal_tasks.store.paths import run_record
from areal_tasks.store.query import Session, without_nan
from areal_tasks.store.retention.compact import compact_all
from areal_tasks.store.runs import Run, load_run
from benchmarks.scale_rows import flat_rows
from benchmarks.scale_run import bytes_below, write_naive, write_run
from benchmarks.store import machine
from schemas.views import VIEWS

NAME = "scale"
RESULTS = Path(__file__).parent / "results" / "scale-2cpu.txt"
CORES = 2

#: What was expected before the first run of this program on ten million samples.
PREDICTIONS = (
    ("the slowest scalar question", "< 1 s"),
    ("the dashboard's questions together", "< 5 s"),
    ("naive / compacted, sum of the questions", "> 5"),
    ("plain shards / compacted, one question", "> 50"),
    ("files that a scalar question opens, of ~100,000", "< 40"),
    ("rollout + verify + advantage, bytes per token", "≤ 6"),
    ("merging the whole run", "< 2 minutes"),
)

SCALAR: dict[str, str] = {
    "reward, length and truncation over time": "SELECT iteration // 500 AS k, avg(reward), avg(num_generated),"
    " avg(truncated::INTEGER) FROM samples GROUP BY 1 ORDER BY 1",
    "hardest prompts": "SELECT prompt_id, avg(reward) AS r, count(*) FROM samples GROUP BY 1"
    " ORDER BY r, prompt_id LIMIT 10",
    "reward by length": "SELECT num_generated // 64 AS b, avg(reward), count(*) FROM samples GROUP BY 1 ORDER BY 1",
    "tokens by server": "SELECT server, sum(num_generated), count(*) FROM samples GROUP BY 1 ORDER BY 1",
    "staleness": "SELECT iteration - version_min AS lag, count(*) FROM samples GROUP BY 1 ORDER BY 1",
    "verdicts": "SELECT verdict, count(*), avg(num_generated) FROM samples GROUP BY 1 ORDER BY 1",
    "extreme ratios": "SELECT iteration, sample_id, sample_ratio FROM samples WHERE minibatch >= 0"
    " ORDER BY abs(ln(sample_ratio)) DESC LIMIT 10",
    "dropped samples": "SELECT dropped_reason, count(*), avg(num_generated) FROM samples GROUP BY 1 ORDER BY 1",
    "the last ten iterations": "SELECT count(*), avg(reward) FROM samples"
    " WHERE iteration >= (SELECT max(iteration) FROM scalars) - 9",
    "zero-variance groups over time": "SELECT iteration // 500 AS k, count(*), count(*) FILTER (zero_variance)"
    " FROM groups GROUP BY 1 ORDER BY 1",
}
RUN_ONLY: dict[str, str] = {
    "optimizer over time": "SELECT iteration // 500 AS k, avg(loss), max(grad_norm), avg(entropy) FROM train_steps"
    " GROUP BY 1",
    "time and bytes by stage": "SELECT stage, count(*), sum(seconds), sum(bytes) FROM stages GROUP BY 1",
    "wall time of iterations": "SELECT iteration // 500 AS k, avg(seconds) FROM commits GROUP BY 1",
}


@dataclass(frozen=True)
class Cost:
    """Seconds of one query: by the clock, and CPU seconds of all threads."""

    wall: float
    cpu: float

    @property
    def at_rest(self) -> float:
        """Seconds on two idle cores at best; at most the measured ones."""
        return min(self.wall, self.cpu / CORES)


def best(work: Callable[[], object], repeats: int = 3) -> Cost:
    """The fastest run of `work`."""
    return min((_cost(work) for _ in range(repeats)), key=lambda cost: cost.wall)


def _cost(work: Callable[[], object]) -> Cost:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


def ask(store: Store, queries: Sequence[str], *, compacted: bool = True) -> list[pa.Table]:
    """The answer, in a fresh session."""
    with Session(store, NAME, compacted=compacted) as session:
        return [session.sql(query) for query in queries]


def naive(folder: Path) -> duckdb.DuckDBPyConnection:
    """The naive layout under the names that the questions use."""
    connection = duckdb.connect()
    without_nan(connection.read_parquet(f"{folder}/*.parquet")).create_view("scalars")
    connection.execute("CREATE VIEW samples AS FROM scalars")
    connection.execute(next(view for view in VIEWS if view.name == "groups").define({"scalars"}))
    return connection


def ask_naive(folder: Path, query: str) -> pa.Table:
    with naive(folder) as connection:
        answer: pa.Table = connection.sql(query).to_arrow_table()
        return answer


def same(left: pa.Table, right: pa.Table) -> bool:
    """Whether two answers agree, sums of floats up to rounding."""
    rows = zip(left.to_pylist(), right.to_pylist(), strict=True)
    return all(_close(a, b) for x, y in rows for a, b in zip(x.values(), y.values(), strict=True))


def _close(a: object, b: object) -> bool:
    return abs(a - b) <= 1e-6 * (1 + abs(b)) if isinstance(a, float) and isinstance(b, float) else a == b


def bytes_a_token(store: Store, run: str) -> tuple[float, float, int]:
    """Stored bytes of what a rollout says, by token (prompts included) and by generated token; and the tokens."""
    stages = "('rollout', 'verify', 'advantage', 'evaluate')"
    with Session(store, run) as session:
        views = session.runs[0].catalog.stages_of.keys()
        table = "rollout" if "rollout" in views else "evaluate"
        stored = session.sql(f"SELECT sum(bytes) AS b FROM stages WHERE rows > 0 AND stage IN {stages}").to_pylist()[0][
            "b"
        ]
        counts = session.sql(f"SELECT sum(num_tokens) AS n, sum(num_generated) AS g FROM {table}").to_pylist()[0]
    return float(stored / counts["n"]), float(stored / counts["g"]), int(counts["n"])


def naive_bytes_a_token(iterations: int, samples: int) -> float:
    """Of uncompressed files with everything, tokens and texts too."""
    stored = tokens = 0
    for k in range(iterations):
        rows, sink = flat_rows(k, samples, with_tokens=True), pa.BufferOutputStream()
        pq.write_table(rows, sink, compression="none")
        stored, tokens = stored + sink.getvalue().size, tokens + sum(rows["num_tokens"].to_pylist())
    return stored / tokens


def files_opened(run: Run) -> int:
    """The files that a query of `scalars` opens: run.json, a segment; per compaction its manifest, commit and files."""
    return 2 + sum(2 + len(found.tables["scalars"].files) for found in valid_compactions(run))


def cold(url: str, query: str) -> float:
    """Seconds of the command, its start included."""
    program = "from flows.cli.main import main; main()"
    command = [sys.executable, "-c", program, "sql", NAME, query, "--store", url, "--json"]
    return min(_cost(lambda: subprocess.run(command, check=True, capture_output=True)).wall for _ in range(3))


def questions(store: Store, folder: Path) -> tuple[list[str], dict[str, Cost], dict[str, Cost]]:
    """Measure each query, compacted and naive; the answers must agree."""
    lines, ours, theirs = [], dict[str, Cost](), dict[str, Cost]()
    for name, query in SCALAR.items():
        ours[name] = best(lambda q=query: ask(store, [q]))
        theirs[name] = best(lambda q=query: ask_naive(folder, q), 1)
        agree = "" if same(ask(store, [query])[0], ask_naive(folder, query)) else "  ANSWERS DIFFER"
        lines.append(_line(name, ours[name], theirs[name]) + agree)
    for name, query in RUN_ONLY.items():
        ours[name] = best(lambda q=query: ask(store, [q]))
        lines.append(_line(name, ours[name], None))
    return lines, ours, theirs


def _line(name: str, ours: Cost, theirs: Cost | None) -> str:
    text = f"  {name:<42} {ours.wall:7.2f} {ours.cpu:7.2f} {ours.at_rest:7.2f}"
    if theirs is None:
        return text
    return f"{text}   {theirs.wall:7.2f} {theirs.cpu:7.2f}   {theirs.cpu / ours.cpu:6.1f}×"


def small_compaction(url: str, samples: int) -> Cost:
    """Measure the compaction that the loop makes concurrently every 64 iterations."""
    if not open_store(url).exists(run_record("short")):
        write_run(url, "short", 64, samples, 0)
    run = load_run(open_store(url), "short")
    return _cost(lambda: compact_all(run))


def measure(folder: Path, options: argparse.Namespace) -> str:
    url = (folder / "store").as_uri()
    store, naive_folder = open_store(url), folder / "naive"
    sizes = (options.iterations, options.samples)
    if not (folder / "store").exists():
        write_run(url, NAME, *sizes, options.token_iterations, options.workers)
    if not naive_folder.exists():
        write_naive(naive_folder, *sizes, options.workers)
    run = load_run(store, NAME)
    one = SCALAR["reward by length"]
    plain, step = _cost(lambda: ask(store, [one], compacted=False)), small_compaction(url, options.samples)
    merging = _cost(lambda: compact_all(run))
    lines, ours, theirs = questions(store, naive_folder)
    dashboard = best(lambda: ask(store, [*SCALAR.values(), *RUN_ONLY.values()]))
    token, generated, tokens = bytes_a_token(store, NAME)
    naive_token = naive_bytes_a_token(min(2, options.token_iterations), options.samples)
    slowest = max((ours[name] for name in SCALAR), key=lambda cost: cost.at_rest)
    total, naive_total = (sum(costs[name].cpu for name in SCALAR) for costs in (ours, theirs))
    merged = bytes_below(folder / "store" / NAME / "compact")
    outcomes = (
        f"{slowest.at_rest:.2f} s at rest ({slowest.wall:.2f} s by the clock, {slowest.cpu:.2f} s CPU)",
        f"{dashboard.at_rest:.2f} s at rest ({dashboard.wall:.2f} s by the clock, {dashboard.cpu:.2f} s CPU)",
        f"{naive_total / total:.1f} (CPU)",
        f"{plain.cpu / ours['reward by length'].cpu:.0f} (CPU; {plain.wall:.0f} s by the clock)",
        f"{files_opened(run)}",
        f"{token:.2f} ({generated:.2f} per generated token)",
        f"{merging.cpu:.0f} s CPU, {merging.wall:.0f} s by the clock",
    )
    return "\n".join(
        [
            f"{machine()}; load {os.getloadavg()[0]:.1f} at the end; DuckDB {duckdb.__version__}",
            f"{options.iterations:,} iterations × {options.samples:,} samples; tokens and texts in the first"
            f" {options.token_iterations} ({tokens:,} tokens)",
            "",
            f"  {'':<42} {'compacted':>23}   {'naive':>15}",
            f"  {'question':<42} {'s':>7} {'CPU s':>7} {'at rest':>7}   {'s':>7} {'CPU s':>7}   {'ratio':>7}",
            *lines,
            "",
            f"  the command, cold ({'reward by length'!r}): {cold(url, one):.2f} s by the clock",
            f"  compacting 64 iterations during the loop: {step.wall:.2f} s by the clock, {step.cpu:.2f} s CPU",
            f"  merged files: {merged / 1e6:.0f} MB, {merged / (sizes[0] * sizes[1]):.0f} bytes a sample;"
            f" naive: {bytes_below(naive_folder) / 1e6:.0f} MB",
            f"  uncompressed, with tokens and texts: {naive_token:.1f} bytes per token, {naive_token / token:.1f}×",
            *real(options.real),
            "",
            f"  {'prediction':<50} {'expected':<14} outcome",
            *(f"  {what:<50} {said:<14} {found}" for (what, said), found in zip(PREDICTIONS, outcomes, strict=True)),
            "",
        ]
    )


def real(given: Sequence[str] | None) -> list[str]:
    """The bytes per token of a run of a real model."""
    if not given:
        return []
    token, generated, tokens = bytes_a_token(open_store(given[0]), given[1])
    return [f"  a real run ({tokens:,} tokens): {token:.2f} bytes per token, {generated:.2f} per generated token"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=1_000, help="an iteration")
    parser.add_argument("--token-iterations", type=int, default=10)
    parser.add_argument("--workers", type=int, default=CORES)
    parser.add_argument(
        "--folder", type=Path, help="keep the data here, and use what is there; default: a temporary one"
    )
    parser.add_argument("--real", nargs=2, metavar=("STORE", "RUN"), help="also measure this run's bytes per token")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="scale-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        text = measure(folder.resolve(), options)
    print(text)
    if options.save:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
