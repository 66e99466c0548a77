"""Replays: only what a change reaches is rebuilt, from the recorded rollouts unless the recipe says otherwise."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from replays import kept, replay, segments, without_engines
from stage_driver import digests, drive, finished, start_driver, store_in, tiny, tiny_sft
from store_listing import listed

from areal_tasks.engines.session import Engines
from areal_tasks.stages.replay import loop_of
from areal_tasks.store import paths
from areal_tasks.store.fork import Origin, check_iteration, parent_values
from areal_tasks.store.history.diff_curves import compare_replay
from areal_tasks.store.history.journal import append_log
from areal_tasks.store.opening import open_run
from areal_tasks.store.query import run_sql
from areal_tasks.store.retention.gc import RetentionRule
from areal_tasks.store.retention.gc import plan_removals as plan_gc
from areal_tasks.store.retention.gc_remove import plan_run_removal, remove_run
from areal_tasks.store.retention.gc_remove import remove_planned as execute_gc
from areal_tasks.store.run_list import list_runs
from areal_tasks.store.runs import Run, load_run
from schemas.errors import UserError
from schemas.recipe.load import parse_recipe

ITERATION = ["initialise", "prompts", "rollout", "verify", "reference", "advantage", "train", "publish", "scalars"]
TRAINED = {"train", "publish", "scalars"}
ON_POLICY = Origin("whole", 0, "replay", False, "train")
LR = "trainer.lr=0.003"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose store holds the run `whole`, and `lr`, its replay with another learning rate."""
    folder = tmp_path_factory.mktemp("whole")
    finished(folder, "whole", tiny())
    replay(folder, "lr", kept("train"), LR)
    return folder


def made_by(folder: Path, name: str, k: int) -> set[str]:
    """The stages of an iteration that the run has made itself."""
    return {ref.stage for ref in load_run(store_in(folder), name).commit(k).stages if ref.path.startswith(f"{name}/")}


def without_evaluations(folder: Path, name: str) -> list[list[tuple[str, str]]]:
    return [[pair for pair in iteration if pair[0] != "evaluate"] for iteration in digests(folder, name)]


def services(folder: Path, name: str) -> set[str]:
    return {path.split("/")[-1] for path in listed(store_in(folder), f"{name}/services")}


def test_another_learning_rate_trains_on_the_recorded_rollouts(whole: Path) -> None:
    run = load_run(store_in(whole), "lr")
    for k in range(3):
        assert sorted(ref.stage for ref in run.commit(k).stages) == sorted(ITERATION)
        assert made_by(whole, "lr", k) == TRAINED
    weights = {dict(iteration)["weights"] for iteration in digests(whole, "lr")}
    assert len(weights) == 3 and not weights & {dict(iteration)["weights"] for iteration in digests(whole, "whole")}
    assert services(whole, "lr") == {"trainer-0.json"}


def test_its_rollouts_are_marked_as_another_policys(whole: Path) -> None:
    [summary] = [s for s in list_runs(store_in(whole)) if s.name == "lr"]
    assert (summary.kind, summary.parent, summary.forked_at, summary.counterfactual) == ("replay", "whole", 0, True)
    assert load_run(store_in(whole), "lr").label == "lr (counterfactual: rollouts of whole)"


def test_what_comes_out_as_before_is_where_a_replay_stops(whole: Path) -> None:
    """Nothing is changed, one stage is rebuilt, and what follows finds the original's own results."""
    for start in ("verify", "train"):
        replay(whole, f"again-{start}", kept(start))
        assert [made_by(whole, f"again-{start}", k) for k in range(3)] == [{start}] * 3
        assert digests(whole, f"again-{start}") == without_evaluations(whole, "whole")
    parents = [load_run(store_in(whole), "whole").commit(k).checkpoint for k in range(3)]
    assert [load_run(store_in(whole), "again-verify").commit(k).checkpoint for k in range(3)] == parents


def test_another_normalisation(whole: Path) -> None:
    replay(whole, "norm", kept("advantage"), "algorithm.reward_norm=mean")
    assert made_by(whole, "norm", 0) == {"advantage", *TRAINED}


def test_another_verifier_without_training_needs_no_engine(whole: Path) -> None:
    origin = kept("verify", until="advantage")
    replay(whole, "judged", origin, "reward.verifier=exact", execute=without_engines)
    assert made_by(whole, "judged", 2) == {"verify", "advantage"}
    there, here = (load_run(store_in(whole), name).commit(2).weights for name in ("whole", "judged"))
    assert there == here
    replay(whole, "trained", kept("train", original="judged"))
    replay(whole, "at-once", kept("verify"), "reward.verifier=exact")
    assert digests(whole, "trained") == digests(whole, "at-once")


def test_what_trained_nothing_is_not_forked(whole: Path) -> None:
    """But where it begins: what comes before is another run's, which did train."""
    replay(whole, "untrained", kept("verify", at=1, until="advantage"))
    before = listed(store_in(whole), "")
    for name, origin in (("no", Origin("untrained", 2)), ("no", kept("train", "untrained", 2))):
        with pytest.raises(UserError, match=r"'untrained' is a replay that ends with advantage .* or fork 'whole'"):
            open_run(store_in(whole), name, tiny(), origin=origin)
    assert listed(store_in(whole), "") == before
    drive(whole, "of-untrained", tiny(), origin=Origin("untrained", 1))
    assert digests(whole, "of-untrained") == digests(whole, "whole")
    with pytest.raises(UserError, match="'untrained' is a replay that ends with advantage"):
        check_iteration(load_run(store_in(whole), "untrained"), 3)


def test_a_later_start_shares_what_comes_before(whole: Path) -> None:
    run = replay(whole, "later", kept("train", at=2), LR)
    assert [run.commit(k).run for k in range(3)] == ["whole", "whole", "later"]
    forked = drive(whole, "forked", tiny(trainer={"lr": 0.003}), origin=Origin("whole", 2))
    assert dict(digests(whole, "later")[2])["weights"] == dict(digests(whole, "forked")[2])["weights"]
    assert forked.commit(2).run == "forked"


def test_on_policy_generates_anew_as_soon_as_weights_differ(whole: Path) -> None:
    """As a run that had been begun with the change, but for what the two have in common."""
    replay(whole, "on-policy", ON_POLICY, LR)
    drive(whole, "afresh", tiny(trainer={"lr": 0.003}))
    assert digests(whole, "on-policy") == digests(whole, "afresh")
    assert [made_by(whole, "on-policy", k) & {"rollout"} for k in range(3)] == [set(), {"rollout"}, {"rollout"}]
    assert made_by(whole, "on-policy", 0) == TRAINED
    assert not load_run(store_in(whole), "on-policy").record.counterfactual


@pytest.mark.slow("two asynchronous runs; the same of synchronous ones is in `make test`")
def test_on_policy_an_asynchronous_run_is_generated_anew_once_weights_differ(tmp_path: Path) -> None:
    recipe = tiny(rollout={"max_head_offpolicyness": 1}, algorithm={"max_logprob_gap": 9.0})
    finished(tmp_path, "whole", recipe)
    replay(tmp_path, "on-policy", ON_POLICY, LR)
    replay(tmp_path, "same", ON_POLICY, "trainer.lr=0.01")
    assert [made_by(tmp_path, "on-policy", k) & {"rollout"} for k in range(3)] == [set(), {"rollout"}, {"rollout"}]
    assert "rollout" not in made_by(tmp_path, "same", 1), "the weights are still the same"


def test_killed_at_any_write_a_replay_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """One of three kinds each time: with a trainer, with servers, with neither."""
    origin, highest = random.choice([(kept("train"), 30), (ON_POLICY, 45), (kept("verify", until="advantage"), 16)])
    change = "reward.verifier=exact" if origin.replay_until else LR
    finished(tmp_path, "whole", tiny())
    asked = segments(tmp_path, "killed", origin, change)
    instant = random.randint(1, highest)
    start_driver(tmp_path, "killed", asked[-1][1], instant, origin).join()
    replay(tmp_path, "killed", origin, change)
    replay(tmp_path, "never", origin, change)
    assert digests(tmp_path, "killed") == digests(tmp_path, "never"), f"{origin}, killed at the write {instant}"


@pytest.mark.slow("three whole runs")
def test_a_run_that_was_made_longer_is_replayed_by_the_recipe_of_each_time(tmp_path: Path) -> None:
    decay = {"lr_schedule": "linear", "lr_final": 0.1}
    drive(tmp_path, "whole", tiny(schedule={"iterations": 2}, trainer=decay))
    drive(tmp_path, "whole", tiny(trainer=decay))
    run = replay(tmp_path, "again", kept("train"))
    assert [made_by(tmp_path, "again", k) for k in range(3)] == [{"train"}] * 3
    assert [segment.from_iteration for segment in run.segments] == [0, 2]
    drive(tmp_path, "whole", tiny(trainer=decay, schedule={"iterations": 4}))
    assert replay(tmp_path, "again", kept("train")).head() == run.head(), "it ends where its parent stood"


def test_supervised_fine_tuning_is_replayed_from_its_training(tmp_path: Path) -> None:
    finished(tmp_path, "whole", tiny_sft())
    replay(tmp_path, "lr", kept("train"), LR)
    assert made_by(tmp_path, "lr", 1) == {"train", "publish"}
    with pytest.raises(UserError, match="'whole' has no stage 'verify' to replay from: replay it from train"):
        segments(tmp_path, "no", kept("verify"))


@pytest.mark.parametrize(
    ("origin", "change", "message"),
    [
        (kept("train"), "reward.verifier=exact", "verifier is read by verify, which .* keeps .*: replay --from verify"),
        (kept("train"), "rollout.temperature=0.5", "temperature is read by rollout.*: add --on-policy"),
        (kept("train"), "data.source=sums://3", "data.source is read by prompts.*: begin another run"),
        (ON_POLICY, "model.max_length=13", "model.max_length is read by initialise.*: begin another run"),
        (kept("verify"), "seed=2", "seed is read by initialise"),
        (kept("verify", until="advantage"), LR, "trainer.lr changes nothing in a replay from verify until advantage"),
        (kept("train"), "evaluation.every=0", "evaluation.limit: has no effect"),
        (kept("train"), "evaluation.every=3", "evaluation.every changes nothing in a replay from train"),
        (kept("advantage", until="verify"), LR, "from advantage cannot end with verify, which comes before"),
        (kept("train", at=4), LR, "'whole' has committed 3 iterations"),
    ],
)
def test_changes_that_a_replay_cannot_follow(whole: Path, origin: Origin, change: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        segments(whole, "no", origin, change)


def test_a_replay_is_continued_as_the_replay_it_is(whole: Path) -> None:
    def reopened(recipe_lr: float, origin: Origin | None) -> Run:
        recipe = tiny(trainer={"lr": recipe_lr}, algorithm={"max_logprob_gap": 100.0})
        return open_run(store_in(whole), "lr", recipe, origin=origin)

    with pytest.raises(UserError, match=r"'lr' is a replay of 'whole' from train, .*: arealflow replay continues it"):
        reopened(0.003, None)
    with pytest.raises(UserError, match=r"'lr' exists and is a replay of 'whole' from train.*, not .* from advantage"):
        reopened(0.003, kept("advantage"))
    with pytest.raises(UserError, match=r"trainer.lr is 0.003 in the run and 0.004 here"):
        reopened(0.004, kept("train"))


def test_a_replay_that_would_read_what_was_removed_does_not_begin(tmp_path: Path) -> None:
    """One that trains every iteration again reads nothing of it."""
    whole = drive(tmp_path, "whole", tiny(trainer={"recover_within_seconds": 1e-6}))
    append_log(whole.store, "whole", "finished", {"owner": whole.owner})
    replay(tmp_path, "before", kept("train"), LR)
    expected = digests(tmp_path, "before")
    append_log(whole.store, "before", "finished", {"owner": 1})
    remove_run(whole.store, plan_run_removal(whole.store, "before", 0.0), 0.0)
    rule = RetentionRule(1, 1, older_than=0.0)
    assert execute_gc(whole.store, plan_gc(whole.store, rule, "whole"), rule)
    for name, origin in (("on-policy", ON_POLICY), ("judged", kept("verify")), ("later", kept("train", at=2))):
        with pytest.raises(UserError, match=r"of version [12] of run 'whole' were removed by .*--keep-"):
            replay(tmp_path, name, origin)
        assert not whole.store.exists(paths.run_record(name))
    replay(tmp_path, "after", kept("train"), LR)
    assert digests(tmp_path, "after") == expected


def test_what_is_forked_from_a_replay_is_watched_as_the_original_was(whole: Path) -> None:
    """The replay lifts the bound on the distance of engine and trainer; its children generate by their own weights."""

    def bounds(name: str) -> tuple[float, float]:
        run = load_run(store_in(whole), name)
        own, inherited = (v["algorithm"]["max_logprob_gap"] for v in (run.recipe_at(1), parent_values(run, 1)))
        return own, inherited

    replay(whole, "lr-again", kept("train", "lr", 1))
    replay(whole, "loose", kept("train"), "algorithm.max_logprob_gap=7")
    assert bounds("lr") == bounds("lr-again") == (100.0, 0.1)
    assert bounds("loose") == (7.0, 7.0) and bounds("whole") == (0.1, 0.1)
    recipe = parse_recipe(parent_values(load_run(store_in(whole), "lr"), 2), "lr")
    drive(whole, "of-lr", recipe, origin=Origin("lr", 2))
    assert bounds("of-lr") == (100.0, 0.1), "iteration 1 is the replay's"
    assert load_run(store_in(whole), "of-lr").recipe_at(2)["algorithm"]["max_logprob_gap"] == 0.1


def test_nothing_to_replay(whole: Path) -> None:
    open_run(store_in(whole), "empty", tiny())
    with pytest.raises(UserError, match="'empty' has not committed any iteration: there is nothing to replay"):
        segments(whole, "no", kept("train", "empty"))


def test_a_comparison_crosses_verdicts_and_shows_what_was_built(whole: Path) -> None:
    replay(whole, "crossed", kept("verify"), "reward.verifier=exact")
    built, verdicts, reward, advantage, curves = compare_replay(store_in(whole), "crossed")
    assert {row["stage"]: row["built"] for row in built.rows}["verify"] == 3
    counts = {row["stage"]: row["taken"] for row in built.rows}
    assert counts["rollout"] == 3 and counts["verify"] == 0
    query = "SELECT verdict, count(*) AS n FROM verify GROUP BY 1"
    there, here = (
        {row["verdict"]: row["n"] for row in run_sql(store_in(whole), name, query).to_pylist()}
        for name in ("whole", "crossed")
    )
    corner = "whole \\ crossed"
    assert {
        row[corner]: sum(v for k, v in row.items() if k != corner)
        for row in verdicts.rows
        if any(v for k, v in row.items() if k != corner)
    } == there
    assert {name: sum(row[name] for row in verdicts.rows) for name in here} == here
    assert [row["samples"] for row in reward.rows] == [48, 48] and len(advantage.rows) == 2
    assert "loss" in [row["curve"] for row in curves.rows] and "length" in curves.title


def test_a_comparison_leaves_out_what_was_taken(whole: Path) -> None:
    titles = [section.title for section in compare_replay(store_in(whole), "lr")]
    assert titles[0] == "iterations by stage" and len(titles) == 2 and "equal in both: reward" in titles[1]
    with pytest.raises(UserError, match="'whole' is no replay: arealflow diff compares any two runs"):
        compare_replay(store_in(whole), "whole")


def test_what_is_built_of_the_iteration_under_way(whole: Path, tmp_path: Path) -> None:
    """As `arealflow plan` tells it, of a run and of a replay that were killed before their second training."""
    for name, origin, built in (
        ("killed", None, {"initialise", "prompts", "rollout", "verify", "reference", "advantage"}),
        (
            "again",
            kept("train", original="whole"),
            {"initialise", "prompts", "rollout", "verify", "reference", "advantage"},
        ),
    ):
        folder = tmp_path / name
        finished(folder, "whole", tiny())
        recipe = tiny(algorithm={"max_logprob_gap": 100.0})
        start_driver(folder, name, recipe, "train 1", origin).join()
        run = load_run(store_in(folder), name)
        with Engines(run, recipe, folder / "logs") as engines:
            loop = loop_of(run)(run, recipe, engines)
            assert loop.first == 1 and set(loop.standing()[1]) == built
            assert not engines.supervisor.services


def test_a_replay_that_trains_nothing_can_ask_for_what_was_not_computed(tmp_path: Path) -> None:
    """The trainer is brought to the original's policy of each iteration by the original's train stages."""
    plain = {"kl": "none", "kl_coef": 0.0, "minibatches": 1}
    drive(tmp_path, "whole", tiny(algorithm=plain, inference={"deterministic": False}, schedule={"iterations": 2}))
    origin = kept("advantage", until="advantage")
    run = replay(tmp_path, "penalised", origin, "algorithm.kl=reward", "algorithm.kl_coef=0.1")
    for k in range(2):
        assert made_by(tmp_path, "penalised", k) == {"reference", "proximal", "advantage"}
    query = "SELECT iteration, max(abs(prox_logprob - logprob)) AS gap, max(abs(prox_logprob - ref_logprob)) AS moved"
    first, second = run_sql(
        run.store, run.name, f"{query} FROM tokens WHERE loss_mask GROUP BY 1 ORDER BY 1"
    ).to_pylist()
    assert max(first["gap"], second["gap"]) < 1e-4, "the policy of each iteration, which sampled its tokens"
    assert first["moved"] < 1e-4 < second["moved"]
