"""Facts about a run besides its tables: its creators, parent, times, code versions and recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import duckdb

from areal_tasks.report.cost import Table
from areal_tasks.store.fork import origin_of
from areal_tasks.store.history.diff import leaves
from areal_tasks.store.history.journal import read_log
from areal_tasks.store.record_tables import read_owners
from areal_tasks.store.runs import Run
from schemas.manifest import IterationCommit
from schemas.recipe.recorded import read_recorded

MOST: Final = 200  # starts and log records that are shown, the newest ones
UNSET: Final = "—"
SPLITS: Final = {"prompts": "that are trained on", "eval_prompts": "held out"}


def code_and_hosts(connection: duckdb.DuckDBPyConnection) -> dict[str, list[str]]:
    """The code versions and hosts that made a run's commits, in order of first use.

    Queries the view `commits`, which does not read every commit of a long run.
    """
    query = "SELECT {0} FROM commits GROUP BY 1 ORDER BY min(iteration)"
    found = {column: connection.execute(query.format(column)).fetchall() for column in ("code_version", "host")}
    return {column: [str(row[0]) for row in rows] for column, rows in found.items()}


def dropped_prompts(connection: duckdb.DuckDBPyConnection) -> Table:
    """One fact: how many prompts of each split were left out as too long; empty if the run has not counted them."""
    query = "SELECT metrics FROM stages WHERE stage = 'prompts' ORDER BY iteration DESC LIMIT 1"
    found = connection.execute(query).fetchone()
    metrics: dict[str, float] = found[0] if found else {}
    counts = [
        f"{metrics[f'{table}_dropped']:.0f} of {metrics[f'{table}_dropped'] + metrics[f'{table}_rows']:.0f} {of}"
        for table, of in SPLITS.items()
        if f"{table}_dropped" in metrics
    ]
    return [["prompts left out as too long", ", ".join(counts)]] if counts else []


def run_facts(run: Run, head: IterationCommit | None, makers: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """All facts of the page about a run; `head` is its last commit, `makers` see `code_and_hosts`."""
    segments = [["from iteration", "iterations", "written"]]
    for segment in run.segments:
        iterations = segment.recipe.get("schedule", {}).get("iterations", 1)
        segments.append([str(segment.from_iteration), str(iterations), utc_text(segment.provenance.committed)])
    recipe = leaves(read_recorded(run.segments[-1].recipe)) if run.segments else ()  # that in force at the end
    return {
        "name": run.name,
        "flow": run.record.flow,
        "label": label(run),
        "state": progress_text(run, head),
        "facts": _facts(run, head, makers),
        "starts": starts(run),
        "segments": segments,
        "log": log_rows(run),
        "recipe": {path: value if isinstance(value, str) else json.dumps(value) for path, value in recipe},
    }


def label(run: Run) -> str:
    """`a replay of 'a' from verify, with its rollouts (counterfactual)`; empty for a run that has no parent."""
    origin = origin_of(run.record)
    if origin is None:
        return ""
    return f"{origin} (counterfactual)" if origin.counterfactual else str(origin)


def progress_text(run: Run, head: IterationCommit | None) -> str:
    """The run's progress in iterations."""
    if head is None:
        return "Nothing is committed yet: there are no curves and no samples to show."
    done = head.iteration + 1
    if run.planned and done < run.planned:
        return f"Unfinished: {done} of {run.planned} iterations are committed."
    return f"Finished: {done} {'iteration' if done == 1 else 'iterations'}."


def _facts(run: Run, head: IterationCommit | None, makers: Mapping[str, Sequence[str]]) -> Table:
    made = run.record.provenance
    rows = [
        ["store", run.store.url],
        ["flow", run.record.flow],
        ["seed", str(run.record.seed)],
        ["created", f"{utc_text(made.committed)} on {made.host}"],
        ["code", ", ".join(dict.fromkeys([made.code_version, *makers.get("code_version", ())]))],
    ]
    if head is not None:
        rows += [
            ["hosts", ", ".join(makers["host"])],
            ["last commit", f"iteration {head.iteration}, {utc_text(head.provenance.committed)}"],
            ["weights", f"version {head.weights.version}" + ("" if head.weights.written else ", not written")],
            ["newest checkpoint", f"version {head.checkpoint.version}" if head.checkpoint else "none"],
            ["SHA-256 of the head", run.digest_before(head.iteration + 1)],
        ]
    return rows


def starts(run: Run) -> Table:
    """Every start of the flow on this run, the newest first."""
    owners = read_owners(run)[: -MOST - 1 : -1]
    rows = [[str(o.n), utc_text(o.started), o.host, str(o.pid), o.prefect_flow_run_id or UNSET] for o in owners]
    return [["start", "when", "host", "process", "Prefect flow run"], *rows]


def log_rows(run: Run) -> Table:
    """The lines of the run's log, the newest first."""
    rows = [["when", "what", "who", "details"]]
    for line in read_log(run.store, run.name)[: -MOST - 1 : -1]:
        details = ", ".join(f"{name} {value}" for name, value in line.details.items())
        rows.append([utc_text(line.time), line.action, f"{line.user} on {line.host}", details])
    return rows


def utc_text(time: str) -> str:
    """A recorded time to the second, UTC."""
    return f"{datetime.fromisoformat(time).astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def differences(runs: Sequence[Mapping[str, Any]]) -> Table:
    """The recipe fields in which the runs differ, one column per run; empty for fewer than two."""
    if len(runs) < 2:
        return []
    recipes = [run["recipe"] for run in runs]
    fields = dict.fromkeys(field for recipe in recipes for field in recipe)
    rows = [[field, *(recipe.get(field, UNSET) for recipe in recipes)] for field in fields]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    names = ["field", *(run["name"] for run in runs)]
    return [names, *sorted(differing, key=lambda row: UNSET in row)]  # fields that all runs have come first
