"""The samples of a report: which ones, and what the page gets of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, Final

import duckdb
import numpy as np

from areal_tasks.report.curves import number, tables_of
from areal_tasks.store.query import Session
from schemas.errors import UserError


@dataclass(frozen=True)
class Key:
    """Identifies a sample of a run. `version`: of the evaluated weights; -1 for samples that are trained on."""

    table: str
    iteration: int
    version: int
    sample_id: str


ChosenSamples = dict[Key, list[str]]  # sample -> why it was chosen

#: Query per table for the columns that the choices below use. A run has trained samples, evaluations, or both.
_CANDIDATES: Final = {
    "scalars": "SELECT iteration, -1 AS version, sample_id, group_id, sample_index, verdict,"
    " num_generated AS length, reward FROM scalars",
    "evaluate": "SELECT iteration, weights_version AS version, sample_id, group_id, sample_index, verdict,"
    " num_generated AS length, reward FROM evaluate",
    "batch": "SELECT iteration, -1 AS version, sample_id, prompt_id AS group_id, 0 AS sample_index, '' AS verdict,"
    " num_tokens AS length, NULL::float AS reward FROM batch",
}

_GROUP: Final = "PARTITION BY iteration, version, group_id"
_SURPRISE: Final = f"(SELECT *, reward - avg(reward) OVER ({_GROUP}) AS surprise FROM c)"
_SHUFFLED: Final = "md5(sample_id || iteration::text || version::text)"

#: Choice -> its share, and the ordered query of its samples. Among equal rewards the best are those whose group has a
#: low mean, and the worst those of a high one; `random` takes one of each iteration before a second of any.
_CHOICES: Final = {
    "best": (0.2, f"{_SURPRISE} WHERE reward IS NOT NULL ORDER BY reward DESC, surprise DESC, {_SHUFFLED}"),
    "worst": (0.2, f"{_SURPRISE} WHERE reward IS NOT NULL ORDER BY reward, surprise, {_SHUFFLED}"),
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


def choose_samples(connection: duckdb.DuckDBPyConnection, count: int) -> ChosenSamples:
    """At most `count` samples of a run, ordered so that any first part of them is a balanced choice too."""
    tables = tables_of(connection) & _CANDIDATES.keys()
    picked = [_choose_from(connection, table, number) for table, number in quotas(tables, count).items()]
    return dict(item for items in zip_longest(*(p.items() for p in picked)) for item in items if item is not None)


def quotas(tables: Set[str], count: int) -> dict[str, int]:
    if tables >= {"scalars", "evaluate"}:
        evaluations = round(count * EVALUATION_SHARE)
        return {"scalars": count - evaluations, "evaluate": evaluations}
    return dict.fromkeys(sorted(tables), count)


def count_samples(connection: duckdb.DuckDBPyConnection) -> int:
    tables = tables_of(connection) & _CANDIDATES.keys()
    counts = [connection.execute(f"SELECT count(*) FROM {table}").fetchall()[0][0] for table in sorted(tables)]
    return sum(counts)


def _choose_from(connection: duckdb.DuckDBPyConnection, table: str, count: int) -> ChosenSamples:
    """One of each choice in turn, until there are `count`; a sample chosen twice has two reasons."""
    select = f"WITH c AS ({_CANDIDATES[table]}) SELECT iteration, version, sample_id FROM"
    queries = [f"{select} {source} LIMIT {round(count * share)}" for share, source in _CHOICES.values()]
    chosen = [[Key(table, *row) for row in connection.execute(query).fetchall()] for query in queries]
    found: ChosenSamples = {}
    for turn in zip_longest(*chosen):
        for choice, key in zip(_CHOICES, turn, strict=True):
            if key in found and choice != "random":
                found[key].append(choice)
            elif key is not None and key not in found and len(found) < count:
                found[key] = [choice]
    return found


Row = dict[str, Any]

MAX_TOKENS: Final = 4096  # of longer samples: the first three quarters of these, and the last quarter
MAX_TEXT: Final = 20_000  # characters of a text, likewise
DECIMALS: Final = 4

#: By the table of the samples, the columns that are joined to it, if the run has them.
_JOINED: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "scalars": {
        "rollout": ("prompt", "completion", "answer", "input_ids", "loss_mask", "logprobs", "versions"),
        "verify": ("parsed", "detail"),
        "advantage": ("advantages",),
        "reference": ("ref_logprobs",),
        "proximal": ("prox_logprobs",),
    },
    "evaluate": {},
    "batch": {"train_samples": ("sample_loss",)},
}

_PER_TOKEN: Final = {
    "logprobs": "lp",
    "advantages": "adv",
    "versions": "ver",
    "ref_logprobs": "ref",
    "prox_logprobs": "prox",
}

_TEXTS: Final = ("prompt", "completion", "answer", "parsed", "detail")
_PLAIN: Final = ("verdict", "stop_reason", "server", "dropped_reason", "group_id", "sample_index", "prompt_id", "epoch")
_NUMBERS: Final = (
    *("reward", "shaped_reward", "num_generated", "num_tokens", "turns", "version_min", "version_max", "seconds"),
    *("sample_ratio", "sample_clip_fraction", "sample_kl", "sample_loss", "sample_logprob_gap"),
)


def read_samples(session: Session, picked: ChosenSamples) -> tuple[list[tuple[Key, Row]], list[str]]:
    """The rows of `picked`, in its order, and messages about iterations that could not be read."""
    rows, problems = dict[Key, Row](), list[str]()
    for table in dict.fromkeys(key.table for key in picked):
        rows |= _read(session, [key for key in picked if key.table == table], problems)
    return [(key, rows[key]) for key in picked if key in rows], problems


def _read(session: Session, keys: Sequence[Key], problems: list[str]) -> dict[Key, Row]:
    """The rows of samples of one table; a damaged shard costs those of its iteration, and adds a problem."""
    iterations = sorted({key.iteration for key in keys})
    try:
        return session.ask(partial(_rows, keys=keys))
    except UserError as error:
        if len(iterations) == 1:
            problems.append(str(error))
            return {}
    parts = [_read(session, [key for key in keys if key.iteration == k], problems) for k in iterations]
    return dict(item for part in parts for item in part.items())


def _rows(connection: duckdb.DuckDBPyConnection, keys: Sequence[Key]) -> dict[Key, Row]:
    """As `_read`; of an evaluation, with every version of the weights."""
    table, iterations = keys[0].table, ", ".join(str(k) for k in sorted({key.iteration for key in keys}))
    joined = {other: names for other, names in _JOINED[table].items() if other in tables_of(connection)}
    picked = f"WHERE iteration IN ({iterations}) AND sample_id IN (SELECT unnest($ids))"
    columns = [f"{table}.*", *(f"{other}.{name}" for other, names in joined.items() for name in names)]
    query = f"SELECT {', '.join(columns)} FROM (SELECT * FROM {table} {picked}) AS {table}"
    for other in joined:  # the condition again: else all iterations would be read
        query += f" LEFT JOIN (SELECT * FROM {other} {picked}) AS {other} USING (iteration, sample_id)"
    found = connection.sql(query, params={"ids": sorted({key.sample_id for key in keys})}).to_arrow_table()
    return {
        Key(table, row["iteration"], row.get("weights_version", -1), row["sample_id"]): row for row in found.to_pylist()
    }


# ── encoding ────────────────────────────────────────────────────────────────────────────────────────────────────────


def encode_sample(key: Key, row: Mapping[str, Any], why: Sequence[str]) -> dict[str, Any]:
    """A sample as the page reads it: texts, numbers, and the values of each generated token."""
    texts = {name: cut_text(row[name]) for name in _TEXTS if row.get(name)}
    plain = {name: row[name] for name in _PLAIN if row.get(name) not in (None, "")}
    numbers = {name: number(row[name]) for name in _NUMBERS if row.get(name) is not None}
    unknown = {"reward": None} if row.get("verdict") else {}  # unlike a demonstration, which can have none
    marks = {"truncated": row.get("truncated"), "dropped": row.get("kept") is False}
    flags = {name: True for name, is_set in marks.items() if is_set}
    version = {"evaluated": key.version} if key.table == "evaluate" else {}
    about = {"table": key.table, "id": key.sample_id, "it": key.iteration, "why": list(why)}
    return {**about, **version, **texts, **plain, **unknown, **numbers, **flags, "tokens": encode_tokens(row)}


def encode_tokens(row: Mapping[str, Any]) -> dict[str, Any]:
    """Ids of all tokens, [start, length] of each generated stretch, and columns over the generated tokens alone."""
    ids, mask = row["input_ids"], row["loss_mask"]
    kept = [*range(len(ids))]
    if len(ids) > MAX_TOKENS:
        kept = [*range(MAX_TOKENS * 3 // 4), *range(len(ids) - MAX_TOKENS // 4, len(ids))]
    mask = [mask[i] for i in kept]
    generated = [i for i, own in zip(kept, mask, strict=True) if own]
    there = {short: row[name] for name, short in _PER_TOKEN.items() if row.get(name) is not None}
    columns = {short: encode_column([values[i] for i in generated]) for short, values in there.items()}
    left_out = {"cut": [MAX_TOKENS * 3 // 4, len(ids) - MAX_TOKENS]} if len(ids) > MAX_TOKENS else {}
    return {"ids": [ids[i] for i in kept], "own": runs_of_true(mask), **columns, **left_out}


def runs_of_true(mask: Sequence[bool]) -> list[list[int]]:
    """[start, length] of each run of True."""
    edges = np.flatnonzero(np.diff([0, *mask, 0]))
    return [[start, stop - start] for start, stop in edges.reshape(-1, 2).tolist()]


def encode_column(values: Sequence[float]) -> list[float | None]:
    """Values rounded to `DECIMALS`; a single one if all are equal."""
    short = [number(round(value, DECIMALS), 12) for value in values]
    return short[:1] if len(set(short)) == 1 else short


def cut_text(text: str) -> str:
    """At most `MAX_TEXT` characters of a text, with a note of how many were left out in between."""
    if len(text) <= MAX_TEXT:
        return text
    tail = MAX_TEXT // 4
    return f"{text[: MAX_TEXT - tail]}\n[… {len(text) - MAX_TEXT} characters left out …]\n{text[-tail:]}"
