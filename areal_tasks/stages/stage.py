"""A stage: a function from tables to tables that declares what it reads and writes; and what it receives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import pyarrow as pa

from areal_tasks.store.backend import Store
from areal_tasks.store.runs import Run
from areal_tasks.store.shards import read_table
from schemas.manifest import InputRef, IterationCommit, StageManifest, StageRef, TableRef, WeightsRef
from schemas.recipe.recipe import Recipe, SftRecipe

if TYPE_CHECKING:
    from areal_tasks.engines.session import Engines
    from areal_tasks.stages.generation import Generation
    from areal_tasks.stages.replay import Recorded


class Kind(StrEnum):
    """The kind of model function call that a stage needs, or none."""

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

    `source` stages read no table of their iteration, so their key contains the previous commit's digest. Those that are
    built `ahead`, before that commit exists, name their own previous result instead. `once` stages are built once per
    run, and every later commit names the same manifest. When a result is reused, `on_reuse` gives the servers what
    running the stage would have given them; a trainer is restored when it is next used.
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
    ahead: bool = False
    once: bool = False
    on_reuse: Callable[[Context, Inputs, StageManifest], None] | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """The tables this stage reads, each once, in the order of `reads`."""
        return tables_of(self.reads)

    def label(self, context: Context) -> str:
        """The name of its task run: `rollout 3`, `evaluate version 3`, `prompts`."""
        if self.once:
            return self.name
        if self.name == "evaluate":
            return f"evaluate version {context.weights.version}"
        return f"{self.name} {context.iteration}"


def tables_of(reads: Sequence[str]) -> tuple[str, ...]:
    """The tables of `table.column` names, each once, in order."""
    return tuple(dict.fromkeys(column.split(".")[0] for column in reads))


def columns(table: str, *names: str) -> tuple[str, ...]:
    """`columns("rollout", "a", "b")` is `("rollout.a", "rollout.b")`."""
    return tuple(f"{table}.{name}" for name in names)


@dataclass
class Context:
    """What the stages of one iteration receive."""

    run: Run
    recipe: Recipe
    engines: Engines
    iteration: int
    weights_held: WeightsRef | None
    previous: IterationCommit | None
    previous_digest: str
    recorded: Recorded | None = None  # the same iteration of the run that is replayed
    generation: Generation | None = None  # of a run that generates samples to train on
    held: WeightsRef | None = None  # `weights` in the store, if the stage generates on a server of its own with them
    uncommitted: Mapping[str, StageRef] = field(default_factory=dict)  # of the previous iteration while it trains

    @property
    def store(self) -> Store:
        return self.run.store

    @property
    def weights(self) -> WeightsRef:
        """The weights of version `iteration`, with which servers generate. Unset before stage `initialise`."""
        assert self.weights_held is not None, "the initial weights come first"
        return self.weights_held

    def before(self, stage: str) -> StageRef | None:
        """The previous iteration's result of this stage."""
        committed = {ref.stage: ref for ref in self.previous.stages} if self.previous else {}
        return {**committed, **self.uncommitted}.get(stage)

    @property
    def next_group(self) -> int:
        """The first prompt position that no committed iteration has consumed."""
        return int(self.previous.state["next_group"]) if self.previous else 0


def demonstrations(recipe: Recipe) -> int:
    """The number of prompt positions that one iteration of supervised fine-tuning takes; 0 in another flow."""
    return recipe.algorithm.batch_size * recipe.algorithm.steps if isinstance(recipe, SftRecipe) else 0
