"""Derived runs: a fork shares its parent's history up to an iteration; a replay rebuilds it from its tables.

Nothing is copied. First a reference is written into the parent, so that `gc` keeps what the derived run needs; then
that run is created.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from areal_tasks.store import paths
from areal_tasks.store.backend import Missing, NewerSchema, Store, StoreError, Unavailable, open_store
from areal_tasks.store.commit import commit_once, find_record, new_attempt
from areal_tasks.store.history.journal import append_log
from areal_tasks.store.objects.files import read_weights
from areal_tasks.store.objects.inventory import check_file, check_size
from areal_tasks.store.parallel import parallel
from areal_tasks.store.provenance import make_provenance, now
from areal_tasks.store.reachable import files_of, newest_written, published_weights
from areal_tasks.store.retention.tombstones import check_kept, check_run_kept
from schemas.errors import UserError
from schemas.manifest import FileRef, Reference, RunRecord, WeightsRef
from schemas.recipe.recipe import BaseRecipe

if TYPE_CHECKING:
    from areal_tasks.store.runs import Run

R = TypeVar("R", bound=BaseRecipe)

_FORK: Final = re.compile(r"(?P<parent>[^@]+)@(?P<iteration>\d+)")
#: The maximum of `algorithm.max_logprob_gap`, in nats. A replay that keeps rollouts of other weights uses it.
MAX_LOGPROB_GAP: Final = 100.0
_INITIAL_WEIGHTS: Final = ("path", "scratch", "warm_start")  # fields of `model` that determine version 0

#: The first stage that a replay builds, and the last one; "": all that follow.
ReplayStart = Literal["verify", "advantage", "train"]
ReplayEnd = Literal["", "verify", "advantage"]


@dataclass(frozen=True)
class Origin:
    """Where a derived run comes from: its parent, and the first iteration that is its own."""

    parent: str
    iteration: int
    kind: Literal["fork", "replay"] = "fork"
    counterfactual: bool = False  # a replay that keeps the recorded rollouts although its policy differs
    replay_from: str = ""
    replay_until: str = ""

    def recorded(self) -> dict[str, Any]:
        """The fields of `run.json` that record it."""
        return {name if name != "iteration" else "parent_iteration": value for name, value in vars(self).items()}

    def __str__(self) -> str:
        if self.kind == "fork":
            return f"a fork of {self.parent!r} at iteration {self.iteration}"
        until = f" until {self.replay_until}" if self.replay_until else ""
        how = "with its rollouts" if self.counterfactual else "on policy"
        at = f" at iteration {self.iteration}" if self.iteration else ""
        return f"a replay of {self.parent!r} from {self.replay_from}{until}{at}, {how}"


def origin_of(record: RunRecord) -> Origin | None:
    """Where a run comes from; None for one that has no parent."""
    if not record.parent:
        return None
    own = record.model_dump(include={"parent", "counterfactual", "replay_from", "replay_until"})
    return Origin(iteration=record.parent_iteration, kind="replay" if record.kind == "replay" else "fork", **own)


def read_fork(text: str) -> Origin:
    """The origin that `PARENT@ITERATION` names. UserError if `text` is not of this form."""
    found = _FORK.fullmatch(text.strip())
    if found is None:
        raise UserError(f"fork: {text!r} should look like PARENT@ITERATION, such as quickstart@40")
    return Origin(found["parent"], int(found["iteration"]))


def check_origin(record: RunRecord, asked: Origin | None) -> None:
    """UserError unless the existing run of `record` has the requested origin (None: any that is no replay)."""
    own = origin_of(record)
    if asked is not None and own != asked:
        raise UserError(
            f"Run {record.run!r} exists and is {own or 'no derived run'}, not {asked}. Choose another name (run=NAME)."
        )
    if asked is None and own is not None and own.kind == "replay":
        raise UserError(f"Run {record.run!r} is {own}: arealflow replay continues it. Choose another name (run=NAME).")


def check_forkable(parent: Run, iteration: int) -> None:
    """UserError unless a fork of `parent` can begin at `iteration`."""
    _check_has_iterations(parent)
    check_iteration(parent, iteration)


def _check_has_iterations(parent: Run) -> None:
    """UserError if `parent` is an evaluation."""
    if parent.record.flow == "evaluate":
        raise UserError(
            f"Run {parent.name!r} is an evaluation: it has no iterations to continue. To judge its completions by "
            f"another verifier: arealflow replay {parent.name} --from verify reward.verifier=… ; to evaluate with "
            "other settings or weights, run its recipe again under another name."
        )


def check_iteration(parent: Run, iteration: int) -> int:
    """How many iterations `parent` has committed.

    UserError unless all before this one are, and the last of them was trained.
    """
    committed = parent.checked_committed()
    if iteration > committed:
        has = f"has committed {committed} iterations" if committed else "has not committed any iteration"
        raise UserError(f"Run {parent.name!r} {has}: fork it at 0 to {committed}, not at {iteration}.")
    record = parent.run_of_iteration(max(iteration - 1, 0)).record
    if iteration and record.replay_until:
        raise UserError(
            f"Run {record.run!r} is a replay that ends with {record.replay_until} and trained nothing, so no run can "
            f"continue from its iteration {iteration}: replay it from train, or fork {record.parent!r}."
        )
    return committed


def commits_needed(origin: Origin, end: int) -> range:
    """The iterations before `end` whose weights and checkpoint a derived run may load.

    It continues from the last one that it shares. A replay may also reuse any later one and continue from there, unless
    it keeps the rollouts and trains every iteration itself, or none.
    """
    if origin.kind == "fork":
        return range(max(end - 1, 0), end)
    reuses_none = origin.counterfactual and (origin.replay_until or origin.replay_from == "train")
    return range(max(origin.iteration - 1, 0), origin.iteration if reuses_none else end)


def inherit_model(parent: Run, iteration: int, recipe: R) -> R:
    """`recipe` with the fields that determine its parent's version 0: a derived run begins with these weights.

    Raises UserError: the parent is an evaluation; the recipe is another flow's, or names initial weights that are not
    the parent's.
    """
    _check_has_iterations(parent)
    if parent.record.flow != recipe.flow:
        raise UserError(f"Run {parent.name!r} belongs to the flow {parent.record.flow!r}, not {recipe.flow!r}.")
    own = type(recipe.model).model_validate(parent.recipe_at(iteration)["model"])
    theirs = {name: getattr(own, name) for name in _INITIAL_WEIGHTS}
    asked = {name: getattr(recipe.model, name) for name in _INITIAL_WEIGHTS}
    if asked != theirs and not recipe.model.warm_start:
        changed = ", ".join(f"model.{name}" for name in _INITIAL_WEIGHTS if asked[name] != theirs[name])
        raise UserError(
            f"{changed}: a derived run begins with the initial weights of its parent {parent.name!r}. "
            "For another model start a run of its own."
        )
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=theirs)})


def parent_values(parent: Run, iteration: int) -> dict[str, Any]:
    """The parent's recipe at `iteration`, with the URL of its present store, and the gap bound of `_max_gap`."""
    values = parent.recipe_at(iteration)
    if "max_logprob_gap" in values.get("algorithm", {}):
        values = values | {"algorithm": {**values["algorithm"], "max_logprob_gap": _max_gap(parent, iteration)}}
    if open_store(values["store"]["url"]).url == parent.store.url:
        return values
    return values | {"store": {**values["store"], "url": parent.store.url}}


def _max_gap(run: Run, k: int) -> float:
    """`algorithm.max_logprob_gap` at iteration `k`; the original's if a replay of recorded rollouts has lifted it.

    Runs derived from the replay generate with the weights that they train, so the bound must hold for them.
    """
    origin_run = run.run_of_iteration(k)
    gap = float(origin_run.recipe_at(k)["algorithm"]["max_logprob_gap"])
    original = origin_run.parent if origin_run.record.counterfactual and gap == MAX_LOGPROB_GAP else None
    return gap if original is None else _max_gap(original, k)


def attach_to_parent(parent: Run, derived: str, origin: Origin) -> None:
    """Write a reference into the parent, and check that the files it protects still exist.

    A fork refers to the iterations before it; a replay to every iteration that is committed now.
    """
    store = parent.store
    check_run_kept(store, parent.name)  # it may have been removed since it was read: then nothing of it is there
    committed = check_iteration(parent, origin.iteration)
    loaded = check_first_start(parent, origin)  # before the reference is written
    needed = origin.iteration if origin.kind == "fork" else committed
    existing = write_reference(store, parent.name, derived, needed, origin.kind)
    check_run_kept(store, parent.name)
    needed_commits = commits_needed(origin, existing.iteration)
    commits = parent.commits(needed_commits.start, needed_commits.stop)
    check_all_kept(store, [*loaded, *(ref for commit in commits for ref in commit.stored)])


def write_reference(store: Store, parent: str, derived: str, iteration: int, kind: str) -> Reference:
    """Record, for `gc`, that `derived` needs its parent's history before `iteration`; an existing one may cover more.

    Raises UserError: there is one that covers less, of a derived run of this name that never started.
    """
    record = Reference(
        child=derived, iteration=iteration, attempt=new_attempt(), kind=kind, provenance=make_provenance(0, now())
    )
    existing, _ = commit_once(store, paths.reference(parent, derived), record)
    if existing.iteration < iteration:
        raise UserError(
            f"Run {parent!r} keeps only the iterations before {existing.iteration} for a derived run {derived!r} that "
            f"never started, and this one needs those before {iteration}. Choose another name (run=NAME)."
        )
    store.make_durable(paths.reference(parent, derived))
    return existing


def log_derivation(store: Store, derived: str, origin: Origin, prefect_flow_run_id: str) -> None:
    """Add a line about the new derived run to its own log and its parent's."""
    action = "forked" if origin.kind == "fork" else "replayed"
    details: dict[str, bool | int | float | str] = {"parent": origin.parent, "child": derived, "at": origin.iteration}
    if origin.kind == "replay":
        details |= {"from": origin.replay_from, "counterfactual": origin.counterfactual}
    for run in (origin.parent, derived):
        append_log(store, run, action, details, prefect_flow_run_id=prefect_flow_run_id)


def find_reference(store: Store, parent: str, derived: str) -> Reference | None:
    return find_record(store, paths.reference(parent, derived), Reference)


# ── what the first start of a derived run loads ──────────────────────────────────────────────────────────────────────


_ONCE_PER_RUN: Final = ("initialise", "prompts")  # stages that are built once per run, whose tables every start reads


def check_first_start(parent: Run, origin: Origin) -> list[WeightsRef]:
    """Check everything that the first start of the derived run which `origin` describes loads; returns its weights.

    Weights and checkpoints: existence and size. Tables: `check_file`.

    Raises UserError: a file, which is named, is missing, damaged or written by a newer version; or weights were removed
    on purpose.
    """
    refs: list[WeightsRef] = []
    try:
        refs = loaded_weights(parent, origin)
        check_all_kept(parent.store, refs)
        files = [file for ref in refs for file in read_weights(parent.store, ref).files]
        parallel(lambda file: check_size(parent.store, file), files)
        if refs:  # an engine will be started
            parallel(lambda shard: check_file(parent.store, shard), list(_shards(parent, origin.iteration)))
    except (Unavailable, NewerSchema):  # nothing has to be restored
        raise
    except StoreError as error:
        with suppress(StoreError):
            check_all_kept(parent.store, refs)  # they may have been removed since the first check
        what = f"{error.where} does not exist" if isinstance(error, Missing) else str(error).split(". Restore")[0]
        raise UserError(
            f"No run derived from {parent.name!r} can begin at iteration {origin.iteration}: it would load a missing "
            f"or damaged file: {what}. Restore it from a backup, or begin at another iteration; "
            f"`arealflow audit {parent.name}` lists all damage."
        ) from error
    return refs


def check_all_kept(store: Store, refs: Sequence[WeightsRef]) -> None:
    """UserError if any of these weights and checkpoints were removed on purpose."""
    parallel(lambda ref: check_kept(store, ref), refs)


def loaded_weights(parent: Run, origin: Origin) -> list[WeightsRef]:
    """The weights and the checkpoint in the store that the first start of a derived run loads, each once.

    They are the initial weights; the checkpoint that the trainer begins with; the last weights, which it is compared
    with; and for servers the newest written weights, if the last ones were not written.
    """
    starts = not origin.replay_until and parent.record.flow != "evaluate"  # an engine
    if not starts or not parent.store.exists(parent.commit_path(0)):
        return []
    initial = next((ref for ref in parent.commit(0).stages if ref.stage == "initialise"), None)
    found = [published_weights(parent.store, parent.read_stage(initial))] if initial else []
    if origin.iteration:
        last = parent.commit(origin.iteration - 1)
        served = parent.record.flow == "rlhf" and not origin.counterfactual
        written = newest_written(parent, last) if served else None
        found += [ref for ref in (last.weights, written, last.checkpoint) if ref is not None and ref.written]
    return list({ref.path: ref for ref in found}.values())


def _shards(run: Run, iteration: int) -> Iterator[FileRef]:
    """The shards that every start reads, and those of the iterations since the checkpoint, which are retrained."""
    last = run.commit(max(iteration - 1, 0))
    manifests = [run.read_stage(ref) for ref in last.stages if ref.stage in _ONCE_PER_RUN]
    begin = last.checkpoint.version if last.checkpoint else 0
    for commit in (run.commit(k) for k in range(begin, iteration)):
        for train in (run.read_stage(ref) for ref in commit.stages if ref.stage == "train"):
            yield from train.tables["train_samples"].shards
            manifests += [run.read_manifest(source.path) for source in train.inputs]
    for manifest in manifests:
        yield from files_of(manifest)
