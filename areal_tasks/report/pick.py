"""Selects the samples of a report: best, worst, latest, not verified, longest, and random ones of all iterations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

import duckdb

from schemas.views import judged


@dataclass(frozen=True)
class Key:
    """Identifies a sample of a run. `version`: of the evaluated weights; -1 for samples that are trained on."""

    table: str
    iteration: int
    version: int
    sample_id: str


Picked = dict[Key, list[str]]  # sample -> why it was chosen

#: Query per table for the columns that the choices below use. A run has trained samples, evaluations, or both.
_CANDIDATES: Final = {
    "scalars": f"SELECT iteration, -1 AS version, sample_id, group_id, sample_index, verdict,"
    f" num_generated AS length, {judged('scalars')} FROM scalars",
    "evaluate": "SELECT iteration, weights_version AS version, sample_id, group_id, sample_index, verdict,"
    f" num_generated AS length, {judged('evaluate')} FROM evaluate",
    "batch": "SELECT iteration, -1 AS version, sample_id, prompt_id AS group_id, 0 AS sample_index, '' AS verdict,"
    " num_tokens AS length, NULL::float AS reward FROM batch",
}

_GROUP: Final = "PARTITION BY iteration, version, group_id"
_SURPRISE: Final = f"(SELECT *, reward - avg(reward) OVER ({_GROUP}) AS surprise FROM c)"
_SHUFFLED: Final = "md5(sample_id || iteration::text || version::text)"

#: Choice -> its share, and the ordered query of its samples. Among equal rewards the best are those whose group has a
#: low mean, and the worst those of a high one; `random` takes one of each iteration before a second of any.
_CHOICES: Final = {
    "best": (
        0.2,
        f"{_SURPRISE} WHERE reward IS NOT NULL ORDER BY reward DESC, surprise DESC, {_SHUFFLED}",
    ),
    "worst": (
        0.2,
        f"{_SURPRISE} WHERE reward IS NOT NULL ORDER BY reward, surprise, {_SHUFFLED}",
    ),
    "latest": (0.15, "c ORDER BY iteration DESC, version DESC, group_id, sample_index"),
    "unjudged": (
        0.1,
        f"(SELECT *, row_number() OVER (PARTITION BY verdict ORDER BY iteration DESC, {_SHUFFLED}) AS rank FROM c"
        " WHERE verdict IN ('unparseable', 'timeout', 'error')) ORDER BY rank, verdict",
    ),
    "longest": (0.05, f"c ORDER BY length DESC, {_SHUFFLED}"),
    "random": (
        1.0,
        f"(SELECT *, row_number() OVER (PARTITION BY iteration, version ORDER BY {_SHUFFLED}) AS rank FROM c)"
        " ORDER BY rank, md5(iteration::text), version",
    ),
}

EVALUATION_SHARE: Final = 0.2  # of the samples, where a run trains and evaluates


def pick(connection: duckdb.DuckDBPyConnection, count: int) -> Picked:
    """At most `count` samples of a run, ordered so that any first part of it is a balanced choice, too."""
    tables = {str(row[0]) for row in connection.execute("SHOW TABLES").fetchall()} & _CANDIDATES.keys()
    picked = [_pick_from(connection, table, number) for table, number in quotas(tables, count).items()]
    return dict(item for items in zip_longest(*(p.items() for p in picked)) for item in items if item is not None)


def quotas(tables: Set[str], count: int) -> dict[str, int]:
    """How many samples to take from each table."""
    if tables >= {"scalars", "evaluate"}:
        evaluations = round(count * EVALUATION_SHARE)
        return {"scalars": count - evaluations, "evaluate": evaluations}
    return dict.fromkeys(sorted(tables), count)


def available(connection: duckdb.DuckDBPyConnection) -> int:
    """How many samples the run has."""
    tables = {str(row[0]) for row in connection.execute("SHOW TABLES").fetchall()} & _CANDIDATES.keys()
    counts = [connection.execute(f"SELECT count(*) FROM {table}").fetchall()[0][0] for table in sorted(tables)]
    return sum(counts)


def _pick_from(connection: duckdb.DuckDBPyConnection, table: str, count: int) -> Picked:
    chosen: dict[str, list[Key]] = {}
    left = count
    for choice, (share, source) in _CHOICES.items():
        limit = min(left, round(count * share)) if choice != "random" else count
        chosen[choice] = _keys(connection, table, source, limit)
        left -= len(chosen[choice])
    return _merged(chosen, count)


def _keys(connection: duckdb.DuckDBPyConnection, table: str, source: str, limit: int) -> list[Key]:
    query = f"WITH c AS ({_CANDIDATES[table]}) SELECT iteration, version, sample_id FROM {source} LIMIT {limit}"
    return [Key(table, *row) for row in connection.execute(query).fetchall()]


def _merged(chosen: dict[str, list[Key]], count: int) -> Picked:
    """One of each choice in turn, until there are `count`; a sample chosen twice has two reasons."""
    found: Picked = {}
    for choice, key in _in_turn(chosen):
        if key in found and choice != "random":
            found[key].append(choice)
        elif key not in found and len(found) < count:
            found[key] = [choice]
    return found


def _in_turn(chosen: dict[str, list[Key]]) -> Iterator[tuple[str, Key]]:
    columns: Sequence[list[tuple[str, Key]]] = [[(choice, key) for key in keys] for choice, keys in chosen.items()]
    for row in zip_longest(*columns):
        yield from (entry for entry in row if entry is not None)
