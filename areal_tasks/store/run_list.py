"""The runs of a store, as `arealflow runs` lists them."""

from __future__ import annotations

from dataclasses import dataclass

from areal_tasks.store.backend import Store
from areal_tasks.store.fork import origin_of
from areal_tasks.store.runs import load_run, run_names
from schemas.errors import UserError


@dataclass(frozen=True)
class RunSummary:
    """A line of `arealflow runs`. `problem` says why the rest is empty.

    `kind` is that of a derived run (`fork`, `replay`), whose own iterations begin at `forked_at`; a `counterfactual`
    replay keeps the rollouts of its parent.
    """

    name: str
    flow: str = ""
    created: str = ""
    iterations: int = 0
    planned: int = 0
    kind: str = ""
    parent: str = ""
    forked_at: int | None = None
    counterfactual: bool = False
    problem: str = ""


def list_runs(store: Store) -> list[RunSummary]:
    """All runs of the store, by name."""
    return [_summary(store, name) for name in run_names(store)]


def _summary(store: Store, name: str) -> RunSummary:
    try:
        run = load_run(store, name)
        iterations = run.checked_committed()
    except UserError as error:  # one damaged run does not hide the others
        return RunSummary(name, problem=str(error))
    origin = origin_of(run.record)
    return RunSummary(
        name=name,
        flow=run.record.flow,
        created=run.record.provenance.committed,
        iterations=iterations,
        planned=run.planned,
        kind=origin.kind if origin else "",
        parent=run.record.parent,
        forked_at=origin.iteration if origin else None,
        counterfactual=run.record.counterfactual,
    )
