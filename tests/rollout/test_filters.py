"""Filters by their laws, and what happens to groups that are judged while others generate."""

from __future__ import annotations

import asyncio
import math
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from near import Here, some_store
from test_rollouts import BATCH, Scene, at, go, rollouts, sample, writer
from waiting import LIMIT, until

from areal_tasks.rewards.pool import VerifyResult
from areal_tasks.rewards.protocol import Row
from areal_tasks.rollout.filters import kind_of, load_function, rejection, rejection_by
from areal_tasks.rollout.judging import Judge, VerifiersFailed, judged_table, row_of
from areal_tasks.rollout.made_with import made_with
from areal_tasks.rollout.rejections import Rejections
from areal_tasks.rollout.settled import SettledGroups
from areal_tasks.rollout.spooling import spooled_rows
from areal_tasks.stages.generation import Generation
from areal_tasks.stages.graphs import stages
from areal_tasks.stages.verify import made_in_advance
from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.keys import recipe_values
from areal_tasks.store.spool import read_spool
from areal_tasks.workflows import Sample, samples_to_table
from schemas.errors import UserError
from schemas.manifest import RejectedGroup
from schemas.recipe.derived import judges_groups, judges_in_advance
from schemas.recipe.load import load_recipe
from schemas.recipe.recipe import RlhfRecipe
from schemas.recipe.sections import Filters, Rollout


@pytest.fixture
def local_store(tmp_path: Any) -> Store:
    return open_store(tmp_path.as_uri())


def judgement(reward: float, verdict: str = "") -> VerifyResult:
    return VerifyResult(reward, verdict or ("correct" if reward > 0 else "incorrect"), "", "", "v", 0.1)


NONE = judgement(math.nan, "error")
judged = st.lists(st.sampled_from([0.0, 0.5, 1.0]).map(judgement), min_size=1, max_size=8)
shares = st.fractions(0, 1).map(float)


# ── the filters ─────────────────────────────────────────────────────────────────────────────────────────────────────


@given(judged)
def test_without_a_filter_nothing_is_rejected(results: list[VerifyResult]) -> None:
    assert not Filters().active and not rejection(results, Filters())


@given(judged)
def test_equal_rewards_are_those_from_which_grpo_learns_nothing(results: list[VerifyResult]) -> None:
    rewards = [one.reward for one in results]
    mean = sum(rewards) / len(rewards)
    assert bool(rejection(results, Filters(equal_rewards=True))) == (max(abs(r - mean) for r in rewards) < 1e-12)


@given(judged, shares, shares)
def test_the_window_keeps_what_lies_within_it(results: list[VerifyResult], one: float, other: float) -> None:
    low, high = min(one, other), max(one, other)
    share = sum(r.verdict == "correct" for r in results) / len(results)
    reason = rejection(results, Filters(min_success=low, max_success=high))
    assert kind_of(reason) == ("min_success" if share < low else "max_success" if share > high else "")


@given(judged, st.integers(0, 4), st.booleans(), shares, st.randoms())
def test_neither_order_nor_samples_without_a_reward_matter(
    results: list[VerifyResult], more: int, equal: bool, low: float, draw: random.Random
) -> None:
    filters = Filters(equal_rewards=equal, min_success=low)
    mixed = results + [NONE] * more
    draw.shuffle(mixed)
    assert rejection(mixed, filters) == rejection(results, filters)
    assert not rejection([NONE] * more, filters)


@given(judged, shares)
def test_what_one_filter_rejects_two_reject(results: list[VerifyResult], low: float) -> None:
    one = rejection(results, Filters(min_success=low))
    assert not one or rejection(results, Filters(min_success=low, equal_rewards=True))


def test_a_function_says_why_or_nothing() -> None:
    group = [sample(3, 0)]
    assert rejection_by(lambda samples, rewards: f"{len(samples)} of {rewards}", group, [judgement(0.5)]) == (
        "function: 1 of [0.5]"
    )
    assert not rejection_by(lambda samples, rewards: None, group, [judgement(1)])
    with pytest.raises(TypeError, match="neither a string nor None"):
        rejection_by(lambda samples, rewards: True, group, [judgement(1)])  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("short", {}, "is no `package.module:object`"),
        ("no.such.module:short", {}, "cannot be imported"),
        ("math:short", {}, r"math \(.*\) has no 'short'"),
        ("math:pi", {}, "is not callable"),
        ("math:dist", {"most": 3}, "does not fit.*called with .samples, rewards. and rollout.filters.arguments .most"),
    ],
)
def test_a_function_that_is_not_there_or_does_not_fit_is_named(name: str, arguments: Any, says: str) -> None:
    with pytest.raises(UserError, match=f"rollout.filters.function: .*{says}"):
        load_function(Filters(function=name, arguments=arguments))


# ── keys ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def quickstart(*overrides: str) -> RlhfRecipe:
    recipe = load_recipe("quickstart", overrides)
    assert isinstance(recipe, RlhfRecipe)
    return recipe


def asked_for(recipe: RlhfRecipe) -> list[Any]:
    return [(s.name, s.version, s.reads, s.writes, recipe_values(recipe, s.fields)) for s in stages(recipe)]


def test_only_with_filters_do_they_and_the_verifier_decide_what_a_group_contains() -> None:
    plain, filtered = quickstart(), quickstart("rollout.filters.equal_rewards=true")
    assert not any("filters" in path for *_, values in asked_for(plain) for path in values)
    [rollout] = [values for name, *_, values in asked_for(filtered) if name == "rollout"]
    assert rollout["rollout.filters.equal_rewards"] is True and "reward.verifier" in rollout
    other = "reward.unparseable_reward=-1"
    assert made_with(plain, "p", {}) == made_with(quickstart(other), "p", {}) != made_with(filtered, "p", {})
    assert made_with(filtered, "p", {}) != made_with(quickstart("rollout.filters.equal_rewards=true", other), "p", {})
    more = quickstart("rollout.filters.equal_rewards=true", "rollout.filters.max_rejected=7")
    assert made_with(filtered, "p", {}) == made_with(more, "p", {})  # how long to try is no part of what is made


def test_a_workflow_that_asks_for_verdicts_has_the_verifier_decide_what_its_groups_contain() -> None:
    mine = ("workflow.name=m:w", "workflow.arguments={}")
    plain, asking = quickstart(*mine), quickstart(*mine, "workflow.verifies=true")
    assert not any("verifies" in path for *_, values in asked_for(plain) for path in values), "as recorded before"
    [(writes, values)] = [(writes, values) for name, _, _, writes, values in asked_for(asking) if name == "rollout"]
    assert writes == ("rollout", "judged") and "reward.verifier" in values and values["workflow.verifies"] is True
    other = "reward.unparseable_reward=-1"
    assert made_with(plain, "p", {}) == made_with(quickstart(*mine, other), "p", {})
    assert made_with(asking, "p", {}) not in (
        made_with(plain, "p", {}),
        made_with(quickstart(*mine, "workflow.verifies=true", other), "p", {}),
    )
    with pytest.raises(UserError, match=r"workflow\.verifies: has no effect with workflow.name single_turn"):
        quickstart("workflow.verifies=true")


CLUSTER = "launcher={type: slurm, network: 10.0.0.0/24, resources: {rollout: {cpus: 3}}}"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), True),
        (("launcher.type=inline",), True),
        ((CLUSTER,), True),
        ((CLUSTER, "reward.workers=4"), False),
        (("rollout.max_head_offpolicyness=0",), False),
    ],
)
def test_with_eta_groups_are_judged_in_advance_where_each_verifier_has_a_cpu(
    overrides: Sequence[str], expected: bool
) -> None:
    recipe = quickstart("rollout.max_head_offpolicyness=1", *overrides)
    assert judges_in_advance(recipe) == expected and not judges_groups(recipe, recipe.rollout)


# ── judging while others generate ───────────────────────────────────────────────────────────────────────────────────


def judge(rewards: Callable[[int], float], filters: Filters | None = None, **more: Any) -> Judge:
    """Verdicts by the group's number, which is the second token of its samples' completion."""

    async def verify(rows: Sequence[Row]) -> list[VerifyResult]:
        return [judgement(rewards(int(row.completion))) for row in rows]

    return Judge(verify, "with", filters or Filters(min_success=0.5), **more)


async def rewarded(rows: Sequence[Row]) -> list[VerifyResult]:
    return [judgement(1.0) for _ in rows]


class Numbered(Scene):
    """Completions that say which group they are of."""

    async def run(self, prompt: Any, context: Any) -> Any:
        samples = await super().run(prompt, context)
        for one in samples:
            one.completion = str(prompt.group_id)
        return samples


def filtered(scene: Scene, store: Store, by: Judge, eta: int = 0, last: int = 99, **limits: Any) -> Here:
    return rollouts(scene, store, eta, last, by, **{"groups": BATCH, "filters": by.filters, **limits})


def gated(writer: Any) -> tuple[threading.Event, threading.Event]:
    """Have the writer's next writes wait: set when one has begun, and to be set for all to go on."""
    begun, go_on, write = threading.Event(), threading.Event(), writer.write

    def wait(*arguments: Any) -> Any:
        begun.set()
        assert go_on.wait(LIMIT)
        return write(*arguments)

    writer.write = wait
    return begun, go_on


def test_groups_that_reach_the_spool_while_rejections_are_recorded_are_taken_from_there() -> None:
    async def work() -> None:
        scene = Numbered(at_once=False)
        found = filtered(scene, some_store(), judge(lambda group: float(group != 1)))
        taking = asyncio.ensure_future(found.groups())
        await until(lambda: len(scene.ends) == BATCH)
        groups = found.near().groups
        (recording, recorded), (spooling, spooled) = gated(found.writer), gated(groups.writer)
        for group in (0, 2, 3):
            scene.ends[group].set_result(None)
        await until(lambda: len(groups.finished) == 3)
        flushing = asyncio.ensure_future(groups.flush())
        await until(spooling.is_set)
        scene.ends[1].set_result(None)  # rejected: group 4 begins in its place
        await until(lambda: 4 in scene.ends)
        scene.ends[4].set_result(None)
        await until(recording.is_set)
        spooled.set()
        await flushing
        await until(lambda: bool(found.spool.records([0])))
        recorded.set()
        assert await taking == [0, 2, 3, 4] and scene.begun == [0, 1, 2, 3, 4]
        await found.close()

    go(work())


@given(st.sets(st.integers(0, 40), max_size=30), st.integers(0, 3), st.integers(0, 2**32))
@settings(max_examples=12, deadline=None)
def test_each_group_is_taken_once_or_rejected_whatever_order_groups_end_in(
    unwanted: set[int], eta: int, seed: int
) -> None:
    async def work() -> None:
        scene, draw = Numbered(at_once=False), random.Random(seed)
        found = filtered(scene, some_store(), judge(lambda group: float(group not in unwanted)), eta, 4)

        async def end_some() -> None:
            while True:
                await asyncio.sleep(0)  # a turn of the event loop
                if waiting := [future for future in scene.ends.values() if not future.done()]:
                    draw.choice(waiting).set_result(None)

        ending, consumed = asyncio.ensure_future(end_some()), Counter[int]()
        for k in range(5):
            scene.version = k
            taken = await found.groups()
            assert eta or taken == [i for i in range(max(taken) + 1) if i not in unwanted and i not in consumed]
            consumed.update(taken)
            found.consume(taken)
        ending.cancel()
        assert set(consumed.values()) == {1} and not unwanted & set(consumed)
        assert set(range(found.tracker.settled.prefix)) <= {*consumed, *unwanted} and not found.live
        assert Counter(scene.begun) == Counter({*consumed, *(i for i in unwanted if i in found.tracker.settled)})

    go(work())


def test_a_rejection_is_recorded_before_the_groups_that_it_has_made_room_for_are_taken(local_store: Store) -> None:
    async def work() -> None:
        found = filtered(Numbered(), local_store, judge(lambda group: float(group not in (1, 2))))
        assert await found.groups() == [0, 3, 4, 5]
        waiting, rejected = at(local_store, owner=2).recover(SettledGroups())  # killed now, the flow would know them
        assert [(group.index, group.reason, group.reward) for group in rejected] == [
            (1, "min_success: 0 of the samples are correct", 0.0),
            (2, "min_success: 0 of the samples are correct", 0.0),
        ]
        assert not waiting and found.rejections.metrics() == {"rejected_min_success": 2.0}
        found.consume([0, 3, 4, 5])
        assert not found.rejections.metrics()

    go(work())


def test_rejections_that_are_recorded_again_since_an_answer_was_lost_count_once(local_store: Store) -> None:
    first, second = (RejectedGroup(index=index, reason="min_success: 0") for index in (1, 2))
    disturbed = writer(local_store)
    disturbed.write({}, [first])
    disturbed.next = (0, 1)  # as after an error
    records = disturbed.write({}, [first, second])
    assert [[group.index for group in record.rejected] for record in records] == [[1], [1, 2]]
    assert at(local_store, owner=2).recover(SettledGroups()) == ({}, [first, second])


def test_what_waits_for_long_is_recorded_with_its_verdicts(local_store: Store) -> None:
    async def work() -> None:
        by = judge(lambda group: group / 10)
        by.filters = Filters()
        found = filtered(Numbered(), local_store, by, 1, flush_seconds=0.0)
        await found.groups()
        await until(lambda: found.tracker.ready() == 2 * BATCH and all(found.spool.records([i]) for i in found.live))

    go(work())
    later = at(local_store, owner=2)
    waiting = list(later.recover(SettledGroups())[0])
    rows = spooled_rows(local_store, later.records(waiting), "judged").sort_by("group_id")
    assert rows["group_id"].to_pylist() == sorted(waiting) == list(range(2 * BATCH))
    assert rows["reward"].to_pylist() == pytest.approx([i / 10 for i in range(2 * BATCH)])
    assert set(rows["judged_with"].to_pylist()) == {"with"}


def test_what_a_workflow_has_asked_about_keeps_the_verdict_that_it_has_seen(local_store: Store) -> None:
    """Each completion is verified once in an attempt, whatever a verifier would say the next time."""
    calls: list[str] = []

    async def verify(rows: Sequence[Row]) -> list[VerifyResult]:
        calls.extend(row.completion for row in rows)
        return [judgement(float(len(calls) - len(rows) + i)) for i, _ in enumerate(rows)]

    class Asking(Numbered):
        def __init__(self) -> None:
            super().__init__()
            self.seen: dict[int, float] = {}

        async def run(self, prompt: Any, context: Any) -> Any:
            [one] = await super().run(prompt, context)
            first = await context.verify(one)
            assert await context.verify(one) is first
            if prompt.group_id % 2:
                one.completion += " again"  # which it does not ask about
            else:
                self.seen[prompt.group_id] = first.reward
            return [one]

    async def work() -> None:
        found = filtered(scene, local_store, Judge(verify, "with", Filters()), 1, flush_seconds=0.0)
        await found.groups()
        await until(lambda: found.tracker.ready() == 2 * BATCH and all(found.spool.records([i]) for i in found.live))

    scene = Asking()
    go(work())
    later = at(local_store, owner=2)
    waiting = list(later.recover(SettledGroups())[0])
    rows = spooled_rows(local_store, later.records(waiting), "judged").to_pylist()
    rewards = {row["group_id"]: row["reward"] for row in rows}
    assert len(rows) == 2 * BATCH and scene.seen == {group: rewards[group] for group in waiting if group % 2 == 0}
    asked = [str(group) for group in waiting]
    assert Counter(calls) == Counter(asked + [f"{group} again" for group in waiting if group % 2])


@pytest.mark.parametrize("decides", [True, False])
def test_servers_are_at_other_groups_while_one_is_judged(decides: bool) -> None:
    class Patient(Judge):
        async def __call__(self, *group: Any) -> str:
            await asked.wait()
            return await super().__call__(*group)

    asked = asyncio.Event()

    async def work() -> None:
        by = Patient(rewarded, "with", Filters(equal_rewards=decides), decides=decides)
        scene = Numbered(capacity=1)
        found = filtered(scene, some_store(), by)
        taking = asyncio.ensure_future(found.groups())
        await until(lambda: scene.begun == [0, 1, 2, 3])  # one after the other, and none is judged yet
        await until(lambda: found._assigned.by_url("verifying").total() == BATCH)
        by.filters = Filters()
        asked.set()
        assert await taking == [0, 1, 2, 3]

    go(work())


def test_functions_that_never_return_keep_no_thread_from_others() -> None:
    hang = threading.Event()

    def function(samples: Sequence[Sample], rewards: Sequence[float]) -> str:
        if samples[0].prompt.group_id > 0:
            hang.wait()
        return "said"

    async def work() -> None:
        by = Judge(rewarded, "with", Filters(), function, seconds=0.01)
        asked = [by([sample(group, 0)]) for group in range(1, 41)]
        assert {type(end) for end in await asyncio.gather(*asked, return_exceptions=True)} == {TimeoutError}
        by.seconds = LIMIT
        assert await by([sample(0, 0)]) == "function: said"

    try:
        go(work())
    finally:
        hang.set()


def test_verdicts_in_advance_are_reported_and_not_written(local_store: Store) -> None:
    async def work() -> None:
        by = Judge(rewarded, "with", Filters(), decides=False)
        found = filtered(Numbered(), local_store, by, 1, flush_seconds=0.0)
        assert await found.groups() == [0, 1, 2, 3]
        await until(lambda: found.tracker.ready() == 2 * BATCH and all(found.spool.records([i]) for i in found.live))
        assert {one.verdicts for one in found.judged.values()} == {(judgement(1.0),)}
        assert set(found.judged) == set(range(2 * BATCH)) == found.live.keys()
        found.judged[99] = found.judged[0].model_copy(update={"index": 99})  # of a group that is no longer live
        found.consume([0, 1, 2, 3])
        assert set(found.judged) == set(range(2 * BATCH)), "the stage `verify` comes after"
        [part] = await found.take("run/iteration=1")  # from the spool
        assert set(part.tables) == {"rollout"}

    go(work())


async def never(rows: Sequence[Row]) -> list[VerifyResult]:
    await asyncio.Event().wait()
    raise AssertionError


def test_what_waits_for_a_verdict_in_advance_is_written_meanwhile(local_store: Store) -> None:
    """Slow verifiers delay no write: a killed flow loses as little as without them."""
    go_on = asyncio.Event()

    async def slowly(rows: Sequence[Row]) -> list[VerifyResult]:
        await go_on.wait()
        return [judgement(1.0) for _ in rows]

    async def work() -> None:
        by = Judge(slowly, "with", Filters(), decides=False)
        found = filtered(Numbered(), local_store, by, 1, flush_seconds=0.0)
        taking = asyncio.ensure_future(found.groups())
        await until(lambda: in_spool(local_store) == set(range(2 * BATCH)))
        assert not found.tracker.ready() and found._assigned.by_url("verifying").total() == 2 * BATCH
        await until(lambda: all(found.spool.records([i]) for i in found.live))
        assert found.spool.places()[0] == (0, 1), "a later start of the flow finds them"
        go_on.set()
        assert await taking == [0, 1, 2, 3]
        await until(lambda: found.tracker.ready() == 2 * BATCH and all(found.spool.records([i]) for i in found.live))
        assert all(one.verdicts == (judgement(1.0),) for one in found.judged.values()) and not found.finished

    go(work())


def test_a_worker_that_is_lost_while_it_verifies_what_it_has_written_loses_none_of_it(local_store: Store) -> None:
    async def work() -> None:
        by = Judge(never, "with", Filters(), decides=False)
        found = filtered(Numbered(), local_store, by, 1, flush_seconds=0.0)
        taking = asyncio.ensure_future(found.groups())
        await until(lambda: all(found.spool.records([i]) for i in range(2 * BATCH)))
        await found.use_workers({("0", 1)})
        await until(lambda: found.tracker.ready() == 2 * BATCH)
        assert await taking == [0, 1, 2, 3] and not found.suspects.at_once

    go(work())


@pytest.mark.parametrize("decides", [True, False])
def test_groups_that_are_verified_are_in_memory_as_finished_ones_are(local_store: Store, decides: bool) -> None:
    async def work() -> None:
        scene = Numbered(capacity=2)
        by = Judge(never, "with", Filters(), decides=decides)
        found = filtered(scene, local_store, by, 3, flush_seconds=0.0, groups_in_memory=3)
        taking = asyncio.ensure_future(found.groups())
        await until(lambda: sum(found.backlog().verifying.values()) == len(scene.begun) >= 3)
        assert len(scene.begun) < 3 + scene.capacity
        taking.cancel()

    go(work())


def test_verdicts_on_a_lost_attempt_are_not_those_on_what_the_next_worker_has_written(local_store: Store) -> None:
    """Two workers are lost: one with a finished group, the next one while it verifies what it has written."""

    class Counted(Numbered):
        async def run(self, prompt: Any, context: Any) -> Any:
            [one] = await super().run(prompt, context)
            one.completion = f"{self.begun.count(prompt.group_id)}"
            return [one]

    async def verify(rows: Sequence[Row]) -> list[VerifyResult]:
        return [judgement(0.5)] if rows[0].completion == "1" else await never(rows)

    async def work() -> None:
        found = filtered(Counted(), local_store, Judge(verify, "with", Filters(), decides=False), flush_seconds=3600.0)
        await found.use_workers({("0", 0)})
        await until(lambda: found.tracker.ready() == BATCH)
        await found.use_workers({("0", 1)})
        await until(lambda: found._assigned.by_url("verifying").total() == BATCH)
        await found.flush()
        await found.use_workers({("0", 2)})
        assert await found.groups() == [0, 1, 2, 3] and set(found.rows["completion"].to_pylist()) == {"2"}
        generation = Generation.__new__(Generation)
        generation._rollouts = found
        assert not made_in_advance(generation, found.rows, "with")

    go(work())


def in_spool(store: Store) -> set[int]:
    """The groups whose rows are in the spool."""
    return {group.index for record in read_spool(store, "run") for group in record.finished}


def test_what_waits_for_a_verdict_in_advance_is_written_when_the_flow_ends(local_store: Store) -> None:
    async def work() -> None:
        found = filtered(Numbered(), local_store, Judge(never, "with", Filters(), decides=False))
        taking = asyncio.ensure_future(found.groups())
        await until(lambda: found._assigned.by_url("verifying").total() == BATCH)
        taking.cancel()
        await found.close()

    go(work())
    assert sorted(at(local_store, owner=2).recover(SettledGroups())[0]) == [0, 1, 2, 3]


async def lost(rows: Sequence[Row]) -> list[VerifyResult]:
    raise ConnectionError("lost again and again")


def test_without_verifiers_in_advance_groups_wait_for_the_stage_verify() -> None:
    async def work() -> None:
        found = filtered(Numbered(), some_store(), Judge(lost, "with", Filters(), decides=False))
        assert await found.groups() == [0, 1, 2, 3]
        assert not any(one.verdicts for one in found.judged.values())
        assert found.near().groups.judge is None, "they are not asked again for each group"

    go(work())


def test_verifiers_that_fail_end_the_stage_and_cost_no_group_an_attempt() -> None:
    async def work() -> None:
        found = filtered(Numbered(), some_store(), Judge(lost, "with", Filters(equal_rewards=True)))
        with pytest.raises(VerifiersFailed, match="lost again and again"):
            await found.groups()
        assert not found.tracker.failures

    go(work())


def test_what_the_filters_see_is_what_the_stage_verify_sees() -> None:
    group = [sample(3, 0)]
    group[0].stop_reason = "length"
    columns = samples_to_table(group).select(list(Row._fields)).to_pylist()
    assert [row_of(one)._asdict() for one in group] == columns
    assert not len(judged_table(group))


# ── too many rejections ─────────────────────────────────────────────────────────────────────────────────────────────


def test_filters_that_fill_no_batch_end_the_run_and_say_what_was_rejected() -> None:
    async def work() -> None:
        by = judge(lambda group: float(group % 3 == 0), Filters(min_success=0.5, max_success=0.9))
        scene = Numbered()
        found = filtered(scene, some_store(), by)
        scene.verdicts = lambda group: ValueError("boom") if group == 5 else None
        with pytest.raises(UserError) as raised:
            await found.groups()
        for part in ("rejected 40 groups while no batch of 4", "by min_success (mean reward 0)", "by max_success"):
            assert part in str(raised.value)

    go(work())


@given(st.lists(st.sampled_from(["keep", "filter", "fail"]), max_size=60), st.integers(1, 6), st.integers(1, 9))
def test_the_run_ends_with_so_many_rejections_after_the_last_full_batch(
    events: list[str], batch: int, most: int
) -> None:
    limits = Rollout(groups=batch, filters=Filters(equal_rewards=True, max_rejected=most), max_failed_groups=99)
    found, since, kept = Rejections(limits), 0, 0
    for index, event in enumerate(events):
        if event == "keep":
            found.keep()
            kept += 1
            since = 0 if kept % batch == 0 else since
            continue
        reason = {"filter": "equal_rewards: all are 1", "fail": "failed: it"}[event]
        ended = found.add(RejectedGroup(index=index, reason=reason, reward=1.0 if event == "filter" else None))
        since += event == "filter"
        assert (ended is not None) == (event == "filter" and since >= most)
    told = found.metrics()
    assert told.get("rejected_failed", 0) == events.count("fail") == len(found.unrecorded) - len(found.by_filters())
    assert told.get("rejected_equal_rewards", 0) == events.count("filter") == len(found.by_filters())


EVENTS = st.lists(st.sampled_from(["keep", "filter"]), max_size=30)


@given(EVENTS, EVENTS, st.integers(1, 6), st.integers(1, 9))
def test_a_start_after_a_crash_counts_as_if_there_had_been_none(
    before: list[str], after: list[str], batch: int, most: int
) -> None:
    limits = Rollout(groups=batch, filters=Filters(equal_rewards=True, max_rejected=most))
    one = RejectedGroup(index=0, reason="equal_rewards: all are 1", reward=1.0)

    def told(found: Rejections, event: str) -> str:
        return str(found.keep() if event == "keep" else found.add(one))

    undisturbed, resumed = Rejections(limits), Rejections(limits)
    rejected, waiting = list[RejectedGroup](), 0
    for event in before:
        told(undisturbed, event)
        rejected, waiting = ([*rejected, one], waiting) if event == "filter" else (rejected, waiting + 1)
        if waiting == batch:  # the iteration takes them, and is committed
            rejected, waiting = [], 0
    resumed.restore(rejected, waiting)
    assert [told(resumed, event) for event in after] == [told(undisturbed, event) for event in after]


def test_groups_ahead_that_fill_a_batch_end_the_count_of_a_start_before() -> None:
    found = Rejections(Rollout(groups=2, filters=Filters(equal_rewards=True, max_rejected=2)))
    one = RejectedGroup(index=0, reason="equal_rewards: all are 1", reward=1.0)
    stale, failed = one.model_copy(update={"reason": "stale: it"}), one.model_copy(update={"reason": "failed: it"})
    found.restore([one, stale, failed], waiting=3)
    assert found.add(one) is None and found.add(one) is not None
    assert found.metrics() == {"rejected_equal_rewards": 3, "rejected_failed": 1, "rejected_stale": 1}
