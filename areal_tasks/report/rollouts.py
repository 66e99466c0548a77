"""Reads the chosen samples from the shards of their iterations, and encodes them compactly for the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from areal_tasks.report.pick import Key, Picked
from areal_tasks.report.series import number
from areal_tasks.store.backend import Store
from areal_tasks.store.catalog import Catalog
from areal_tasks.store.parallel import parallel
from areal_tasks.store.shards import read_table
from schemas.errors import UserError
from schemas.manifest import IterationCommit, TableRef
from schemas.tables import TABLES

Row = dict[str, Any]

MAX_TOKENS: Final = 4096  # of longer samples: the first three quarters of these, and the last quarter
MAX_TEXT: Final = 20_000  # characters of a text, likewise
DECIMALS: Final = 4

#: Columns that are joined to the samples of each table, if the run has them.
_JOINED: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "scalars": {
        "rollout": ("prompt", "completion", "answer", "input_ids", "loss_mask", "logprobs", "versions"),
        "verify": ("reward", "verdict", "parsed", "detail"),
        "advantage": ("advantages", "shaped_reward", "kept", "dropped_reason"),
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


def read_samples(catalog: Catalog, picked: Picked) -> tuple[list[tuple[Key, Row]], list[str]]:
    """The rows of `picked`, in its order, and messages about iterations that could not be read."""
    places = sorted({(key.table, key.iteration) for key in picked})
    results = parallel(lambda place: _read_place(catalog, picked, *place), places, threads=4)
    rows = {key: row for found, _ in results for key, row in found.items()}
    problems = [problem for _, problem in results if problem]
    return [(key, rows[key]) for key in picked if key in rows], problems


def _read_place(catalog: Catalog, picked: Picked, table: str, iteration: int) -> tuple[dict[Key, Row], str]:
    keys = {key for key in picked if (key.table, key.iteration) == (table, iteration)}
    try:
        return _read_iteration(catalog, table, iteration, keys), ""
    except UserError as error:  # a damaged shard must not prevent the report
        return {}, str(error)


def _read_iteration(catalog: Catalog, table: str, iteration: int, keys: set[Key]) -> dict[Key, Row]:
    refs = table_refs(catalog, catalog.run.commit(iteration), {table, *_JOINED[table]})
    wanted = pa.array(sorted({key.sample_id for key in keys}))
    found: dict[Key, Row] = {}
    base = "rollout" if table == "scalars" and table not in refs else table  # a replay may end before `scalars`
    for ref in refs.get(base, []):
        for row in _rows(catalog, ref, wanted, [name for name in TABLES[base].names if name != "iteration"]):
            key = Key(table, iteration, row.get("weights_version", -1), row["sample_id"])
            if key in keys:
                found[key] = row
    for other, columns in _JOINED[table].items():
        for ref in refs.get(other, []):
            joined = {row["sample_id"]: row for row in _rows(catalog, ref, wanted, ["sample_id", *columns])}
            for key, row in found.items():
                row |= joined.get(key.sample_id, {})
    return found


def table_refs(catalog: Catalog, commit: IterationCommit, tables: set[str]) -> dict[str, list[TableRef]]:
    """The tables of these names that a commit selects; a commit may select two evaluations."""
    stages = set().union(*(catalog.stages_of.get(table, set()) for table in tables))
    found: dict[str, list[TableRef]] = {}
    for manifest in (catalog.run.read_stage(ref) for ref in commit.stages if ref.stage in stages):
        for name in manifest.tables.keys() & tables:
            found.setdefault(name, []).append(manifest.tables[name])
    return found


def _rows(catalog: Catalog, ref: TableRef, wanted: pa.Array, columns: Sequence[str]) -> list[Row]:
    store = catalog.run.store
    try:
        table = read_table(store, ref, columns)
    except ValueError:  # written by an earlier version, with fewer columns
        table = read_table(store, ref, [name for name in columns if name in _written(store, ref)])
    rows: list[Row] = table.filter(pc.is_in(table["sample_id"], value_set=wanted)).to_pylist()
    return rows


def _written(store: Store, ref: TableRef) -> list[str]:
    filesystem, root = store.arrow()
    names: list[str] = pq.read_schema(f"{root}/{ref.shards[0].path}", filesystem=filesystem).names
    return names


# ── encoding ────────────────────────────────────────────────────────────────────────────────────────────────────────


def encode_sample(key: Key, row: Mapping[str, Any], why: Sequence[str]) -> dict[str, Any]:
    """A sample as the page reads it: texts, numbers, and the values of each generated token."""
    texts = {name: cut_text(row[name]) for name in _TEXTS if row.get(name)}
    plain = {name: row[name] for name in _PLAIN if row.get(name) not in (None, "")}
    numbers = {name: number(row[name]) for name in _NUMBERS if name in row}
    flags = {name: True for name, is_set in (("truncated", row.get("truncated")), ("dropped", _dropped(row))) if is_set}
    version = {"evaluated": key.version} if key.table == "evaluate" else {}
    about = {"table": key.table, "id": key.sample_id, "it": key.iteration, "why": list(why)}
    return {**about, **version, **texts, **plain, **numbers, **flags, "tokens": encode_tokens(row)}


def _dropped(row: Mapping[str, Any]) -> bool:
    return row.get("kept") is False


def encode_tokens(row: Mapping[str, Any]) -> dict[str, Any]:
    """Ids of all tokens, [start, length] of each generated stretch, and columns over the generated tokens alone."""
    ids, mask = row["input_ids"], row["loss_mask"]
    kept = _kept(len(ids), MAX_TOKENS)
    mask = [mask[i] for i in kept]
    generated = [i for i, own in zip(kept, mask, strict=True) if own]
    there = {short: row[name] for name, short in _PER_TOKEN.items() if name in row}
    columns = {short: encode_column([values[i] for i in generated]) for short, values in there.items()}
    left_out = {"cut": [MAX_TOKENS * 3 // 4, len(ids) - MAX_TOKENS]} if len(ids) > MAX_TOKENS else {}
    return {"ids": [ids[i] for i in kept], "own": stretches(mask), **columns, **left_out}


def _kept(length: int, most: int) -> list[int]:
    if length <= most:
        return list(range(length))
    return [*range(most * 3 // 4), *range(length - most // 4, length)]


def stretches(mask: Sequence[bool]) -> list[list[int]]:
    """[start, length] of each run of True."""
    found: list[list[int]] = []
    for i, own in enumerate(mask):
        if own and found and sum(found[-1]) == i:
            found[-1][1] += 1
        elif own:
            found.append([i, 1])
    return found


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
