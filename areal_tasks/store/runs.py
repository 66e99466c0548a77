"""Runs: a name, recipe segments, owners, and the chain of iteration commits."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Final, TypeVar

from areal_tasks.store import paths
from areal_tasks.store.backend import Missing, Store, StoreError, damaged
from areal_tasks.store.changes import changed_fields
from areal_tasks.store.commit import (
    checked_last_number,
    commit_once,
    decode,
    every_record,
    find_record,
    last_number,
    missing_before,
    new_attempt,
    read_record,
    read_with_digest,
)
from areal_tasks.store.parallel import parallel
from areal_tasks.store.provenance import make_provenance, now
from areal_tasks.store.retention.tombstones import check_run_kept
from schemas.errors import UserError
from schemas.manifest import Change, IterationCommit, RunRecord, Segment, StageManifest, StageRef
from schemas.recipe.recipe import BaseRecipe
from schemas.recipe.recorded import read_recorded, value_at, with_values

R = TypeVar("R", bound=BaseRecipe)

NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]*")
ITERATIONS: Final = "schedule.iterations"


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
    """A run, opened by one start of its flow. `owner` is 0 for a reader.

    What has been read already: `known`, a commit of this run, and `known_parent`.
    """

    store: Store
    name: str
    record: RunRecord
    owner: int
    segments: tuple[Segment, ...]
    known: IterationCommit | None = None
    known_parent: Run | None = None

    @cached_property
    def parent(self) -> Run | None:
        """The run this one was forked from."""
        if self.known_parent is not None:
            return self.known_parent
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
        """The last commit (of the parent, when this run has none of its own)."""
        last = self.committed - 1
        if self.known is not None and last == self.known.iteration:
            return self.known
        return self.commit(last) if last >= 0 else None

    @property
    def committed(self) -> int:
        """How many iterations are committed, those of the parent before the fork included.

        O(log n) requests and no listing; the search begins at `known`, so that a start that has just read it asks once.
        """
        begin = self.known.iteration + 1 if self.known else self.first
        return last_number(self.store, partial(paths.iteration_commit, self.name), begin) + 1

    def checked_committed(self) -> int:
        """As `committed`, for readers of a history: one listing and one read more.

        Raises StoreError: a commit is missing before the last one, or the segment that this one names.
        """
        last = checked_last_number(self.store, partial(paths.iteration_commit, self.name), self.first)
        if last >= self.first:
            check_segment(self.store, self.commit(last), self.segments)
        return last + 1

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
        return read_commit(self.store, self.run_of_iteration(k).name, k)[0]

    def commits(self, first: int, stop: int) -> list[IterationCommit]:
        """The commits of the iterations `first` to `stop` - 1, each of which has the digest of the one before it.

        Raises StoreError: one is missing, damaged or replaced; the file is named.
        """
        if first >= stop:
            return []
        try:
            before = self.digest_before(first)
            read = parallel(lambda k: read_commit(self.store, self.run_of_iteration(k).name, k), range(first, stop))
        except Missing as error:
            raise missing_before(error.where) from error
        for commit, digest in read:
            check_follows(self.store, self.commit_path(commit.iteration), commit, before)
            before = digest
        return [commit for commit, _ in read]

    def commit_path(self, k: int) -> str:
        """Path of the commit of iteration `k`: in this run, or in the run it was forked from."""
        return paths.iteration_commit(self.run_of_iteration(k).name, k)

    def digest_before(self, k: int) -> str:
        """`previous` of the commit of iteration `k`: SHA-256 of the bytes of the commit before, for 0 of run.json."""
        run = self.run_of_iteration(max(k - 1, 0)).name
        return read_commit(self.store, run, k - 1)[1] if k else run_digest(self.store, run)

    def commit_iteration(self, commit: IterationCommit) -> IterationCommit:
        """Commit an iteration.

        Raises:
            Superseded: a later start of the flow owns the run, or has committed this iteration already.
            HeadMoved: an earlier start, now superseded, committed this iteration while this one was building it.
            StoreError: what is committed there does not follow the commit before it.
            ValueError: `commit` does not name the commit before it.
        """
        self.check_owner()
        if commit.previous != self.digest_before(commit.iteration):
            raise ValueError(f"commit of iteration {commit.iteration} does not name the commit before it")
        path = paths.iteration_commit(self.name, commit.iteration)
        existing, mine = commit_once(self.store, path, commit)
        check_follows(self.store, path, existing, commit.previous)
        self.store.make_durable(path)
        if not mine and existing.provenance.owner < self.owner and self.is_current_owner():
            raise HeadMoved(
                f"Iteration {existing.iteration} of run {self.name!r} was committed by an earlier start of it."
            )
        if not mine:
            winner = existing.provenance.owner
            raise superseded(self.name, f"owner {winner} has committed iteration {commit.iteration}")
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
        return self.with_segment(first, recipe, change)

    def with_segment(self, first: int, recipe: BaseRecipe, change: Change | None = None) -> Run:
        """The run with one more segment: `recipe` from iteration `first` on, or what another start has written there.

        It is in force no earlier than the segment before it.
        """
        segment = Segment(
            n=len(self.segments),
            from_iteration=max([first, *(segment.from_iteration for segment in self.segments)]),
            attempt=new_attempt(),
            recipe=recipe.model_dump(mode="json"),
            change=change,
            provenance=make_provenance(self.owner, now()),
        )
        existing, _ = commit_once(self.store, paths.segment(self.name, segment.n), segment)
        return replace(self, segments=(*self.segments, existing))

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
            raise superseded(self.name, f"owner {self.owner} is no longer the last")


def read_commit(store: Store, run: str, k: int) -> tuple[IterationCommit, str]:
    """The commit of iteration `k` of `run`, and the SHA-256 of its bytes, in hex.

    Raises:
        Missing: there is none.
        StoreError: the file is damaged, or is the commit of another iteration or run.
    """
    path = paths.iteration_commit(run, k)
    commit, digest = read_with_digest(store, path, IterationCommit)
    if (commit.run, commit.iteration) != (run, k):
        raise damaged(store, path, f"it is the commit of iteration {commit.iteration} of run {commit.run!r}")
    return commit, digest


def run_digest(store: Store, run: str) -> str:
    """SHA-256 of the bytes of `run.json`, which the commit of a run's iteration 0 names."""
    return read_with_digest(store, paths.run_record(run), RunRecord)[1]


def check_follows(store: Store, path: str, commit: IterationCommit, previous: str) -> None:
    """StoreError unless the commit at `path` names the digest of the commit before, or of `run.json`: `previous`."""
    if commit.previous != previous:
        raise damaged(store, path, "it, or what it follows, was replaced: it records another digest of that")


def check_segment(store: Store, commit: IterationCommit, segments: Sequence[Segment]) -> None:
    """StoreError if the recipe segment of a commit is missing: it is not among `segments`, nor written since."""
    following = paths.segment(commit.run, len(segments))
    if commit.segment >= len(segments) and not store.exists(following):
        raise missing_before(store.uri(following))


def superseded(name: str, why: str) -> Superseded:
    """The error of a start of the run that has been taken over, as `why` says."""
    return Superseded(
        f"Run {name!r} has been started again since ({why}). "
        "This start stops and nothing is lost: follow the later one."
    )


def check_name(name: str) -> None:
    """UserError unless `name` can be a run's name."""
    if not NAME.fullmatch(name):
        raise UserError(f"{name!r} cannot name a run: use lower-case letters, digits, '.', '_' and '-' (run=NAME).")


def load_run(store: Store, name: str) -> Run:
    """An existing run, for reading. UserError when there is none of this name, or it was removed."""
    check_name(name)
    record = find_record(store, paths.run_record(name), RunRecord)
    if record is None:
        raise no_run(store, name)
    return Run(store, name, record, 0, read_segments(store, name))


def read_segments(store: Store, run: str, known: tuple[Segment, ...] = ()) -> tuple[Segment, ...]:
    """All segments of a run, in order, of which the first are `known`; StoreError if one is missing before the last."""
    return (*known, *every_record(store, partial(paths.segment, run), len(known), Segment))


def check_begun(store: Store, name: str) -> None:
    """StoreError if a run without `run.json` had begun, so that this file is missing."""
    if has_begun(store, name):
        raise missing_before(store.uri(paths.run_record(name)))


def has_begun(store: Store, name: str) -> bool:
    """Whether there are records that a run writes after its `run.json`."""
    return any(store.exists(path) for path in (paths.owner(name, 1), paths.segment(name, 0)))


def no_run(store: Store, name: str) -> UserError:
    """The error for a run that does not exist. UserError at once if it was removed, or its `run.json` is missing."""
    check_run_kept(store, name)
    check_begun(store, name)
    known = ", ".join(run_names(store)) or "none"
    return UserError(f"There is no run {name!r} in {store.url}. Runs there: {known}.")


def run_names(store: Store) -> list[str]:
    """The names of all runs of the store, sorted; also of one whose `run.json` is missing, which `load_run` refuses."""

    def is_run(name: str) -> bool:
        if store.exists(paths.run_record(name)):
            return True
        return has_begun(store, name) and not store.exists(paths.run_tombstone(name))

    return [name for name in store.children("") if NAME.fullmatch(name) and is_run(name)]


def stage_ref(path: str, manifest: StageManifest, data: bytes = b"") -> StageRef:
    """The reference to a stage manifest, of which `data` are the bytes; else it was just written or read back."""
    sha256 = hashlib.sha256(data or manifest.encode(path)).hexdigest()
    return StageRef(stage=manifest.stage, key=manifest.key, path=path, sha256=sha256, digest=manifest.digest)
