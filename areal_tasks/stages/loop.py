"""The loop over iterations: which stages, in which order, and the commit that ends each iteration.

The caller decides how stages run: `execute` receives those that may run concurrently and returns their results. The
flows run them as Prefect tasks; `run_directly` just calls them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from areal_tasks.engines.session import Engines
from areal_tasks.garbage import rare_collections
from areal_tasks.stages.build import Built, PrefectIds, carried, find_built
from areal_tasks.stages.checkpoint import Checkpoints, restored_weights
from areal_tasks.stages.generation import Generation, groups_of
from areal_tasks.stages.graphs import evaluates, evaluates_at_end, iteration_plan, iterations
from areal_tasks.stages.jobs import Execute, IterationResult, Job, run_directly
from areal_tasks.stages.overlap import Overlap, Results
from areal_tasks.stages.planner import Plan
from areal_tasks.stages.publish import published_late, unwritten
from areal_tasks.stages.stage import Context, Kind, Stage, demonstrations
from areal_tasks.store.changes import Changes
from areal_tasks.store.commit import new_attempt
from areal_tasks.store.history.journal import LogHead, log_head
from areal_tasks.store.parallel import in_background
from areal_tasks.store.provenance import make_provenance, now
from areal_tasks.store.reachable import (
    EVALUATING,
    evaluated_weights,
    newest_written,
    pending_evaluation,
    published_weights,
)
from areal_tasks.store.retention.compact import Compactor
from areal_tasks.store.runs import Run
from schemas.manifest import IterationCommit, StageRef, WeightsRef
from schemas.recipe.recipe import Recipe, RlhfRecipe

log = logging.getLogger(__name__)

UNTRACKED = ("scalars",)  # built with the commit: a task run would cost more than the stage
#: Wait for stages that were begun ahead, before the servers end: the worker kills a flow 7 s after asking it to end.
END_SECONDS: Final = 2.0


@dataclass
class Loop:
    """A run's iterations from the first that is not committed to the last.

    `recipe` is the newest one of the run: changes that `arealflow set` requests replace it. They are in force from the
    iteration after the next, since the next one may have taken its groups.
    """

    run: Run
    recipe: Recipe
    engines: Engines
    execute: Execute = run_directly
    observe: Callable[[IterationResult], None] = field(default=lambda result: None)
    ids: PrefectIds = field(default_factory=PrefectIds)

    def __post_init__(self) -> None:
        self.head = self.run.head()
        self._digest = ""  # of the head, once it is known
        self.last = iterations(self.recipe)  # the run's total number of iterations
        self._log = LogHead()
        self._recipes: dict[int, Recipe] = {}  # by number of their segment
        self._changes = Changes(self.engines.check)
        self.restored: WeightsRef | None = None  # replaces the head's weights
        self.generation: Generation | None = None
        self._overlap = Overlap(self.execute)
        self._checkpoints = Checkpoints()
        self._ahead: Future[tuple[dict[str, Built], list[int]]] | None = None  # its results, and its groups

    @property
    def first(self) -> int:
        """The first iteration that is not committed."""
        return 0 if self.head is None else self.head.iteration + 1

    def plan(self, k: int) -> Plan:
        return iteration_plan(self.recipe_at(k), k)

    def recipe_at(self, k: int) -> Recipe:
        segment = self.run.segment_at(max(k, self.run.first))
        if segment.n not in self._recipes:
            self._recipes[segment.n] = self.run.recipe_of(segment, self.recipe)
        return self._recipes[segment.n]

    def evaluates_at_end(self, k: int) -> bool:
        """Whether the weights that iteration `k` publishes are evaluated before its commit."""
        return evaluates_at_end(self.recipe_at(k), k)

    def __call__(self) -> None:
        """Build and commit all missing iterations. Starts the engines; the caller stops them."""
        if self.first >= self.last:
            return
        self._apply_changes(self.first)
        self.engines.adapt(self.recipe_at(self.first))
        once = self._begin()
        late, missing = self._publish_late(), self._missing_evaluation(once)
        self._begin_overlap(self.first, once, lambda: {**late, **self._labelled(missing)})
        if not self._overlaps(self.first):
            self._overlap.wait()
        with self._generating(), Compactor(self.run, self.recipe.store.compact_every) as compactor, rare_collections():
            for k in range(self.first, self.last):
                started = time.monotonic()
                built = self._iteration(k, once)
                compactor.committed()
                self.observe(IterationResult(k, self.last, built, time.monotonic() - started, self._eta(k)))

    def standing(self) -> tuple[Plan, dict[str, Built]]:
        """The graph of the next iteration, and its stages that are built already. Starts and builds nothing."""
        plan, context = self.plan(self.first), self._context(self.first)
        found: dict[str, Built] = {}
        for stage in plan.stages:
            inputs = {name: found[name] for name in plan.inputs(stage) if name in found}
            if len(inputs) < len(plan.inputs(stage)) or (known := find_built(stage, context, inputs)) is None:
                continue
            found[stage.name] = known
            if stage.name == "initialise" and context.weights_held is None:
                initial = published_weights(self.run.store, known.manifest)
                context = replace(context, weights_held=initial)
        return plan, found

    def hold(self, held: bool) -> None:
        """While `held`, begin only groups that a running stage waits for. May be called from any thread."""
        if self.generation is not None:
            self.generation.hold(held)

    @contextmanager
    def _generating(self) -> Iterator[None]:
        """While inside, samples are generated as iterations need them, or ahead."""
        if isinstance(self.recipe, RlhfRecipe):
            servers = self.engines.servers
            self.generation = Generation(self.run, self.head, self.last - 1, self.recipe_at, servers)
        try:
            yield
        finally:
            if self.generation is not None:
                self.generation.close()
            if self._ahead is not None:  # another error ended the run; a stage that takes groups ends with generation
                wait([self._ahead], END_SECONDS)

    def _begin(self) -> dict[str, Built]:
        """Build what is built once per run. Services start meanwhile, inference servers once there are weights."""
        plan = self.plan(self.first)
        if self._needs_engines(plan):
            self.engines.begin()
        once: dict[str, Built] = {}
        for stage in (s for s in plan.stages if s.once):
            once |= self._level([stage], plan, self._context(self.first), once)
            if stage.name == "initialise":
                self._start_engines(published_weights(self.run.store, once["initialise"].manifest), plan)
        return once

    def _needs_engines(self, plan: Plan) -> bool:
        return True

    def _start_engines(self, initial: WeightsRef, plan: Plan) -> None:
        if not self._needs_engines(plan):
            self.engines.initial = initial
            return
        current = self.head.weights if self.head else initial
        written = newest_written(self.run, self.head) if self.head else None
        self.engines.start(initial, current, written or initial)
        self.restored = restored_weights(self._context(self.first))
        self.engines.load_early((self.restored or current).version)

    def _iteration(self, k: int, once: Mapping[str, Built]) -> dict[str, Built]:
        started, built = now(), dict(once) | self._take_ahead()
        self._apply_changes(k + 1)
        if self.engines.resizes(self.recipe_at(k)):
            self._overlap.wait()  # a publication uses the trainer
        self.engines.adapt(self.recipe_at(k))
        plan, context, overlapped = self.plan(k), self._context(k), self._overlapped_stages(k)
        for level in plan.levels():
            if any(stage.name == "publish" for stage in level):
                built |= self._overlap.take(evaluation=not self._may_evaluate_after(k))
            if any(stage.name == "train" for stage in level):
                self._begin_ahead(k + 1, once, built)
            wanted = [s for s in level if s.name not in built and s.name not in overlapped]
            built |= (new := self._level(wanted, plan, context, built))
            if "rollout" in new:
                self._consume(groups_of(self.run.store, new["rollout"].manifest))
        if self.evaluates_at_end(k):
            built |= self._last_evaluation(context, built)
        if "publish" in overlapped:
            self.engines.actor.keep(built["train"].manifest)  # before another step changes it
        self._commit(context, built, started)
        if "publish" in overlapped:
            publication = self._job("publish", plan, context, built)
            self._begin_overlap(k + 1, once, lambda: self._labelled(publication))
        return built

    def _begin_ahead(self, k: int, once: Mapping[str, Built], built: Mapping[str, Built]) -> None:
        """Begin, in a thread, the stages of iteration `k` that need no trainer. `built`: those of the previous one.

        Nothing is begun if another recipe is in force from `k` on, since servers and workers change before it.
        """
        if k >= self.last or not self._overlaps(k) or self.recipe_at(k) is not self.recipe_at(k - 1):
            return
        plan = self.plan(k)
        context = replace(self._context(k), uncommitted={name: one.ref for name, one in built.items()})

        def work() -> tuple[dict[str, Built], list[int]]:
            """The stages built so far, and the groups that the iteration takes."""
            found = dict(once)
            for level in plan.levels():
                possible = [s for s in level if s.ahead or (s.kind is Kind.PURE and not s.once)]
                ready = [stage for stage in possible if found.keys() >= set(plan.inputs(stage))]
                found |= self._level(ready, plan, context, found)
            return found, groups_of(context.store, found["rollout"].manifest)

        self._ahead = in_background(work, "ahead")

    def _take_ahead(self) -> dict[str, Built]:
        """The next iteration's stages that were begun while the previous one trained. Raises what they raised."""
        work, self._ahead = self._ahead, None
        if work is None:
            return {}
        found, groups = work.result()
        self._consume(groups)
        return found

    def _consume(self, groups: Sequence[int]) -> None:
        """Record that the next iteration has taken these groups; the previous one is committed without them."""
        assert self.generation is not None
        self.generation.consume(groups)

    def _apply_changes(self, first: int) -> None:
        """Apply the pending changes of the recipe from iteration `first` on.

        No iteration may be taking groups, or have taken some that do not count as consumed.
        """
        if first >= self.last:
            return
        run, self.recipe = self._changes.apply(self.run, self.recipe, first)
        if run is not self.run:
            self.run, self._recipes = run, {}
            self.engines.run_has_changed(run)
            if self.generation is not None:
                self.generation.recipes_have_changed(first)

    def _overlaps(self, k: int) -> bool:
        """Whether iteration `k` publishes its weights, and evaluates version `k`, concurrently with other stages."""
        return self._eta(k) > 0

    def _eta(self, k: int) -> int:
        recipe = self.recipe_at(k)
        return recipe.rollout.max_head_offpolicyness if isinstance(recipe, RlhfRecipe) else 0

    def _overlapped_stages(self, k: int) -> frozenset[str]:
        """The stages of iteration `k` for which its others do not wait. The last iteration waits for publication."""
        if not self._overlaps(k):
            return frozenset()
        return frozenset({"evaluate"} if k == self.last - 1 else {"evaluate", "publish"})

    def _begin_overlap(self, k: int, once: Mapping[str, Built], publish: Callable[[], Results]) -> None:
        """Begin `publish`, then the evaluation due in iteration `k`; the commit of `k` or a later one names them."""
        plan, context = self.plan(k), self._context(k)
        due = self._overlaps(k) and any(stage.name == "evaluate" for stage in plan.stages)
        evaluation = self._job("evaluate", plan, context, once) if due else None
        self._overlap.begin(publish, evaluation, self.engines.servers.count > 1)

    def _may_evaluate_after(self, k: int) -> bool:
        """Whether an evaluation may still hold a server after iteration `k`.

        Not if the next iteration evaluates too, or needs all servers: with η = 0, or if servers may leave.
        """
        if k + 1 >= self.last or not self._overlaps(k + 1):
            return False
        before, after = self.recipe_at(k), self.recipe_at(k + 1)
        return before is after and not evaluates(after, k + 1)  # type: ignore[arg-type]

    def _missing_evaluation(self, once: Mapping[str, Built]) -> Job | None:
        """The evaluation that was in progress at the last commit of this run, which no commit names."""
        head, initial = self.head, self.engines.initial
        if head is None or head.run != self.run.name or (k := pending_evaluation(head)) is None or initial is None:
            return None
        weights, held = evaluated_weights(self.run, k, initial)
        if not held.written:
            log.warning("version %d is not evaluated: the store does not have it", k)
            return None
        context = self._context_after(self.run.commit(k - 1) if k else None, self.run.digest_before(k), k)
        return self._job("evaluate", self.plan(k), replace(context, weights_held=weights, held=held), once)

    def _labelled(self, job: Job | None) -> Results:
        """Run a job of an earlier iteration. Its result has its label: this iteration may have such a stage, too."""
        return {} if job is None else {job.label: self.execute([job])[0]}

    def _publish_late(self) -> Results:
        """Publish the weights of the last committed iteration if the flow was killed before it had done so."""
        if (train := self._unpublished()) is None or self.head is None or self.restored is not None:
            return {}
        k, plan = self.head.iteration, self.plan(self.head.iteration)
        context = self._context_after(self.run.commit(k - 1) if k else None, self.run.digest_before(k), k)
        built = Built(f"train {k}", self.run.read_stage(train), train, reused=True)
        return self._labelled(self._job("publish", plan, context, {"train": built}))

    def _unpublished(self) -> StageRef | None:
        """The train stage of the last commit, if no commit names the publication of its weights."""
        if self.head is None:
            return None
        stages = {ref.stage: ref for ref in self.head.stages if ref.stage in ("train", "publish")}
        if "train" not in stages or "publish" not in stages:
            return stages.get("train")
        return stages["train"] if self.run.read_stage(stages["publish"]).iteration < self.head.iteration else None

    def _job(self, name: str, plan: Plan, context: Context, built: Mapping[str, Built]) -> Job:
        stage = next(stage for stage in plan.stages if stage.name == name)
        return Job(stage, context, {name: built[name] for name in plan.inputs(stage)})

    def _level(
        self, stages: Sequence[Stage], plan: Plan, context: Context, built: Mapping[str, Built]
    ) -> dict[str, Built]:
        """Build stages that do not wait for each other."""
        found: dict[str, Built] = {}
        jobs: list[Job] = []
        for stage in stages:
            job = self._job(stage.name, plan, context, built)
            if (known := carried(stage, context, job.inputs)) is not None:
                found[stage.name] = known
            elif stage.name in UNTRACKED:
                found[stage.name] = job.run(self.ids)
            else:
                jobs.append(job)
        done = self.execute(jobs) if jobs else []
        return found | {job.stage.name: result for job, result in zip(jobs, done, strict=True)}

    def _last_evaluation(self, context: Context, built: Mapping[str, Built]) -> Results:
        """Evaluate the weights that the last iteration published; no later iteration would."""
        plan = iteration_plan(context.recipe, 0)  # every run with an evaluation has one in iteration 0
        after = replace(context, weights_held=self._new_weights(context, built))
        return self._labelled(self._job("evaluate", plan, after, built))

    def _commit(self, context: Context, built: Mapping[str, Built], started: str) -> None:
        weights = self._new_weights(context, built)
        checkpoint, seconds = self._checkpoint(context, built)
        self._log = log_head(self.run.store, self.run.name, self._log)
        commit = IterationCommit(
            run=self.run.name,
            iteration=context.iteration,
            attempt=new_attempt(),
            previous=context.previous_digest,
            segment=self.run.segment_at(context.iteration).n,
            stages=tuple(result.ref for result in built.values()),
            weights=weights,
            checkpoint=checkpoint,
            state=self._state(context, seconds),
            restored=self.restored,
            published=published_late(self.run.store, built.values(), context.iteration),
            log=self._log.digest,
            log_records=self._log.lines,
            provenance=make_provenance(self.run.owner, started, prefect_flow_run_id=self.ids.flow_run),
        )
        self.head, self.restored, self._digest = self.run.commit_iteration(commit), None, ""

    def _state(self, context: Context, seconds: float) -> dict[str, Any]:
        """The state in the commit: groups, seconds of training since the checkpoint, the evaluation in progress.

        Also how metrics and weights that were retrained during the iteration compare with the committed ones.
        """
        if context.generation is not None:
            found = context.generation.state()
        else:
            found = {"next_group": context.next_group + demonstrations(context.recipe)}
        found["train_seconds_since_checkpoint"] = seconds
        if (retrained := self.engines.actor.take_retrained()) is not None:
            found["replayed"] = asdict(retrained)
        if (k := self._overlap.evaluating) is not None:
            found[EVALUATING] = k
        return found

    def _checkpoint(self, context: Context, built: Mapping[str, Built]) -> tuple[WeightsRef | None, float]:
        """The newest checkpoint after an iteration, and the seconds of training since its version."""
        following = context.iteration + 1
        needed = self.engines.resizes(self.recipe_at(following))
        return self._checkpoints.after(context, built, needed, last=following == self.last)

    def _new_weights(self, context: Context, built: Mapping[str, Built]) -> WeightsRef:
        """The weights after an iteration, published now or later; the initial ones if nothing is trained."""
        if "train" in built and "publish" not in built:
            return unwritten(built["train"].manifest)
        return published_weights(self.run.store, built["publish" if "publish" in built else "initialise"].manifest)

    def _context(self, k: int) -> Context:
        self._digest = self._digest or self.run.digest_before(self.first)
        return self._context_after(self.head, self._digest, k)

    def _context_after(self, head: IterationCommit | None, digest: str, k: int) -> Context:
        return Context(
            run=self.run,
            recipe=self.recipe_at(k),
            engines=self.engines,
            iteration=k,
            weights_held=self.restored or (head.weights if head else self.engines.initial),
            previous=head,
            previous_digest=digest,
            generation=self.generation,
        )
