"""The views that SQL sees besides one view per table: what they read and how they are made."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

STAGES: Final = pa.schema(  # one row per stage manifest that a commit selects
    [
        ("iteration", pa.int32()),
        ("stage", pa.string()),
        ("key", pa.string()),
        ("attempt", pa.string()),
        ("run", pa.string()),
        ("tables", pa.list_(pa.string())),
        ("shards", pa.int32()),
        ("rows", pa.int64()),
        ("tokens", pa.int64()),
        ("bytes", pa.int64()),
        ("started", pa.timestamp("us")),  # UTC
        ("committed", pa.timestamp("us")),
        ("seconds", pa.float64()),
        ("reused", pa.bool_()),  # built by an earlier start of the flow, or in another run
        ("metrics", pa.map_(pa.string(), pa.float64())),
        ("host", pa.string()),
        ("owner", pa.int32()),
        ("code_version", pa.string()),
        ("prefect_flow_run_id", pa.string()),
        ("prefect_task_run_id", pa.string()),
        ("path", pa.string()),
    ]
)

COMMITS: Final = pa.schema(  # one row per iteration
    [
        ("iteration", pa.int32()),
        ("attempt", pa.string()),
        ("run", pa.string()),
        ("version", pa.int32()),  # of the weights this iteration made
        ("weights", pa.string()),
        ("checkpoint_version", pa.int32()),  # null before the first checkpoint
        ("segment", pa.int32()),
        ("stages", pa.list_(pa.string())),
        ("state", pa.string()),  # JSON
        ("started", pa.timestamp("us")),
        ("committed", pa.timestamp("us")),
        ("seconds", pa.float64()),
        ("host", pa.string()),
        ("owner", pa.int32()),
        ("code_version", pa.string()),
        ("prefect_flow_run_id", pa.string()),
        ("previous", pa.string()),
    ]
)


@dataclass(frozen=True)
class View:
    """A view over tables: made where the run has all that it `needs`; what is `optional` only adds columns."""

    name: str
    needs: frozenset[str]
    optional: frozenset[str]
    sql: str
    columns: tuple[tuple[str, str], ...] = ()  # (optional table, its columns in the SELECT list)

    def define(self, tables: Set[str]) -> str:
        """The statement that creates the view in a run that has `tables`."""
        joined = sorted(self.optional & tables)
        columns = "".join(f", {text}" for table, text in self.columns if table in joined)
        joins = "".join(f" LEFT JOIN {table} USING (iteration, sample_id)" for table in joined)
        return f"CREATE VIEW {self.name} AS {self.sql.format(columns=columns, joins=joins)}"


def _view(name: str, needs: str, sql: str, **columns: str) -> View:
    return View(name, frozenset(needs.split()), frozenset(columns), sql, tuple(columns.items()))


def judged(table: str) -> str:
    """The column `reward`: NaN in its table where a completion could not be judged, NULL for those who average."""
    return f"CASE WHEN isnan({table}.reward) THEN NULL ELSE {table}.reward END AS reward"


#: The column `sample_logprob_gap`: NaN in its table where nobody measured it, NULL for those who average.
_GAP: Final = (
    "CASE WHEN isnan(scalars.sample_logprob_gap) THEN NULL ELSE scalars.sample_logprob_gap END AS sample_logprob_gap"
)

#: In order of preference: the first view of a name whose needs are met is made.
VIEWS: Final = (
    _view(
        "samples",
        "scalars rollout",
        f"SELECT scalars.* REPLACE ({judged('scalars')}, {_GAP}),"
        " rollout.prompt, rollout.completion, rollout.answer{columns} FROM scalars"
        " LEFT JOIN rollout USING (iteration, sample_id){joins}",
        verify="verify.parsed, verify.detail",
    ),
    _view(
        "samples",
        "batch",
        "SELECT batch.* EXCLUDE (input_ids, loss_mask){columns} FROM batch{joins}",
        train_samples="train_samples.* EXCLUDE (iteration, sample_id, minibatch, sample_logprob_gap)",
    ),
    _view(
        "samples",
        "evaluate",
        "SELECT evaluate.* EXCLUDE (input_ids, loss_mask, logprobs, versions)"
        f" REPLACE ({judged('evaluate')}){{columns}}"
        " FROM evaluate{joins}",
    ),
    _view(
        "tokens",
        "rollout",
        "SELECT iteration, sample_id, group_id, prompt_id, unnest(range(len(input_ids))) AS position,"
        " unnest(input_ids) AS token_id, unnest(loss_mask) AS loss_mask, unnest(logprobs) AS logprob,"
        " unnest(versions) AS version{columns} FROM rollout{joins}",
        advantage="unnest(advantages) AS advantage, unnest(returns) AS return",
        reference="unnest(ref_logprobs) AS ref_logprob",
        proximal="unnest(prox_logprobs) AS prox_logprob",
    ),
    _view(
        "tokens",
        "batch",
        "SELECT iteration, sample_id, prompt_id, unnest(range(len(input_ids))) AS position,"
        " unnest(input_ids) AS token_id, unnest(loss_mask) AS loss_mask{columns} FROM batch{joins}",
    ),
)
