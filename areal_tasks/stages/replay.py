"""Replays a run from its tables: a derived run rebuilds what a change affects, and references the rest.

A replay keeps the rollouts of the replayed run, although the changed policy would generate others (counterfactual). On
policy, rollouts are rebuilt as well from the first iteration that a change affects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import get_args

from areal_tasks.stages.build import Built
from areal_tasks.stages.checkpoint import since_checkpoint
from areal_tasks.stages.graphs import iteration_plan, stages
from areal_tasks.stages.loop import Loop
from areal_tasks.stages.planner import Plan, plan
from areal_tasks.stages.stage import Context, Kind, Stage
from areal_tasks.store.fork import MAX_LOGPROB_GAP, Origin, ReplayStart, find_reference, origin_of, parent_values
from areal_tasks.store.keys import semantic_values
from areal_tasks.store.reachable import stages_of
from areal_tasks.store.runs import CommittedStage, Run
from schemas.errors import UserError
from schemas.manifest import IterationCommit, StageRef, WeightsRef
from schemas.recipe.load import apply_overrides, parse_recipe
from schemas.recipe.recipe import EvaluateRecipe, Recipe, RlhfRecipe

#: Where a replay may begin, in the order of an iteration.
STARTS = get_args(ReplayStart)
_POLICY = {"policy", "weights"}  # what a stage carries that depends on the weights so far


@dataclass(frozen=True)
class Recorded:
    """One iteration of the run that is replayed, and those of its results that a replay may reuse.

    The stages `kept` are reused whatever their key is now, the stage `rebuilt` is never reused, and any other stage is
    reused if its key is the recorded one.
    """

    run: Run
    commit: IterationCommit
    kept: frozenset[str]
    rebuilt: str

    def predecessors(self, stage: Stage, trained: str) -> Sequence[str]:
        """What the key of the recorded source stage may name as its predecessor: its previous result, or the commit.

        Empty if the recorded result must not be reused. The key of a stage that is built ahead does not cover the
        weights that generated it, so it is reused only while the previous training has the key `trained`, or if this
        replay keeps it whatever the weights.
        """
        k = self.commit.iteration
        if not stage.ahead or not k:
            return [self.commit.previous]
        before = {ref.stage: ref for ref in self.run.commit(k - 1).stages}
        if stage.name not in self.kept and before["train"].key != trained:
            return []
        return [before[stage.name].sha256, self.commit.previous]

    def rejudged(self) -> CommittedStage | None:
        """The recorded evaluation, if the replay verifies its completions again."""
        return self._named("evaluate", lambda ref: True) if self.rebuilt == "evaluate" else None

    def find(self, stage: str, key: str) -> CommittedStage | None:
        """The recorded result to reuse for this stage and key."""
        if stage == self.rebuilt:
            return None
        return self._named(stage, lambda ref: ref.key == key or stage in self.kept)

    def _named(self, stage: str, fits: Callable[[StageRef], bool]) -> CommittedStage | None:
        ref = next((r for r in stages_of(self.run, self.commit) if r.stage == stage and fits(r)), None)
        return None if ref is None else CommittedStage(self.run.read_stage(ref), ref)


def stage_at(recipe: Recipe, name: str) -> str:
    """The stage that corresponds to `verify`, `advantage` or `train`: in an evaluation, `evaluate` verifies."""
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
    found = set(graph.waits[stage])
    for earlier in reversed(graph.stages):
        if earlier.name in found:
            found |= graph.waits[earlier.name]
    return [s for s in graph.stages if s.name in found]


def kept_stages(graph: Plan, origin: Origin, start: str) -> list[Stage]:
    """The stages whose recorded results a replay keeps, although a change may affect them.

    On policy, only those that a run begins with. Otherwise all before `start`, the first stage that is rebuilt: the
    rollouts, although other weights would generate others, and all stages computed from them.
    """
    return before(graph, start) if origin.counterfactual else [s for s in graph.stages if s.once and not s.reads]


def loop_of(run: Run) -> type[Loop]:
    """The class that builds the iterations of this run."""
    return Replay if run.record.kind == "replay" else Loop


@dataclass
class Replay(Loop):
    """The iterations of a derived run, which rebuilds those that its parent had committed when it was created."""

    def __post_init__(self) -> None:
        super().__post_init__()
        origin, parent = origin_of(self.run.record), self.run.parent
        assert origin is not None and parent is not None, "a replay is a derived run"
        self.origin, self.original = origin, parent
        reference = find_reference(parent.store, parent.name, self.run.name)
        assert reference is not None, "a derived run writes its reference before it begins"
        self.last = reference.iteration

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

    def _needs_engines(self, plan: Plan) -> bool:
        return any(stage.kind in (Kind.INFERENCE, Kind.TRAIN_STEP) for stage in plan.stages)

    def _context(self, k: int) -> Context:
        start = stage_at(self.recipe_at(k), self.origin.replay_from)
        kept = kept_stages(self.plan(k), self.origin, start)
        unchanged = (s for s in kept if s.source or self.origin.replay_until or not _POLICY & set(s.carries))
        names = frozenset(stage.name for stage in unchanged)
        recorded = Recorded(self.original, self.original.commit(k), names, start)
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


# ── the changes that a replay allows, and its recipes ────────────────────────────────────────────────────────────────


def replay_segments(original: Run, origin: Origin, name: str, changes: Sequence[str]) -> list[tuple[int, Recipe]]:
    """For each recipe of the original: its first iteration, and the recipe of the replay `name` from there on.

    A replay has the iterations that were committed when it was created. The recorded samples may come from other
    weights than the replay's, so the limit on the train-inference mismatch is lifted, unless a change sets it.

    Raises UserError: the original has not committed the iteration to begin at, or the replay does not allow the
    changes.
    """
    reference = find_reference(original.store, original.name, name)
    committed = reference.iteration if reference else original.committed
    if committed == 0:
        raise UserError(f"Run {original.name!r} has not committed any iteration: there is nothing to replay.")
    if origin.iteration >= committed:
        raise UserError(
            f"Run {original.name!r} has committed {committed} iterations: replay it at 0 to {committed - 1}, "
            f"not at {origin.iteration}."
        )
    found = list[tuple[int, Recipe]]()
    same = groupby(range(origin.iteration, committed), lambda k: original.segment_at(k).attempt)
    for first in (next(iterations) for _, iterations in same):
        there = parse_recipe(original.recipe_at(first), original.name)
        lifts = origin.counterfactual and isinstance(there, RlhfRecipe)
        lifted = [f"algorithm.max_logprob_gap={MAX_LOGPROB_GAP}"] if lifts else []
        recipe = parse_recipe(apply_overrides(parent_values(original, first), lifted), original.name, changes)
        _check_replay(original, origin, there, recipe)
        found.append((first, recipe))
    return found


def _check_replay(original: Run, origin: Origin, there: Recipe, recipe: Recipe) -> None:
    """UserError unless `origin` can be replayed with the changes from the recipe `there` to `recipe`."""
    if there.flow != recipe.flow:
        raise UserError(f"flow={recipe.flow}: a replay of {original.name!r} belongs to its flow {there.flow!r}.")
    if origin.iteration and original.record.replay_until:
        raise UserError(f"Run {original.name!r} trained nothing, so it cannot be continued at {origin.iteration}.")
    graph = _graph(original, origin, recipe)
    changed = [name for name, value in semantic_values(recipe).items() if semantic_values(there).get(name) != value]
    for field in changed:
        generates = isinstance(recipe, EvaluateRecipe) and not field.startswith("reward.")
        if generates and any(stage.name == "evaluate" and _reads(stage, field) for stage in graph.stages):
            raise UserError(
                f"{field} is read by the stage that generated the completions, which this replay keeps as recorded: "
                "start another run with it."
            )
        _check_change(field, graph, origin, stage_at(recipe, origin.replay_from))


def _graph(original: Run, origin: Origin, recipe: Recipe) -> Plan:
    """The graph of the replay. UserError if its first or last stage is not part of it."""
    names = [stage.name for stage in iteration_plan(recipe, 0).stages]
    known = [name for name in STARTS if stage_at(recipe, name) in names]
    for name in filter(None, (origin.replay_from, origin.replay_until)):
        if name not in known:
            raise UserError(
                f"Run {original.name!r} has no stage {name!r} to replay from: replay it from {', '.join(known)}."
            )
    if isinstance(recipe, EvaluateRecipe) and not origin.counterfactual:
        raise UserError(
            f"--on-policy: the weights that {original.name!r} has evaluated are still the same, so nothing would be "
            "generated again: replay it without, or run its recipe again, with changes."
        )
    graph = replay_plan(recipe, origin, 0)
    if stage_at(recipe, origin.replay_from) not in [stage.name for stage in graph.stages]:
        raise UserError(
            f"A replay from {origin.replay_from} cannot end with {origin.replay_until}, which comes before: "
            "name an earlier stage with --from, or a later one with --until."
        )
    return graph


def _check_change(field: str, graph: Plan, origin: Origin, start: str) -> None:
    """UserError if a kept stage reads the field, or no rebuilt stage does."""
    kept = kept_stages(graph, origin, start)
    readers = [stage.name for stage in graph.stages if _reads(stage, field)]
    for stage in kept:
        filters = stage.source and field.startswith("reward.")  # the groups that they kept stay, and are verified again
        if field == "seed" or (stage.name in readers and not filters):
            raise UserError(f"{field} is read by {stage.name}, which this replay keeps as recorded: {_remedy(stage)}.")
    if field != "seed" and not readers:
        last = f" until {origin.replay_until}" if origin.replay_until else ""
        where = f"a replay from {origin.replay_from}{last}"
        raise UserError(f"{field} changes nothing in {where}: no stage of it reads that field.")


def _reads(stage: Stage, field: str) -> bool:
    return any(field == name or field.startswith(f"{name}.") for name in stage.fields)


def _remedy(stage: Stage) -> str:
    if stage.name in STARTS:
        return f"replay --from {stage.name}"
    if stage.once:
        return "begin another run"
    return "add --on-policy, which generates again, or fork the run"
