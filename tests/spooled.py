"""Whether a run has used what waited in its spool."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pyarrow as pa

from areal_tasks.store.backend import Store
from areal_tasks.store.runs import load_run
from areal_tasks.store.shards import read_table
from areal_tasks.store.spool import read_spool


def rows_by_group(tables: Iterable[pa.Table]) -> dict[int, list[str]]:
    """All columns of each group's rows, bitwise: tokens, logprobs, versions, even the seconds that each took."""
    found: dict[int, list[str]] = defaultdict(list)
    for row in (row for table in tables for row in table.to_pylist()):
        found[row["group_id"]].append(repr(row))
    return found


def not_as_spooled(store: Store, name: str) -> list[int]:
    """The groups of a finished run that are in its spool, were not rejected, and were generated again none the less.

    Nothing may have removed rows of the spool.
    """
    run, records = load_run(store, name), read_spool(store, name)
    head = run.head()
    commits = [run.commit(k) for k in range(head.iteration + 1)] if head else []
    stages = [run.read_stage(ref) for commit in commits for ref in commit.stages if ref.stage == "rollout"]
    final = rows_by_group(read_table(store, stage.tables["rollout"]) for stage in stages)
    rejected = {group.index for record in records for group in record.rejected}
    copies = (rows_by_group([read_table(store, record.tables["rollout"])]) for record in records if record.finished)
    found = {group for copy in copies for group, rows in copy.items() if rows != final.get(group)}
    return sorted(found - rejected)
