"""The graph is derived from what stages declare; what does not make a graph is refused."""

from __future__ import annotations

import pytest

from areal_tasks.stages.graphs import evaluates, iteration_plan
from areal_tasks.stages.planner import PlanError, plan, writers
from areal_tasks.stages.stage import Inputs, Kind, Output, Stage
from schemas.recipe.load import list_recipes, load_recipe


def nothing(context: object, inputs: Inputs, prefix: str) -> Output:
    raise AssertionError("planning runs nothing")


def stage(name: str, reads: tuple[str, ...] = (), writes: tuple[str, ...] = (), after: tuple[str, ...] = ()) -> Stage:
    return Stage(name, Kind.PURE, 1, nothing, writes=writes, reads=reads, after=after)


ROLLOUT = stage("rollout", writes=("rollout",))
VERIFY = stage("verify", ("rollout.completion",), ("verify",))
REFERENCE = stage("reference", ("rollout.input_ids",), ("reference",))
ADVANTAGE = stage("advantage", ("verify.reward", "rollout.group_id"), ("advantage",))
TRAIN = stage("train", ("advantage.advantages", "rollout.input_ids"), ("train_steps",))


def names(recipe: str, *overrides: str, iteration: int = 1) -> list[str]:
    return [s.name for s in iteration_plan(load_recipe(recipe, overrides), iteration).stages]


def test_what_nobody_reads_is_not_run() -> None:
    found = plan([ROLLOUT, VERIFY, REFERENCE, ADVANTAGE, TRAIN], ["train"])
    assert {s.name for s in found.stages} == {"rollout", "verify", "advantage", "train"}


def test_order_respects_every_read() -> None:
    order = [s.name for s in plan([TRAIN, ADVANTAGE, VERIFY, ROLLOUT], ["train"]).stages]
    assert order == ["rollout", "verify", "advantage", "train"]


def test_a_column_nobody_writes_is_refused() -> None:
    broken = stage("broken", ("rollout.no_such_column",), ("verify",))
    with pytest.raises(PlanError, match=r"'broken' reads 'rollout.no_such_column'"):
        plan([ROLLOUT, broken], ["broken"])


def test_a_table_nobody_writes_is_refused() -> None:
    with pytest.raises(PlanError, match=r"reads 'rollout.completion', which no stage writes"):
        plan([VERIFY], ["verify"])


def test_a_table_written_twice_is_refused() -> None:
    with pytest.raises(PlanError, match="written twice: by 'verify' and by 'other'"):
        writers([VERIFY, stage("other", writes=("verify",))])


def test_a_table_without_schema_is_refused() -> None:
    with pytest.raises(PlanError, match="no schema"):
        writers([stage("odd", writes=("no_such_table",))])


def test_a_circle_is_refused() -> None:
    one = stage("one", ("verify.reward",), ("rollout",))
    two = stage("two", ("rollout.completion",), ("verify",))
    with pytest.raises(PlanError, match=r"in a cycle: .*(one.*two|two.*one)"):
        plan([one, two], ["two"])


def test_independent_stages_share_a_level_as_late_as_possible() -> None:
    late = stage("late", after=("rollout",), writes=("publish",))
    end = stage("end", ("train_steps.loss",), ("evaluate",), after=("late",))
    levels = [
        {s.name for s in level}
        for level in plan([ROLLOUT, VERIFY, ADVANTAGE, TRAIN, late, end], ["end", "late"]).levels()
    ]
    assert levels == [{"rollout"}, {"verify"}, {"advantage"}, {"train", "late"}, {"end"}]


def test_no_kl_no_reference() -> None:
    assert "reference" not in names("quickstart")


@pytest.mark.parametrize(("where", "readers"), [("loss", {"train"}), ("reward", {"advantage", "train"})])
def test_kl_pulls_in_the_reference_which_is_measured_wherever_it_counts(where: str, readers: set[str]) -> None:
    assert readers_of("reference", f"algorithm.kl={where}", "algorithm.kl_coef=0.01") == readers


def readers_of(table: str, *overrides: str) -> set[str]:
    """The stages that read a table; empty where no stage writes it."""
    graph = iteration_plan(load_recipe("quickstart", overrides), 1)
    found = {stage.name for stage in graph.stages if table in stage.inputs}
    assert all(table in graph.waits[name] for name in found)
    return found


ROUNDS = "inference.deterministic=false"  # servers differ from the trainer in rounding
IN_REWARD = ("algorithm.kl=reward", "algorithm.kl_coef=0.01")


@pytest.mark.parametrize(
    ("overrides", "readers"),
    [
        ((*IN_REWARD, ROUNDS, "algorithm.minibatches=1"), {"advantage"}),
        ((*IN_REWARD, ROUNDS, "algorithm.minibatches=2"), {"advantage", "train"}),
        ((*IN_REWARD, "algorithm.minibatches=2"), set()),  # bitwise identical: the servers' logprobs are the trainer's
        ((ROUNDS, "algorithm.minibatches=1"), set()),
        ((ROUNDS, "algorithm.minibatches=2"), {"train"}),
    ],
)
def test_kl_in_the_reward_is_of_the_trainers_logprobs_where_engines_differ(
    overrides: tuple[str, ...], readers: set[str]
) -> None:
    assert readers_of("proximal", *overrides) == readers


def test_evaluation_stands_beside_training_when_due() -> None:
    recipe = load_recipe("quickstart", ["evaluation.every=10"])
    assert [k for k in range(30) if evaluates(recipe, k)] == [0, 10, 20]  # type: ignore[arg-type]
    levels = iteration_plan(recipe, 10).levels()
    assert next({s.name for s in level} for level in levels if "train" in {s.name for s in level}) == {
        "train",
        "evaluate",
    }
    assert "evaluate" not in [s.name for s in iteration_plan(recipe, 11).stages]


@pytest.mark.parametrize("name", list_recipes())
def test_every_shipped_recipe_has_a_graph(name: str) -> None:
    found = names(name, iteration=0)
    assert found[0] == "initialise"
    assert found[-1] in ("publish", "evaluate", "scalars")
