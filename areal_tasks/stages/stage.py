"""A stage: a function from tables to tables that declares what it reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import pyarrow as pa

from areal_tasks.store.shards import read_table
from schemas.manifest import InputRef, StageManifest, TableRef

if TYPE_CHECKING:
    from areal_tasks.stages.context import Context


class Kind(StrEnum):
    """What a stage needs: one of the kinds of model function call, or no model."""

    PURE = "pure"
    GENERATE = "GENERATE"
    INFERENCE = "INFERENCE"
    TRAIN_STEP = "TRAIN_STEP"
    WEIGHTS = "weights"


@dataclass(frozen=True)
class Inputs:
    """The manifests a stage may read, by stage name, the columns it declared, and the stage's key."""

    manifests: Mapping[str, StageManifest]
    reads: Sequence[str]
    key: str = ""

    def ref(self, table: str) -> TableRef:
        """The table's reference, from whichever input stage wrote it. KeyError if it was not declared."""
        if table not in tables_of(self.reads):
            raise KeyError(f"table {table!r} is not among the declared reads {sorted(self.reads)}")
        return next(m.tables[table] for m in self.manifests.values() if table in m.tables)

    def refs(self) -> dict[str, TableRef]:
        """Every declared table's reference, by name."""
        return {table: self.ref(table) for table in tables_of(self.reads)}

    def read(self, context: Context, table: str) -> pa.Table:
        """The declared columns of `table`, checked against their digests."""
        columns = [c.split(".")[1] for c in self.reads if c.split(".")[0] == table]
        return read_table(context.store, self.ref(table), columns)


@dataclass(frozen=True)
class Output:
    """The result of a stage: tables to be written, or references to tables that an engine has written; and metrics.

    `also_read`: manifests of the replayed run that it read besides its declared inputs.
    """

    tables: Mapping[str, pa.Table | TableRef]
    metrics: Mapping[str, float] = field(default_factory=dict)
    also_read: tuple[InputRef, ...] = ()


@dataclass(frozen=True)
class Stage:
    """One node of the graph. `reads` are `table.column`; `writes` are tables; `carries` is state of the last iteration.

    `source` stages read no table of their iteration, so their key contains the previous commit's digest; `once` stages
    are built once per run, and every later commit names the same manifest. `on_reuse` brings an engine to the state in
    which running the stage would have left it.
    """

    name: str
    kind: Kind
    version: int
    run: Callable[[Context, Inputs, str], Output]
    writes: tuple[str, ...]
    reads: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    carries: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    source: bool = False
    once: bool = False
    on_reuse: Callable[[Context, Inputs, StageManifest], None] | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """The tables this stage reads, each once, in the order of `reads`."""
        return tables_of(self.reads)


def tables_of(reads: Sequence[str]) -> tuple[str, ...]:
    """The tables of `table.column` names, each once, in order."""
    return tuple(dict.fromkeys(column.split(".")[0] for column in reads))


def columns(table: str, *names: str) -> tuple[str, ...]:
    """`columns("rollout", "a", "b")` is `("rollout.a", "rollout.b")`."""
    return tuple(f"{table}.{name}" for name in names)
