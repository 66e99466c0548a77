"""Runs: a name, recipe segments, owners, and the chain of iteration commits."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

from areal_tasks.store import paths
from areal_tasks.store.backend import Missing, Store, StoreError
from areal_tasks.store.changes import changed_fields
from areal_tasks.store.commit import (
    append_record,
    bytes_digest,
    commit_once,
    decode,
    find_record,
    last_number,
    new_attempt,
    read_record,
)
from areal_tasks.store.fork import (
    Origin,
    check_all_kept,
    check_first_start,
    check_iteration,
    commits_needed,
    log_derivation,
    write_reference,
)
from areal_tasks.store.opening import (
    ITERATIONS,
    NAME,
    StoredRun,
    check_name,
    check_same_recipe,
    only_extends,
    read_segments,
    read_stored_run,
    recipe_difference,
)
from areal_tasks.store.parallel import parallel
from areal_tasks.store.provenance import make_provenance, now
from areal_tasks.store.retention.tombstones import check_run_kept
from schemas.errors import UserError
from schemas.manifest import (
    PROMPT_ORDER,
    Change,
    IterationCommit,
    OwnerRecord,
    RunRecord,
    Segment,
    StageManifest,
    StageRef,
)
from schemas.recipe.recipe import BaseRecipe
from schemas.recipe.recorded import read_recorded, value_at, with_values

R = TypeVar("R", bound=BaseRecipe)


class Superseded(UserError):
    """A later start of the run's flow has taken over: this one must stop and write nothing more."""


class HeadMoved(StoreError):
    """An earlier start committed after this one had read the head: this one must start again from that commit."""


@dataclass(frozen=True)
class CommittedStage:
    manifest: StageManifest
    ref: StageRef


@dataclass(frozen=True)
class Run:
    """A run, opened by one start of its flow. `owner` is 0 for a reader; `known` is a commit of this run, if any."""

    store: Store
    name: str
    record: RunRecord
    owner: int
    segments: tuple[Segment, ...]
    known: IterationCommit | None = None

    @cached_property
    def parent(self) -> Run | None:
        """The run this one was forked from."""
        return load_run(self.store, self.record.parent) if self.record.parent else None

    @property
    def label(self) -> str:
        """The name; for a counterfactual replay also the run whose rollouts it has."""
        kept = f" (counterfactual: rollouts of {self.record.parent})" if self.record.counterfactual else ""
        return f"{self.name}{kept}"

    @property
    def first(self) -> int:
        """The first iteration that is this run's own."""
        return self.record.parent_iteration

    def head(self) -> IterationCommit | None:
        """The last commit (of the parent, when this run has none of its own); O(log n) reads and no listing.

        The search begins at `known`, so that a start that has just read it asks once.
        """
        begin = self.known.iteration if self.known else self.first - 1
        last = last_number(self.store, partial(paths.iteration_commit, self.name), begin + 1)
        if self.known is not None and last == begin:
            return self.known
        return self.commit(last) if last >= 0 else None

    @property
    def committed(self) -> int:
        """How many iterations are committed, those of the parent before the fork included."""
        head = self.head()
        return 0 if head is None else head.iteration + 1

    @property
    def planned(self) -> int:
        """The iterations in the newest recipe; 0 if it has no such field."""
        recipe = self.segments[-1].recipe if self.segments else {}
        return int(recipe.get("schedule", {}).get("iterations", 0))

    def run_of_iteration(self, k: int) -> Run:
        """The run that has or will have made iteration `k`: this one, or the run it was forked from."""
        return self.parent.run_of_iteration(k) if k < self.first and self.parent is not None else self

    def commit(self, k: int) -> IterationCommit:
        """The commit of iteration `k`, from the parent where it is not this run's own; else `Missing`."""
        return read_record(self.store, self.commit_path(k), IterationCommit)

    def commit_path(self, k: int) -> str:
        """Path of the commit of iteration `k`: in this run, or in the run it was forked from."""
        return paths.iteration_commit(self.run_of_iteration(k).name, k)

    def digest_before(self, k: int) -> str:
        """`previous` of the commit of iteration `k`: SHA-256 of the bytes of the commit before, for 0 of run.json."""
        return bytes_digest(self.store, self.commit_path(k - 1) if k else paths.run_record(self.name))

    def commit_iteration(self, commit: IterationCommit) -> IterationCommit:
        """Commit an iteration.

        Raises:
            Superseded: a later start of the flow owns the run, or has committed this iteration already.
            HeadMoved: an earlier start, now superseded, committed this iteration while this one was building it.
            ValueError: `commit` does not name the commit before it.
        """
        self.check_owner()
        if commit.previous != self.digest_before(commit.iteration):
            raise ValueError(f"commit of iteration {commit.iteration} does not name the commit before it")
        existing, mine = commit_once(self.store, paths.iteration_commit(self.name, commit.iteration), commit)
        self.store.make_durable(paths.iteration_commit(self.name, commit.iteration))
        if not mine and existing.provenance.owner < self.owner and self.is_current_owner():
            raise HeadMoved(
                f"Iteration {existing.iteration} of run {self.name!r} was committed by an earlier start of it."
            )
        if not mine:
            winner = existing.provenance.owner
            raise _superseded(self.name, f"owner {winner} has committed iteration {commit.iteration}")
        return existing

    def segment_at(self, k: int) -> Segment:
        """The recipe segment in force at iteration `k`."""
        run = self.run_of_iteration(k)
        known = [segment for segment in run.segments if segment.from_iteration <= k]
        if not known:
            raise Missing(self.store.uri(paths.segment(run.name, 0)))
        return known[-1]

    def recipe_at(self, k: int) -> dict[str, Any]:
        """The recipe in force at iteration `k`, as JSON, with the fields that have been added since."""
        return read_recorded(self.segment_at(k).recipe)

    def recipe_of(self, segment: Segment, newest: R) -> R:
        """`newest`, the recipe of this start, as it was during a segment: without the changes that came later."""
        if not (fields := changed_fields(self.segments)):
            return newest
        recorded = read_recorded(segment.recipe)
        return with_values(newest, {path: value_at(recorded, path) for path in [*fields, ITERATIONS]})

    def with_change(self, change: Change, first: int, recipe: BaseRecipe) -> Run:
        """The run with a segment that applies a change from iteration `first` on; `recipe` is the recipe with it.

        A start that is no longer the owner cannot add one that the next owner misses: that one reads the changes after
        it has claimed the run, and before it commits anything.

        Raises Superseded: a later start of the flow owns the run.
        """
        self.check_owner()
        return _with_segment(self, first, recipe, change)

    def find_stage(self, k: int, stage: str, key: str) -> CommittedStage | None:
        """The committed result of a stage under this key: in this run, or in the parent before the fork."""
        path = paths.stage_manifest(self.name, k, stage, key)
        try:
            data = self.store.read(path)
        except Missing:
            return self.parent.find_stage(k, stage, key) if self.parent is not None and k < self.first else None
        manifest = decode(self.store, path, StageManifest, data)
        return CommittedStage(manifest, stage_ref(path, manifest, data))

    def read_stage(self, ref: StageRef) -> StageManifest:
        """The stage manifest that a commit names, whose bytes are verified."""
        return read_record(self.store, ref.path, StageManifest, ref.sha256)

    def read_manifest(self, path: str) -> StageManifest:
        """The stage manifest at `path`, as the `inputs` of another manifest name it."""
        return read_record(self.store, path, StageManifest)

    def is_current_owner(self) -> bool:
        """Whether no later start of the flow has claimed the run."""
        return not self.store.exists(paths.owner(self.name, self.owner + 1))

    def check_owner(self) -> None:
        """Raise `Superseded` unless this start of the flow still owns the run."""
        if self.owner == 0 or not self.is_current_owner():
            raise _superseded(self.name, f"owner {self.owner} is no longer the last")


def open_run(
    store: Store,
    name: str,
    recipe: BaseRecipe,
    *,
    origin: Origin | None = None,
    segments: Sequence[tuple[int, BaseRecipe]] = (),
    prefect_flow_run_id: str = "",
    stored: StoredRun | None = None,
    claims: set[str] | None = None,
) -> Run:
    """Create the run, or continue it from its head, as its next owner.

    The recipe's semantic fields must be the run's own (see `StoredRun.recipe_to_continue`), but it may have more
    iterations (a new segment).

    Args:
        origin: the parent, for a derived run. It is not needed to continue an existing fork.
        segments: for a replay, its recipes with the first iteration of each; the last one is `recipe`.
        stored: what the store holds of the run, if the caller has read it.
        claims: of a caller that may start the run several times: what identifies its starts; this one is added.

    Raises:
        UserError: the name is invalid, the run was removed, or it exists with another recipe, flow or origin; fields
            and remedies are named.
        Superseded: another process has started the run since the last of `claims`.
    """
    stored = stored or read_stored_run(store, name)
    stored.check(recipe, origin)  # before the claim fences off a running start
    record = stored.record
    if record is None:
        record, mine = _create(store, name, recipe, origin)
        if not mine:  # another start has created it meanwhile, perhaps with another recipe or origin
            read_stored_run(store, name).check(recipe, origin)
        elif origin is not None:
            log_derivation(store, name, origin, prefect_flow_run_id)
    owner = _claim(store, name, stored.owner, prefect_flow_run_id, set() if claims is None else claims)
    check_run_kept(store, name)  # a removal that missed this claim left its tombstone before
    run = Run(store, name, record, owner, read_segments(store, name, stored.segments), stored.head)
    for first, part in segments[len(run.segments) :]:
        run = _with_segment(run, first, part)
    while not run.segments or only_extends(recipe_difference(run.segments[-1], recipe)):
        run = _with_segment(run, run.committed if run.segments else run.first, recipe)
    check_same_recipe(run.name, record.flow, recipe, run.segments)  # a concurrent start may have won
    return run


def _superseded(name: str, why: str) -> Superseded:
    return Superseded(
        f"Run {name!r} has been started again since ({why}). "
        "This start stops and nothing is lost: follow the later one."
    )


def load_run(store: Store, name: str) -> Run:
    """An existing run, for reading. UserError when there is none of this name, or it was removed."""
    check_name(name)
    record = find_record(store, paths.run_record(name), RunRecord)
    if record is None:
        raise no_run(store, name)
    return Run(store, name, record, 0, read_segments(store, name))


def no_run(store: Store, name: str) -> UserError:
    """The error for a run that does not exist. UserError at once if it was removed."""
    check_run_kept(store, name)
    known = ", ".join(run_names(store)) or "none"
    return UserError(f"There is no run {name!r} in {store.url}. Runs there: {known}.")


def run_names(store: Store) -> list[str]:
    """The names of all runs of the store, sorted."""
    names = [name for name in store.children("") if NAME.fullmatch(name)]
    return [name for name in names if store.exists(paths.run_record(name))]


def stage_ref(path: str, manifest: StageManifest, data: bytes = b"") -> StageRef:
    """The reference to a stage manifest, of which `data` are the bytes; else it was just written or read back."""
    sha256 = hashlib.sha256(data or manifest.encode()).hexdigest()
    return StageRef(stage=manifest.stage, key=manifest.key, path=path, sha256=sha256, digest=manifest.digest)


def _create(store: Store, name: str, recipe: BaseRecipe, origin: Origin | None) -> tuple[RunRecord, bool]:
    """The record of a new run, and whether this start has created it."""
    parent = _attach_to_parent(store, name, origin) if origin else None
    record = RunRecord(
        run=name,
        flow=recipe.flow,
        seed=recipe.seed,
        attempt=new_attempt(),
        order=parent.record.order if parent else PROMPT_ORDER,
        **(origin.recorded() if origin else {}),
        provenance=make_provenance(0, now()),
    )
    return commit_once(store, paths.run_record(name), record)


def _attach_to_parent(store: Store, derived: str, origin: Origin) -> Run:
    """Write a reference into the parent, check that the files it protects still exist, and return the parent.

    A fork refers to the iterations before it; a replay to every iteration that is committed now.
    """
    parent = load_run(store, origin.parent)
    check_iteration(parent, origin.iteration)
    loaded = check_first_start(parent, origin)  # before the reference is written
    needed = origin.iteration if origin.kind == "fork" else parent.committed
    existing = write_reference(store, origin.parent, derived, needed, origin.kind)
    check_run_kept(store, origin.parent)
    commits = parallel(parent.commit, commits_needed(origin, existing.iteration))
    check_all_kept(store, [*loaded, *(ref for commit in commits for ref in commit.stored)])
    return parent


def _claim(store: Store, name: str, last: int, prefect_flow_run_id: str, claims: set[str]) -> int:
    """Claim the next owner number after `last`, or a later one if others have claimed since, and return it.

    With earlier `claims` of this process the owner before must be one of them. They include claims of unknown outcome.
    """
    restarts = bool(claims)

    def owner(n: int) -> OwnerRecord:
        """The record of this process as the n-th owner."""
        if restarts and n > 1:
            before = read_record(store, paths.owner(name, n - 1), OwnerRecord)
            if before.attempt not in claims:
                raise _superseded(name, f"owner {n - 1} is a process of {before.host}")
        claims.add(attempt := new_attempt())
        return OwnerRecord(
            n=n,
            attempt=attempt,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=now(),
            prefect_flow_run_id=prefect_flow_run_id,
        )

    return append_record(store, partial(paths.owner, name), last + 1, owner).n


def _with_segment(run: Run, first: int, recipe: BaseRecipe, change: Change | None = None) -> Run:
    """The run with one more segment: `recipe` from iteration `first` on, or what another start has written there.

    It is in force no earlier than the segment before it.
    """
    segment = Segment(
        n=len(run.segments),
        from_iteration=max([first, *(segment.from_iteration for segment in run.segments)]),
        attempt=new_attempt(),
        recipe=recipe.model_dump(mode="json"),
        change=change,
        provenance=make_provenance(run.owner, now()),
    )
    existing, _ = commit_once(run.store, paths.segment(run.name, segment.n), segment)
    return replace(run, segments=(*run.segments, existing))
