"""The SQL views besides one per table: their schemas and definitions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from schemas.tables import TABLES, scalar_fields

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

SHARDS: Final = pa.schema(  # one row per Parquet file of a table, in the order of their rows
    [
        ("iteration", pa.int32()),
        ("stage", pa.string()),
        ("table_name", pa.string()),
        ("path", pa.string()),
        ("rows", pa.int64()),
        ("tokens", pa.int64()),
        ("bytes", pa.int64()),
        ("sha256", pa.string()),
        ("manifest", pa.string()),
    ]
)


LOG: Final = pa.schema(  # one row per line of the run's log
    [
        ("n", pa.int32()),
        ("action", pa.string()),
        ("user", pa.string()),
        ("host", pa.string()),
        ("pid", pa.int32()),
        ("time", pa.timestamp("us")),  # UTC
        ("prefect_flow_run_id", pa.string()),
        ("details", pa.map_(pa.string(), pa.string())),
    ]
)

STARTS: Final = pa.schema(  # one row per start of the run's flow
    [
        ("owner", pa.int32()),
        ("host", pa.string()),
        ("pid", pa.int32()),
        ("prefect_flow_run_id", pa.string()),
        ("started", pa.timestamp("us")),  # UTC
        ("ended", pa.timestamp("us")),  # null if neither the log nor a commit has it
        ("ended_by", pa.string()),  # the log's action, or "last commit"
        ("seconds", pa.float64()),
        ("gpus", pa.int32()),  # number assigned to its services
        ("gpus_by", pa.string()),  # source: "log", or "recipe" if the log lacks it
    ]
)

SPOOL: Final = pa.schema(  # one row per group in the spool, by its last record
    [
        ("group_id", pa.int64()),
        ("state", pa.string()),  # waiting, consumed, rejected, dropped
        ("version", pa.int32()),  # of the weights that sampled its oldest token; null for rejected groups
        ("lag", pa.int32()),  # of waiting groups: versions between that and the newest committed weights
        ("samples", pa.int32()),
        ("tokens", pa.int64()),  # generated tokens
        ("reason", pa.string()),  # of rejected groups: `failed` or the filter's name, a colon, and more; of dropped
        ("reward", pa.float64()),  # mean of a rejected group, if a filter computed it
        ("start", pa.int32()),
        ("record", pa.int32()),
        ("written", pa.timestamp("us")),  # UTC
        ("waiting_seconds", pa.float64()),  # of waiting groups: since they were written
    ]
)

SYSTEM: Final = pa.schema(  # one row per service and sample; null: not known
    [
        ("time", pa.timestamp("us")),  # UTC, by the flow's clock: the end of the time that the row is about
        ("owner", pa.int32()),
        ("service", pa.string()),
        ("restart", pa.int32()),
        ("host", pa.string()),  # empty while no machine runs it
        ("seconds", pa.float64()),  # that the row is about
        ("busy", pa.float64()),  # share of them in which it worked
        ("works", pa.map_(pa.string(), pa.float64())),  # share of them by what it worked on
        ("waits", pa.map_(pa.string(), pa.float64())),  # share of them by what it waited for
        ("doing", pa.string()),  # at `time`; empty while it waits
        ("waits_for", pa.string()),  # at `time`; empty while it works
        ("state_seconds", pa.float64()),  # how long, at `time`, it had done or waited for the same
        ("cpu", pa.float64()),  # cores that it used: CPU seconds per second
        ("cores", pa.int32()),  # of its machine
        ("memory", pa.int64()),  # resident bytes of its processes
        ("gpu", pa.float64()),  # share of the time in which its GPUs computed
        ("gpu_memory", pa.int64()),  # bytes in use on its GPUs, by all processes
        ("running", pa.int32()),  # queue, see docs/reference/views.md: what is being worked on
        ("waiting", pa.int32()),  # what waits
        ("at_once", pa.int32()),  # what can be worked on at once
    ]
)

SEGMENTS: Final = pa.schema(  # one row per recipe of the run and of its parents; commits name them by run and segment
    [
        ("run", pa.string()),
        ("segment", pa.int32()),
        ("from_iteration", pa.int32()),
        ("recipe", pa.string()),  # JSON
        ("change", pa.string()),  # what `arealflow set` asked for, who, and when
        ("host", pa.string()),
        ("owner", pa.int32()),
        ("code_version", pa.string()),
        ("committed", pa.timestamp("us")),
    ]
)


#: What DuckDB calls these types.
_KINDS: Final = {
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.bool_(): "BOOLEAN",
    pa.string(): "VARCHAR",
}


@dataclass(frozen=True)
class Join:
    """A table that a view joins by iteration and sample, if the run has it. Lists are unnested.

    `columns`: by the view's name for it, the table's column.
    """

    table: str
    columns: Mapping[str, str]

    def select(self, joined: bool) -> Iterator[str]:
        """The columns' texts in the SELECT list; NULL if the table is not joined."""
        for name, source in self.columns.items():
            kind, value = TABLES[self.table].field(source).type, f"{self.table}.{source}"
            if pa.types.is_list(kind):
                kind, value = kind.value_type, f"unnest({value})"
            yield f", {value if joined else f'NULL::{_KINDS[kind]}'} AS {name}"


@dataclass(frozen=True)
class View:
    """A view over tables, created if the run has all tables that it `needs`. `joins` add columns.

    A `complete` view also has the columns of joined tables that the run lacks.
    """

    name: str
    needs: frozenset[str]
    sql: str
    joins: tuple[Join, ...] = ()
    complete: bool = False

    def define(self, tables: Set[str], unused: Set[str] = frozenset(), schema: str = "main") -> str:
        """The statement that creates the view, in a database schema, for a run that has `tables`.

        Joins with the tables in `unused` are left out and their columns are NULL, which is safe because a join by
        sample neither adds nor removes rows.
        """
        used = [join for join in self.joins if self.complete or join.table in tables]
        joined = [join.table for join in used if join.table in tables - unused]
        columns = "".join(text for join in used for text in join.select(join.table in joined))
        joins = "".join(f" LEFT JOIN {table} USING (iteration, sample_id)" for table in joined)
        text = self.sql.format(columns=columns, joins=joins)
        return f"CREATE OR REPLACE VIEW {schema}.{self.name} AS {text}"


def _view(name: str, needs: str, sql: str, *joins: Join) -> View:
    return View(name, frozenset(needs.split()), sql, joins)


def _join(table: str, *names: str, **sources: str) -> Join:
    """Columns of a table, some under other names."""
    return Join(table, {name: name for name in names} | sources)


#: The column `lag`: versions between the weights that sampled a sample's oldest token and those that train on it.
_LAG: Final = "CASE WHEN scalars.num_generated > 0 THEN scalars.iteration - scalars.version_min END AS lag"

#: What the optimizer did with a demonstration.
_TRAINED: Final = _join(
    "train_samples", "micro_batch", "sample_ratio", "sample_clip_fraction", "sample_kl", "sample_loss"
)

#: Name of the view of the table `scalars` that a replay which ends early shares with its parent.
SHARED: Final = "shared_scalars"


def _late_scalars() -> tuple[View, View]:
    """Views that replace the table `scalars` of a replay that ends early; columns of stages not built are NULL.

    The first also reads the table of the iterations that the replay shares with its parent.
    """
    early = {name: [f.name for f in scalar_fields(TABLES[name])] for name in ("rollout", "verify")}
    columns = [f"{table}.{name}" for table, names in early.items() for name in names if name != "sample_id"]
    known = {name for names in early.values() for name in names}
    late = {name: [f.name for f in scalar_fields(TABLES[name])] for name in ("advantage", "train_samples")}
    joins = tuple(_join(table, *(name for name in names if name not in known)) for table, names in late.items())
    joined = (
        f"SELECT rollout.iteration, rollout.sample_id, {', '.join(columns)}{{columns}}"
        " FROM rollout JOIN verify USING (iteration, sample_id){joins}"
    )
    both = f"SELECT * FROM {SHARED} UNION ALL BY NAME {joined} WHERE iteration NOT IN (SELECT iteration FROM {SHARED})"
    needs = frozenset({"rollout", "verify"})
    return View("scalars", needs | {SHARED}, both, joins, True), View("scalars", needs, joined, joins, True)


#: In order of preference: of each name the first view whose needs are met is created, unless a table has this name.
VIEWS: Final = (
    *_late_scalars(),
    _view(
        "samples",
        "scalars rollout",
        f"SELECT scalars.*, {_LAG}{{columns}} FROM scalars{{joins}}",
        _join("rollout", "prompt", "completion", "answer"),
        _join("verify", "parsed", "detail"),
    ),
    _view("samples", "batch", "SELECT batch.* EXCLUDE (input_ids, loss_mask){columns} FROM batch{joins}", _TRAINED),
    _view(
        "samples",
        "evaluate",
        "SELECT evaluate.* EXCLUDE (input_ids, loss_mask, logprobs, versions) FROM evaluate",
    ),
    _view(
        "tokens",
        "rollout",
        "SELECT *, CASE WHEN loss_mask THEN iteration - version END AS lag FROM ("
        "SELECT iteration, sample_id, group_id, prompt_id, unnest(range(len(input_ids))) AS position,"
        " unnest(input_ids) AS token_id, unnest(loss_mask) AS loss_mask, unnest(logprobs) AS logprob,"
        " unnest(versions) AS version, coalesce(unnest(stale_kv), false) AS stale_kv{columns} FROM rollout{joins})",
        _join("advantage", advantage="advantages", **{"return": "returns"}),
        _join("proximal", prox_logprob="prox_logprobs"),
        _join("reference", ref_logprob="ref_logprobs"),
    ),
    _view(
        "tokens",
        "batch",
        "SELECT iteration, sample_id, prompt_id, unnest(range(len(input_ids))) AS position,"
        " unnest(input_ids) AS token_id, unnest(loss_mask) AS loss_mask FROM batch",
    ),
    _view(  # one row per prompt and iteration: what GRPO compares
        "groups",
        "scalars",
        "SELECT iteration, group_id, any_value(prompt_id) AS prompt_id, any_value(epoch) AS epoch, count(*) AS samples,"
        " count(*) FILTER (kept) AS kept, avg(reward) AS reward, min(reward) AS reward_min, max(reward) AS reward_max,"
        " stddev_pop(reward) AS reward_std, min(reward) = max(reward) AS zero_variance,"
        " sum(num_generated)::BIGINT AS tokens, count(*) FILTER (truncated) AS truncated,"
        " min(version_min) AS version_min, max(version_max) AS version_max"
        " FROM scalars GROUP BY iteration, group_id",
    ),
    _view(  # one row per server and iteration
        "servers",
        "scalars",
        "SELECT iteration, server, count(*) AS samples, sum(num_generated)::BIGINT AS tokens,"
        " avg(seconds) AS seconds_mean, max(seconds) AS seconds_max,"
        " count(*) FILTER (truncated) AS truncated, min(version_min) AS version_min, max(version_max) AS version_max"
        " FROM scalars GROUP BY iteration, server",
    ),
    _view(  # one row per evaluated version of the weights
        "evaluations",
        "evaluate",
        "SELECT iteration, weights_version, count(*) AS samples, avg((verdict = 'correct')::INTEGER) AS accuracy,"
        " avg(reward) AS reward, avg(num_generated) AS tokens,"
        " avg(truncated::INTEGER) AS truncated FROM evaluate GROUP BY iteration, weights_version",
    ),
)
