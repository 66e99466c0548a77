"""Where two runs first differ: in recipe, code, inputs and results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, zip_longest
from typing import Any, Final

from pydantic import ValidationError

from areal_tasks.store.backend import Store
from areal_tasks.store.fork import origin_of
from areal_tasks.store.history.diff_curves import Section, compare_curves, read_curves
from areal_tasks.store.keys import semantic_values
from areal_tasks.store.reachable import history
from areal_tasks.store.runs import Run, load_run
from schemas.errors import UserError
from schemas.manifest import IterationCommit, StageRef
from schemas.recipe.load import RECIPES

WEIGHTS: Final = "weights"
_UNSET: Final = "unset"


@dataclass(frozen=True)
class FieldChange:
    """A recipe field that differs from an iteration on. An operational field never changes what is computed."""

    iteration: int
    field: str
    a: Any
    b: Any
    semantic: bool


@dataclass(frozen=True)
class FirstDifference:
    """The first stage whose content differs between the runs, and the possible causes."""

    iteration: int
    stage: str
    request: str  # "the same" or "differs": whether the stage's keys are equal
    inputs: str  # "the same", or the stages whose tables it read and that differ
    code: tuple[str, str]
    paths: tuple[str, str]
    fields: tuple[str, ...] = ()  # semantic recipe fields that differ by then

    @property
    def cause(self) -> str:
        """The likely cause."""
        if self.request == "the same":
            return "same recipe and inputs, other result: other hardware, threads or code"
        if self.inputs != "the same":
            return f"its inputs differ: {self.inputs}"
        if self.fields:
            return f"the recipes differ in {', '.join(self.fields)}"
        return "same recipe, other key: other code, or another history before"


@dataclass(frozen=True)
class Difference:
    """The result of `arealflow diff`."""

    names: tuple[str, str]
    origins: tuple[str, str]
    lengths: tuple[int, int]
    shared: int
    fields: Sequence[FieldChange]
    code: Sequence[tuple[int, str, str]]
    first: FirstDifference | None
    only: tuple[tuple[str, ...], tuple[str, ...]]
    curves: Section

    @property
    def same(self) -> bool:
        """Whether every deterministic column and weight of both runs is bitwise identical."""
        return self.first is None and self.lengths[0] == self.lengths[1] and self.only == ((), ())


def diff_runs(store: Store, a: str, b: str) -> Difference:
    """Compare two runs of one store. UserError if one does not exist or has committed nothing."""
    runs = (load_run(store, a), load_run(store, b))
    commits = (_commits(runs[0]), _commits(runs[1]))
    names = (a, b if b != a else f"{b} (again)")
    fields = field_changes(*runs, len(commits[0]), len(commits[1]))
    first = first_difference(*runs, *commits)
    if first is not None:
        by_then = tuple(f.field for f in fields if f.semantic and f.iteration <= first.iteration)
        first = replace(first, fields=by_then)
    return Difference(
        names=names,
        origins=(str(origin_of(runs[0].record) or ""), str(origin_of(runs[1].record) or "")),
        lengths=(len(commits[0]), len(commits[1])),
        shared=sum(x.run == y.run and x.attempt == y.attempt for x, y in zip(*commits, strict=False)),
        fields=fields,
        code=_code_changes(*commits),
        first=first,
        only=_only(*commits),
        curves=compare_curves(read_curves(store, a), read_curves(store, b), names),
    )


def _commits(run: Run) -> list[IterationCommit]:
    commits = history(run)
    if not commits:
        raise UserError(f"Run {run.name!r} has not committed any iteration: there is nothing to compare.")
    return commits


# ── recipes and code ────────────────────────────────────────────────────────────────────────────────────────────────


def field_changes(a: Run, b: Run, length_a: int, length_b: int) -> list[FieldChange]:
    """The fields that differ in the iterations that both runs have, each with the first of these."""
    found: dict[str, FieldChange] = {}
    same = groupby(range(min(length_a, length_b)), lambda k: (a.segment_at(k).attempt, b.segment_at(k).attempt))
    for k in (next(iterations) for _, iterations in same):
        recipes = a.recipe_at(k), b.recipe_at(k)
        left, right = (dict(leaves(recipe)) for recipe in recipes)
        semantic = _semantic(recipes[0]) | _semantic(recipes[1])
        for field in left.keys() | right.keys():
            pair = left.get(field, _UNSET), right.get(field, _UNSET)
            if pair[0] != pair[1]:
                found.setdefault(field, FieldChange(k, field, *pair, semantic=field in semantic))
    return sorted(found.values(), key=lambda change: (not change.semantic, change.iteration, change.field))


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted path and the value of each field."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _semantic(recipe: dict[str, Any]) -> set[str]:
    """The semantic fields of a stored recipe; all fields if this version cannot read it."""
    try:
        parsed = RECIPES[recipe["flow"]].model_validate(recipe)
    except (ValidationError, KeyError):
        return {field for field, _ in leaves(recipe)}
    values = semantic_values(parsed)
    return {field for field, _ in leaves(recipe) if any(field == v or field.startswith(f"{v}.") for v in values)}


def _code_changes(a: Sequence[IterationCommit], b: Sequence[IterationCommit]) -> list[tuple[int, str, str]]:
    """The iterations from which the runs' code versions differ, with both versions."""
    found: list[tuple[int, str, str]] = []
    for x, y in zip(a, b, strict=False):
        pair = x.provenance.code_version, y.provenance.code_version
        if pair[0] != pair[1] and (not found or found[-1][1:] != pair):
            found.append((x.iteration, *pair))
    return found


# ── what was built ──────────────────────────────────────────────────────────────────────────────────────────────────


def first_difference(
    a: Run, b: Run, commits_a: Sequence[IterationCommit], commits_b: Sequence[IterationCommit]
) -> FirstDifference | None:
    """The first stage that both runs have and whose content differs, by iteration; the weights come last in each."""
    for x, y in zip(commits_a, commits_b, strict=False):
        for left, right in _pairs(x, y):
            if left.digest != right.digest:
                return _explained(a, b, x.iteration, left, right)
        if x.weights.digest != y.weights.digest:
            code = x.provenance.code_version, y.provenance.code_version
            places = x.weights.path, y.weights.path
            return FirstDifference(x.iteration, WEIGHTS, "differs", "the same", code, places)
    return None


def _pairs(x: IterationCommit, y: IterationCommit) -> Iterator[tuple[StageRef, StageRef]]:
    """Pairs of the stages that both commits name, in order; the n-th of an iteration and name with the n-th."""
    for place in dict.fromkeys(_place(ref) for ref in x.stages):
        yield from zip(*([ref for ref in c.stages if _place(ref) == place] for c in (x, y)), strict=False)


def _place(ref: StageRef) -> str:
    """`iteration=…/stage=…`, in whichever run."""
    return ref.path.partition("/")[2].rpartition("/")[0]


def _explained(a: Run, b: Run, iteration: int, left: StageRef, right: StageRef) -> FirstDifference:
    one, other = a.read_stage(left), b.read_stage(right)
    pairs = zip_longest(one.inputs, other.inputs)
    differ = [x or y for x, y in pairs if x is None or y is None or x.digest != y.digest]
    apart = [ref.path.split("/stage=")[1].split("/")[0] for ref in differ]
    return FirstDifference(
        iteration=iteration,
        stage=left.stage,
        request="the same" if left.key == right.key else "differs",
        inputs=", ".join(apart) or "the same",
        code=(one.provenance.code_version, other.provenance.code_version),
        paths=(left.path, right.path),
    )


def _only(a: Sequence[IterationCommit], b: Sequence[IterationCommit]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Stages that only one of the runs has, in the iterations that both have."""
    both = min(len(a), len(b))
    one, other = ({ref.stage for commit in part[:both] for ref in commit.stages} for part in (a, b))
    return tuple(sorted(one - other)), tuple(sorted(other - one))
