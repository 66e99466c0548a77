"""The changes that a replay allows, and its recipes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from areal_tasks.stages.graphs import iteration_plan
from areal_tasks.stages.planner import Plan
from areal_tasks.stages.replay import STARTS, before, replay_plan, stage_at
from areal_tasks.stages.stage import Stage
from areal_tasks.store.fork import LIFTED_GAP, Origin, find_reference, parent_values
from areal_tasks.store.keys import semantic_values
from areal_tasks.store.runs import Run
from schemas.errors import UserError
from schemas.recipe.load import apply_overrides, parse_recipe
from schemas.recipe.recipe import EvaluateRecipe, Recipe, RlhfRecipe


def replayed_iterations(original: Run, child: str) -> int:
    """The iterations of a replay: those committed when it was created. UserError if there are none."""
    reference = find_reference(original.store, original.name, child)
    head = original.head()
    committed = reference.iteration if reference else 0 if head is None else head.iteration + 1
    if committed == 0:
        raise UserError(f"Run {original.name!r} has not committed any iteration: there is nothing to replay.")
    return committed


def replay_segments(
    original: Run, origin: Origin, committed: int, changes: Sequence[str]
) -> list[tuple[int, Recipe, Recipe]]:
    """For each recipe of the original: its first iteration, the recipe itself, and the recipe of the replay from there.

    The recorded samples may come from other weights than the replay's, so the limit on the logprob gap to the trainer
    is lifted, unless a change sets it. UserError if the original has not committed the iteration to begin at.
    """
    if origin.iteration >= committed:
        raise UserError(
            f"Run {original.name!r} has committed {committed} iterations: replay it at 0 to {committed - 1}, "
            f"not at {origin.iteration}."
        )
    runs = groupby(range(origin.iteration, committed), lambda k: original.segment_at(k).attempt)
    found = []
    for _, iterations in runs:
        first = next(iterations)
        there = parse_recipe(original.recipe_at(first), original.name)
        lifted = _lifted(there) if origin.counterfactual else []
        values = apply_overrides(parent_values(original, first), [*lifted, *changes])
        found.append((first, there, parse_recipe(values, original.name)))
    return found


def _lifted(recipe: Recipe) -> list[str]:
    return [f"algorithm.max_logprob_gap={LIFTED_GAP}"] if isinstance(recipe, RlhfRecipe) else []


def check_replay(original: Run, origin: Origin, there: Recipe, recipe: Recipe) -> None:
    """UserError unless `origin` can be replayed with the changes from the recipe `there` to `recipe`."""
    if there.flow != recipe.flow:
        raise UserError(f"flow={recipe.flow}: a replay of {original.name!r} belongs to its flow {there.flow!r}.")
    if origin.iteration and original.record.replay_until:
        raise UserError(f"Run {original.name!r} trained nothing, so it cannot be continued at {origin.iteration}.")
    graph = _graph(original, origin, recipe)
    changed = [name for name, value in semantic_values(recipe).items() if semantic_values(there).get(name) != value]
    for field in changed:
        if isinstance(recipe, EvaluateRecipe):
            _check_judgement(field, graph)
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
            f"A replay from {origin.replay_from} cannot end with {origin.replay_until}, which comes before."
        )
    return graph


def _check_judgement(field: str, graph: Plan) -> None:
    """UserError if the field affects how an evaluation's completions were generated, which a replay keeps."""
    evaluate = next(stage for stage in graph.stages if stage.name == "evaluate")
    if _reads(evaluate, field) and not field.startswith("reward."):
        raise UserError(
            f"{field} is read by the stage that generated the completions, which this replay keeps as recorded: "
            "run the recipe again with it."
        )


def _check_change(field: str, graph: Plan, origin: Origin, start: str) -> None:
    """UserError if a kept stage reads the field, or no rebuilt stage does."""
    kept = before(graph, start) if origin.counterfactual else [s for s in graph.stages if s.once and not s.reads]
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
