"""Tensors from the tables that an iteration trains on, and tables from the results of training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from areal_tasks.data.batching import Sequences, in_whole_batch, make_sequences
from areal_tasks.data.ragged import ragged
from schemas.errors import UserError
from schemas.tables import FLOATS, TABLES

TEXT = ("sample_id", "input_ids", "loss_mask", "num_tokens")

#: The columns that `train` and `logprobs` read of each table; no others are fetched (but see `read_of`).
COLUMNS = {
    "rollout": (*TEXT, "logprobs", "version_max"),
    "advantage": ("sample_id", "advantages", "kept"),
    "reference": ("sample_id", "ref_logprobs"),
    "proximal": ("sample_id", "prox_logprobs"),
    "batch": (*TEXT, "minibatch"),
    "train_samples": ("sample_id", "minibatch", "micro_batch"),
}
#: Columns of the rollout that `train` also reads if tokens may be older than the policy.
AGES = ("versions", "stale_kv")
#: The columns that every rank reads of all samples; it reads the others of COLUMNS for its own samples only.
PLANNING = {
    "rollout": ("sample_id", "num_tokens", "version_max"),
    "advantage": ("sample_id", "kept"),
    "batch": ("sample_id", "num_tokens", "minibatch"),
}


@dataclass(frozen=True)
class Samples:
    """What the plan of an iteration depends on: scalars of all its samples, the same on every rank."""

    ids: pa.Array
    lengths: Int[Tensor, " B"]
    kept: Bool[Tensor, " B"]
    minibatch: Int[Tensor, " B"] | None  # if the table prescribes it


@dataclass(frozen=True)
class Batch(Samples):
    """The samples of one iteration, and the tokens of those in `rows`.

    `columns` are flat: one element per token of `sequences`, which knows where those of each sample in `rows` are.
    """

    sequences: Sequences
    rows: Int[Tensor, " b"]  # in the order of the flat columns
    columns: dict[str, Float[Tensor, " N"]]
    staleness: Staleness | None = None  # if tokens may be older than the policy


def read_of(table: str, ages: bool) -> tuple[str, ...]:
    """The columns that `train` reads of a table; with `ages`, also those with the age of tokens."""
    return (*COLUMNS[table], *AGES) if ages and table == "rollout" else COLUMNS[table]


def grpo_samples(tables: Mapping[str, pa.Table], version: int) -> Samples:
    """All samples of `rollout` and `advantage`. UserError: rows are missing, or a token is newer than `version`."""
    rollout = tables["rollout"]
    newest = pc.max(rollout["version_max"]).as_py()
    if newest is not None and newest > version:
        raise UserError(f"the rollout has tokens of version {newest}, but version {version} trains on it")
    ids = _whole(rollout["sample_id"])
    kept = _tensor(aligned(tables["advantage"], ids, "advantage")["kept"])
    return Samples(ids, _tensor(rollout["num_tokens"]).long(), kept, None)


def text_samples(table: pa.Table) -> Samples:
    """All samples of a table of TEXT: all are kept, in the minibatches that it prescribes, if it does."""
    lengths = _tensor(table["num_tokens"]).long()
    minibatch = _tensor(table["minibatch"]).long() if "minibatch" in table.column_names else None
    return Samples(_whole(table["sample_id"]), lengths, torch.ones(len(lengths), dtype=torch.bool), minibatch)


def grpo_batch(
    tables: Mapping[str, pa.Table], version: int, max_lag: float | None = None, samples: Samples | None = None
) -> Batch:
    """The batch in tables `rollout`, `advantage` and optionally `reference` and `proximal`, joined by `sample_id`.

    `samples`: those of the iteration, of which `tables` hold some; None: they hold all. `max_lag`: by how many versions
    a token may be older than `version`; None: ages are not read. Otherwise the column `comparable` is 1 at tokens that
    `version` itself sampled, with its own KV cache.

    UserError: rows are missing or lists differ in length, or a token is newer than `version` or too old.
    """
    samples = samples or grpo_samples(tables, version)
    rollout = tables["rollout"]
    ids = _whole(rollout["sample_id"])
    advantage = aligned(tables["advantage"], ids, "advantage")
    sequences = read_sequences(rollout)
    columns = {
        "behaviour": _flat(rollout, "logprobs", sequences),
        "advantages": _flat(advantage, "advantages", sequences),
    }
    for name in ("reference", "proximal"):
        if name in tables:
            columns[name] = _flat(aligned(tables[name], ids, name), COLUMNS[name][1], sequences)
    staleness = None if max_lag is None else _staleness(rollout, sequences, version, max_lag)
    if staleness is not None:
        columns["comparable"] = staleness.comparable.float()
    return _batch(samples, ids, sequences, columns, staleness)


def text_batch(table: pa.Table, samples: Samples) -> Batch:
    """A batch of TEXT alone: that of a table which holds some of `samples`."""
    return _batch(samples, _whole(table["sample_id"]), read_sequences(table), {})


def _batch(
    samples: Samples,
    ids: pa.Array,
    sequences: Sequences,
    columns: dict[str, Float[Tensor, " N"]],
    staleness: Staleness | None = None,
) -> Batch:
    """The batch of `samples` whose tokens are those of `sequences`, the samples `ids`."""
    rows = (
        torch.arange(len(ids)) if ids.equals(samples.ids) else _tensor(pc.index_in(ids, value_set=samples.ids)).long()
    )
    placed = in_whole_batch(sequences, rows, samples.lengths)
    return Batch(samples.ids, samples.lengths, samples.kept, samples.minibatch, placed, rows, columns, staleness)


def read_sequences(table: pa.Table) -> Sequences:
    """The token columns of a rollout or batch table. UserError: the lists of a row differ in length."""
    lengths = _tensor(table["num_tokens"]).long()
    ids = _whole(table["input_ids"])
    _check_lengths("input_ids", ids, lengths)
    _check_lengths("loss_mask", _whole(table["loss_mask"]), lengths)
    return make_sequences(_tensor(ids.flatten()), _tensor(_whole(table["loss_mask"]).flatten()), lengths)


def aligned(table: pa.Table, ids: pa.Array, name: str) -> pa.Table:
    """The rows of `table` in the order of `ids`. UserError: a sample is missing."""
    own = _whole(table["sample_id"])
    if own.equals(ids):
        return table
    rows = pc.index_in(ids, value_set=own)
    if rows.null_count:
        missing = ids.filter(rows.is_null())[0].as_py()
        raise UserError(f"table {name} has no row for sample {missing}: it belongs to another rollout")
    return table.take(rows)


def logprobs_table(name: str, ids: pa.Array, lengths: Int[Tensor, " B"], logprobs: Float[Tensor, " N"]) -> pa.Table:
    """The table `reference` or `proximal` from a flat column."""
    lists = ragged(logprobs.numpy(), lengths.numpy(), FLOATS)
    return make_table(name, dict(zip(COLUMNS[name], (ids, lists), strict=True)))


def make_table(name: str, columns: Mapping[str, object]) -> pa.Table:
    """The table `name` of `schemas.tables` from its columns, cast to the declared types."""
    schema = TABLES[name]
    return pa.table({f.name: pa.array(columns[f.name], f.type) for f in schema}, schema=schema)


def _check_lengths(name: str, lists: pa.Array, lengths: Int[Tensor, " B"]) -> None:
    if not torch.equal(_tensor(pc.list_value_length(lists)).long(), lengths):
        raise UserError(f"column {name}: a list does not have the length of its row's tokens (num_tokens)")


def _flat(table: pa.Table, name: str, sequences: Sequences) -> Shaped[Tensor, " N"]:
    lists = _whole(table[name])
    _check_lengths(name, lists, sequences.lengths)
    return _tensor(lists.flatten())


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _tensor(column: pa.Array | pa.ChunkedArray) -> Tensor:
    """A tensor with its own memory: Arrow's is read-only, which torch does not support."""
    return torch.tensor(column.to_numpy(zero_copy_only=False) if isinstance(column, pa.Array) else column.to_numpy())


# ── the age of tokens ───────────────────────────────────────────────────────────────────────────────────────────────


#: With fewer tokens of the trainer's own version, the agreement of server and trainer is not measured.
LEAST_COMPARED: Final = 256


@dataclass(frozen=True)
class Staleness:
    """Per token of a batch: by how many versions the weights that sampled it are older than those that are trained, and
    whether still older weights computed some of its KV cache. 0 and False at tokens that do not count.
    """

    lag: Int[Tensor, " N"]
    stale_kv: Bool[Tensor, " N"]

    @property
    def comparable(self) -> Bool[Tensor, " N"]:
        """The tokens that the trainer's own weights sampled, with their own KV cache."""
        return (self.lag == 0) & ~self.stale_kv


def _staleness(rollout: pa.Table, sequences: Sequences, version: int, bound: float) -> Staleness:
    """The staleness of tokens that the policy `version` trains on. UserError: one is more than `bound` versions old."""
    versions, stale_kv = (_flat(rollout, name, sequences) for name in AGES)
    found = Staleness(torch.where(sequences.counted, version - versions, 0), stale_kv & sequences.counted)
    if not len(found.lag) or (lag := int(found.lag.max())) <= bound:
        return found
    owners = torch.arange(len(sequences.lengths)).repeat_interleave(sequences.lengths)
    sample = rollout["sample_id"][int(owners[int(found.lag.argmax())])].as_py()
    raise UserError(
        f"sample {sample} has a token of version {version - lag}, {lag} versions older than version {version}, which "
        f"would train on it; rollout.max_head_offpolicyness (η) allows {bound:g}. No step was made. Set η to {lag} at "
        "least, or rollout.bound to admission, under which slow groups may exceed it."
    )


def staleness_totals(staleness: Staleness, trained: Bool[Tensor, " N"]) -> list[float]:
    """Over a rank's `trained` tokens: their number, the sum of their lags, the greatest, and how many are stale."""
    lag = staleness.lag[trained].double()
    largest = float(lag.max()) if len(lag) else 0.0
    return [float(len(lag)), float(lag.sum()), largest, float(staleness.stale_kv[trained].sum())]


def staleness_metrics(totals: list[list[float]]) -> dict[str, float]:
    """Mean and greatest lag in versions, and the stale share, from all ranks' `staleness_totals`; {} without tokens."""
    counts, sums, largest, stale = totals
    if not (tokens := sum(counts)):
        return {}
    return {"lag_mean": sum(sums) / tokens, "lag_max": max(largest), "stale_kv": sum(stale) / tokens}
