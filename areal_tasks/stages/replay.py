"""Replays a run from its tables: a child run rebuilds what a change affects, and references the rest.

A replay keeps the rollouts of the replayed run, although the changed policy would generate others (counterfactual). On
policy, rollouts are rebuilt as well from the first iteration that a change affects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from areal_tasks.stages.build import Built
from areal_tasks.stages.checkpoint import since_checkpoint
from areal_tasks.stages.context import Context
from areal_tasks.stages.graphs import iteration_plan, stages
from areal_tasks.stages.loop import Loop
from areal_tasks.stages.planner import Plan, plan
from areal_tasks.stages.stage import Kind, Stage
from areal_tasks.store.fork import Origin, find_reference, origin_of
from areal_tasks.store.runs import Found, Run
from schemas.manifest import IterationCommit, StageRef, WeightsRef
from schemas.recipe.load import parse_recipe
from schemas.recipe.recipe import EvaluateRecipe, Recipe, RlhfRecipe

#: Where a replay may begin, in the order of an iteration.
STARTS = ("verify", "advantage", "train")
_POLICY = {"policy", "weights"}  # what a stage carries that depends on the weights so far


@dataclass(frozen=True)
class Recorded:
    """One iteration of the run that is replayed, and which of its results a replay may reuse.

    The stages `kept` are reused whatever their key is now, the stage `rebuilt` is never reused, and any other stage is
    reused if its key is the recorded one.
    """

    run: Run
    commit: IterationCommit
    kept: frozenset[str]
    rebuilt: str

    @property
    def previous_digest(self) -> str:
        """Digest of the commit that precedes the recorded one."""
        return self.commit.previous

    def rejudged(self) -> Found | None:
        """The recorded evaluation, if the replay verifies its completions again."""
        if self.rebuilt != "evaluate":
            return None
        ref = next(ref for ref in self.commit.stages if ref.stage == "evaluate")
        return Found(self.run.read_stage(ref), ref)

    def find(self, stage: str, key: str) -> Found | None:
        """The recorded result to reuse for this stage and key."""
        if stage == self.rebuilt:
            return None
        fitting = (r for r in self.commit.stages if r.stage == stage and (r.key == key or stage in self.kept))
        ref = next(fitting, None)
        return None if ref is None else Found(self.run.read_stage(ref), ref)


def stage_at(recipe: Recipe, name: str) -> str:
    """The stage for `verify`, `advantage` or `train`: in an evaluation, stage `evaluate` does the verifying."""
    return "evaluate" if isinstance(recipe, EvaluateRecipe) and name == "verify" else name


def replay_plan(recipe: Recipe, origin: Origin, k: int) -> Plan:
    """The graph of a replayed iteration. A counterfactual replay has no servers, so it evaluates nothing."""
    if origin.replay_until:
        return plan(stages(recipe), [stage_at(recipe, origin.replay_until)])
    if origin.counterfactual and not isinstance(recipe, EvaluateRecipe):
        return plan(stages(recipe), ["publish", *(["scalars"] if isinstance(recipe, RlhfRecipe) else [])])
    return iteration_plan(recipe, k)


def before(graph: Plan, stage: str) -> list[Stage]:
    """Every stage that `stage` waits for, however far back, in order. KeyError if the graph has no such stage."""
    found: set[str] = set()
    queue = list(graph.waits[stage])
    while queue:
        name = queue.pop()
        if name not in found:
            found.add(name)
            queue += graph.waits[name]
    return [s for s in graph.stages if s.name in found]


def kept_stages(graph: Plan, origin: Origin, start: str) -> frozenset[str]:
    """The stages whose recorded results are kept, whatever their keys are now.

    On policy, only those that a run begins with. Otherwise all before `start`, the first stage that is rebuilt: the
    rollouts, although other weights would generate others, and all stages computed from them, except those that depend
    on weights that are trained again.
    """
    if not origin.counterfactual:
        return frozenset(s.name for s in graph.stages if s.once and not s.reads)
    earlier = before(graph, start)
    return frozenset(s.name for s in earlier if s.source or origin.replay_until or not _POLICY & set(s.carries))


def loop_of(run: Run) -> type[Loop]:
    """The class that builds the iterations of this run."""
    return Replay if run.record.kind == "replay" else Loop


def needs_trainer(graph: Plan) -> bool:
    """Whether any stage of the graph uses the trainer."""
    return any(stage.kind in (Kind.INFERENCE, Kind.TRAIN_STEP) for stage in graph.stages)


@dataclass
class Replay(Loop):
    """The iterations of a child run that rebuilds those that its parent had committed when it was created."""

    def __post_init__(self) -> None:
        super().__post_init__()
        origin, parent = origin_of(self.run.record), self.run.parent
        assert origin is not None and parent is not None, "a replay is a child"
        self.origin, self.original = origin, parent

    @property
    def last(self) -> int:
        reference = find_reference(self.run.store, self.original.name, self.run.name)
        assert reference is not None, "a child leaves its reference before it begins"
        return reference.iteration

    def plan(self, k: int) -> Plan:
        return replay_plan(self.recipe_at(k), self.origin, k)

    def recipe_at(self, k: int) -> Recipe:
        """The original's recipe of iteration `k` with the changes; the original may have been extended since."""
        return parse_recipe(self.run.recipe_at(k), self.run.name)

    def evaluates_at_end(self, k: int) -> bool:
        return not self.origin.counterfactual and super().evaluates_at_end(k)

    def _overlaps(self, k: int) -> bool:
        return False

    def _unpublished(self) -> StageRef | None:
        """None: weights that the original published are not published again."""
        return None

    def _begin_engines(self) -> None:
        if needs_trainer(self.plan(self.first)):
            super()._begin_engines()

    def _start_engines(self, initial: WeightsRef) -> None:
        if needs_trainer(self.plan(self.first)):
            super()._start_engines(initial)
        else:
            self.engines.initial = initial

    def _context(self, k: int) -> Context:
        start = stage_at(self.recipe_at(k), self.origin.replay_from)
        kept = kept_stages(self.plan(k), self.origin, start)
        recorded = Recorded(self.original, self.original.commit(k), kept, start)
        return replace(super()._context(k), recorded=recorded)

    def _new_weights(self, context: Context, built: Mapping[str, Built]) -> WeightsRef:
        """If nothing is trained, those of the original."""
        if self.origin.replay_until and context.recorded is not None:
            return context.recorded.commit.weights
        return super()._new_weights(context, built)

    def _checkpoint(self, context: Context, built: Mapping[str, Built]) -> tuple[WeightsRef | None, float]:
        """If nothing was trained again, that of the original: both have the same policy."""
        train = built.get("train")
        if context.recorded is not None and (train is None or train.recorded(context)):
            return context.recorded.commit.checkpoint, since_checkpoint(context.recorded.commit)
        return super()._checkpoint(context, built)
