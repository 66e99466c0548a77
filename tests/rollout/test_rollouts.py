"""Groups that are generated while others are trained on: who begins, who fails, and what outlives the flow."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from near import SAYS_SO, FailingStore, Here, Near, some_store
from waiting import until

from areal_tasks.engines.client import InferenceClient, Lost
from areal_tasks.engines.server import BadRequest, ServerDown
from areal_tasks.engines.sharing import Followers
from areal_tasks.rollout.group_tracker import GroupTracker
from areal_tasks.rollout.judging import Judge
from areal_tasks.rollout.link import Link
from areal_tasks.rollout.orders import Event, Lease, Orders, Spooled
from areal_tasks.rollout.rollouts import Rollouts
from areal_tasks.rollout.settled import SettledGroups
from areal_tasks.rollout.spooling import Spool, Writer, spooled_rows
from areal_tasks.rollout.staleness import Staleness
from areal_tasks.rollout.worker.groups import Groups
from areal_tasks.store import spool as records
from areal_tasks.store.backend import Store, StoreError, Unavailable, open_store
from areal_tasks.store.objects.local import LocalBackend
from areal_tasks.store.spool import StartClosed
from areal_tasks.workflows import Prompt, Sample, WorkflowContext
from schemas.errors import UserError
from schemas.manifest import RejectedGroup
from schemas.recipe.sections import Rollout

BATCH = 4


@pytest.fixture
def local_store(tmp_path: Path) -> Store:
    return open_store(tmp_path.as_uri())


def sample(group: int, version: int) -> Sample:
    """A prompt token, then two tokens of this version."""
    prompt = Prompt(group, group, 0, "p", "a", [1])
    values: dict[str, Any] = {"loss_mask": [False, True, True], "logprobs": np.array([0, -1, -1], np.float32)}
    return Sample(
        prompt=prompt, sample_index=0, completion="", input_ids=[1, group, 3], versions=[-1, version, version],
        stop_reason="stop", seed=0, server="s", seconds=0.0, **values,
    )  # fmt: skip


@dataclass
class Scene:
    """A workflow that ends groups when, and as, the test says; `version` is what the servers hold."""

    version: int = 0
    capacity: int = 1000
    begun: list[int] = field(default_factory=list)
    ends: dict[int, asyncio.Future[None]] = field(default_factory=dict)
    verdicts: Callable[[int], BaseException | None] = lambda group: None
    at_once: bool = True
    followers: Followers = field(default_factory=Followers)
    serving: Any = None

    async def run(self, prompt: Prompt, context: WorkflowContext) -> list[Sample]:
        group, version = prompt.group_id, self.version
        self.begun.append(group)
        if not self.at_once:
            self.ends[group] = asyncio.get_running_loop().create_future()
            await self.ends[group]
        if (error := self.verdicts(group)) is not None:
            raise error
        return [sample(group, version)]


def rollouts(
    scene: Scene, store: Store, eta: int = 0, last: int = 99, judge: Judge | None = None, **limits: Any
) -> Here:
    client = cast(InferenceClient, scene)
    context = WorkflowContext(client=client, seed=0, group_size=1, max_new_tokens=2, temperature=1.0, max_length=8)
    prompt_of: Callable[[int], Prompt] = lambda group: Prompt(group, group, 0, "p", "a", [1])  # noqa: E731
    settings = Rollout(**limits)

    def near(url: str, flow: Rollouts) -> Link:
        make = lambda tell: Groups(scene, context, prompt_of, settings, writer(store), tell, judge)  # noqa: E731
        return Near(url, flow, make).link

    tracker = GroupTracker(Staleness(lambda k: eta, last, lambda k: BATCH), 0)
    return Here(tracker, client, cast(Any, None), near, settings, at(store))


def reasons(found: Rollouts) -> dict[int, str]:
    """Of the groups that were rejected and are not recorded."""
    return {index: group.reason for index, group in found.rejections.unrecorded.items()}


def at(store: Store, owner: int = 1, made_with: str = "made") -> Spool:
    """What the spool holds, for a start of the flow."""
    return Spool(store, "run", owner, made_with)


def writer(store: Store, owner: int = 1, made_with: str = "made") -> Writer:
    return Writer(store, "run", owner, made_with)


def go(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_at_eta_0_an_iteration_has_the_next_groups_of_its_own_version() -> None:
    async def work() -> None:
        scene = Scene()
        found = rollouts(scene, some_store())
        for k in range(3):
            scene.version = k
            taken = await found.groups()
            assert taken == list(range(k * BATCH, (k + 1) * BATCH)) and scene.begun == list(range((k + 1) * BATCH))
            assert set(found.rows["version_min"].to_pylist()) == {k}
            found.consume(taken)
        assert not found.finished

    go(work())


def test_groups_begin_while_nobody_waits_for_them() -> None:
    """With η = 2, three batches of version 0 may be under way before anything is trained."""

    async def work() -> None:
        scene = Scene()
        found = rollouts(scene, some_store(), eta=2)
        assert await found.groups() == [0, 1, 2, 3]
        await until(lambda: len(found.finished) == 3 * BATCH)
        assert sorted(scene.begun) == list(range(12))
        found.consume([0, 1, 2, 3])
        scene.version = 1
        assert await found.groups() == [4, 5, 6, 7]
        await until(lambda: len(scene.begun) == 4 * BATCH)  # a batch of version 1

    go(work())


def test_a_worker_whose_start_was_closed_abandons_the_groups_it_holds() -> None:
    """The flow took it for lost when a connection was reset, and now has it begin again."""

    async def work() -> None:
        store, events = some_store(), list[Event]()
        found = rollouts(Scene(), store)
        await found.use_workers({("0", 0)})
        groups = found.near().groups
        groups.report = events.append
        await until(lambda: bool(groups.finished))
        await groups.flush()
        [record] = [event.record for event in events if isinstance(event, Spooled)]
        records.close_start(store, "run", record.start, 2)
        groups.apply(Orders(begin=(Lease(number=90, index=90, floor=0),)))
        await until(lambda: bool(groups.finished))
        await groups.close()
        assert not groups.finished

    go(work())


def test_a_lease_that_is_over_before_the_order_is_sent_is_not_generated() -> None:
    async def work() -> None:
        scene = Scene(at_once=False)
        found = rollouts(scene, some_store())
        await found.use_workers({("0", 0)})
        leases = tuple(Lease(number=90 + n, index=90 + n, floor=0) for n in range(2))
        found.near().groups.apply(Orders(begin=leases, forget=(90,)))
        await until(lambda: 91 in scene.begun)
        assert 90 not in scene.begun

    go(work())


@given(st.integers(0, 3), st.integers(0, 2))
@settings(max_examples=20, deadline=None)
def test_while_it_is_held_only_what_a_stage_waits_for_begins(eta: int, before: int) -> None:
    """Held after so many iterations: none begins ahead, what has finished is in the store, and none waits for ever."""

    async def work(store: Store) -> None:
        scene = Scene()
        found = rollouts(scene, store, eta)
        await found.use_workers({("0", 0)})
        await until(lambda: found.links.ready())
        for scene.version in range(before):
            found.consume(await found.groups())
        found.held.set()
        scene.version, begun = before, begun_by(found)
        found.begin()
        await until(lambda: found.tracker.ready() == len(found.live))
        await found.flush()
        await until(lambda: all(found.spool.records([index]) for index in found.live))
        assert begun_by(found) == begun
        found.consume(await found.groups())
        scene.version += 1
        found.begin()
        assert begun_by(found) == max(begun, (before + 1) * BATCH)
        found.held.clear()
        found.begin()
        assert begun_by(found) == (before + 1 + eta + 1) * BATCH
        await found.close()

    go(work(some_store()))


def begun_by(found: Here) -> int:
    """How many groups have begun so far, where none has failed."""
    return found.tracker.settled.prefix + len(found.live)


def test_nothing_is_generated_that_no_iteration_is_left_to_train_on() -> None:
    async def work() -> None:
        scene = Scene()
        found = rollouts(scene, some_store(), eta=4, last=1)
        for _ in range(2):
            found.consume(await found.groups())
        assert sorted(scene.begun) == list(range(2 * BATCH)) and not found.live

    go(work())


def test_a_group_that_fails_is_tried_again_and_then_rejected(local_store: Store) -> None:
    async def work() -> None:
        scene = Scene(verdicts=lambda group: ValueError("no luck") if group in (1, 2) else None)
        found = rollouts(scene, local_store, group_attempts=3)
        assert await found.groups() == [0, 3, 4, 5]  # others take their place
        assert Counter(scene.begun)[1] == Counter(scene.begun)[2] == 3
        assert reasons(found) == {1: "failed: ValueError: no luck", 2: "failed: ValueError: no luck"}
        found.consume([0, 3, 4, 5])
        assert found.tracker.settled == SettledGroups(6)
        assert at(local_store, owner=2).recover(SettledGroups()) == ({}, [])  # killed now, it would try them again
        assert (await found.settled())[0] == SettledGroups(6)  # a commit is to count them
        again = at(local_store, owner=2)
        assert sorted(group.index for group in again.recover(SettledGroups())[1]) == [1, 2]

    go(work())


def test_a_group_that_is_lost_with_its_server_begins_again_with_the_newest_weights() -> None:
    """No attempt counts, and its deadline is that of the groups that begin now."""

    async def work() -> None:
        lost = {0, 3}
        scene = Scene(at_once=False, verdicts=lambda group: Lost("gone") if group in lost else None)
        found = rollouts(scene, some_store(), eta=2)
        taking = asyncio.ensure_future(found.groups())
        await until(lambda: len(scene.ends) == 3 * BATCH)
        scene.version = 1
        for group in sorted(lost):
            scene.ends.pop(group).set_result(None)
        await until(lambda: lost <= scene.ends.keys())
        assert {found.tracker.version(group) for group in lost} == {1} and not found.tracker.failures
        for group in (1, 2, 4, 5):
            scene.ends[group].set_result(None)
        assert await taking == [1, 2, 4, 5], "it waits for none of the lost ones"
        await found.close()

    go(work())


def test_a_group_that_does_not_end_costs_itself_alone(local_store: Store) -> None:
    class Endless(Scene):
        async def run(self, prompt: Prompt, context: WorkflowContext) -> list[Sample]:
            if prompt.group_id == 2:
                await asyncio.Event().wait()
            return await super().run(prompt, context)

    async def work() -> None:
        found = rollouts(Endless(), local_store, group_attempts=1, group_seconds=0.01)
        assert await found.groups() == [0, 1, 3, 4]
        assert "not done after 0.01 s (rollout.group_seconds)" in reasons(found)[2]
        await found.close()

    go(work())


def test_too_many_failed_groups_end_the_run_with_the_reason(local_store: Store) -> None:
    async def work() -> None:
        scene = Scene(verdicts=lambda group: KeyError("answer"))
        found = rollouts(scene, local_store, group_attempts=2, max_failed_groups=5)
        with pytest.raises(UserError, match=r"6 of the groups.* 2 attempts.*max_failed_groups.*KeyError: 'answer'"):
            await found.groups()
        await found.close()

    go(work())


def test_what_a_server_refuses_costs_the_group_and_what_the_workflow_calls_a_mistake_ends_the_stage(
    local_store: Store,
) -> None:
    async def work() -> None:
        scene = Scene(verdicts=lambda group: BadRequest("too long") if group == 0 else None)
        assert await rollouts(scene, local_store, group_attempts=1).groups() == [1, 2, 3, 4]
        scene = Scene(verdicts=lambda group: UserError("no such tool") if group == 0 else None)
        with pytest.raises(UserError, match="no such tool"):
            await rollouts(scene, some_store()).groups()

    go(work())


def test_without_a_server_the_stage_fails_and_its_groups_begin_again_when_it_is_repeated() -> None:
    async def work() -> None:
        down = [True]
        scene = Scene(verdicts=lambda group: ServerDown("gone") if down[0] and group == 3 else None)
        found = rollouts(scene, some_store())
        with pytest.raises(ServerDown):
            await found.groups()
        down[0] = False
        assert await found.groups() == [0, 1, 2, 3]
        assert Counter(scene.begun) == {0: 1, 1: 1, 2: 1, 3: 2} and not found.tracker.failures

    go(work())


def test_a_workflow_that_leaves_the_program_does_not_end_it(local_store: Store) -> None:
    async def work() -> None:
        scene = Scene(verdicts=lambda group: SystemExit(3) if group == 0 else None)
        assert await rollouts(scene, local_store, group_attempts=1).groups() == [1, 2, 3, 4]

    go(work())


@pytest.mark.parametrize("answer", [None, [], "text", [1]])
def test_what_is_no_list_of_samples_costs_the_group_and_is_named(local_store: Store, answer: Any) -> None:
    class Wrong(Scene):
        async def run(self, prompt: Prompt, context: WorkflowContext) -> list[Sample]:
            return cast(list[Sample], answer) if prompt.group_id == 1 else await super().run(prompt, context)

    async def work() -> None:
        found = rollouts(Wrong(), local_store, group_attempts=1)
        assert await found.groups() == [0, 2, 3, 4]
        assert "not its samples in a list" in reasons(found)[1]

    go(work())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"versions": [-1, 0]}, "not as many `versions`"),
        ({"logprobs": []}, "not as many `logprobs`"),
        ({"logprobs": None}, "not as many `logprobs`"),
        ({"loss_mask": [True] * 4}, "not as many `loss_mask`"),
        ({"loss_mask": None}, "not as many `loss_mask`"),
        ({"stale_kv": [True]}, "not as many `stale_kv`"),
        ({"input_ids": [[1, 2], [3, 4], [5, 6]]}, "not as many `input_ids`"),
        ({"completion": 7}, "Error: "),
        ({"completion": None}, "one of these is None"),
        ({"prompt": replace(sample(1, 0).prompt, answer=4)}, "Error: "),
        ({"seed": 2**63}, "Error: "),
        ({"turns": "two"}, "ArrowInvalid: "),
        ({"seconds": "1 s"}, "ArrowInvalid: "),
        ({"versions": [-1, None, 0]}, "TypeError"),
        ({"versions": [-1, -1, 0]}, "a token of weights version -1; its group was given no version before 0"),
        ({"sample_index": 1}, "not in the order of `sample_index`"),
    ],
)
def test_a_sample_that_is_not_sound_costs_its_group_and_is_named(
    local_store: Store, change: dict[str, Any], says: str
) -> None:
    """It neither stays under way for ever, nor is it committed for the trainer to refuse."""

    class Wrong(Scene):
        async def run(self, prompt: Prompt, context: WorkflowContext) -> list[Sample]:
            [found] = await super().run(prompt, context)
            wrong = replace(found, **change) if prompt.group_id == 1 else found
            return [wrong, replace(found, sample_index=1)]

    async def work() -> None:
        found = rollouts(Wrong(), local_store, group_attempts=1)
        assert await found.groups() == [0, 2, 3, 4]
        assert says in reasons(found)[1]

    go(work())


def test_a_failure_between_two_iterations_ends_the_second(local_store: Store) -> None:
    async def work() -> None:
        scene = Scene(verdicts=lambda group: KeyError("x") if group >= BATCH else None)
        found = rollouts(scene, local_store, eta=1, group_attempts=1, max_failed_groups=0)
        found.consume(await found.groups())
        await until(lambda: found.rejections.failed > 0)
        with pytest.raises(UserError, match="max_failed_groups"):
            await found.groups()

    go(work())


def test_a_rollout_of_another_start_settles_its_own_groups() -> None:
    """Groups that this start is still at, and those that are too old without theirs, are given up and begin again."""

    async def work() -> None:
        scene = Scene(at_once=False)
        found = rollouts(scene, some_store(), eta=1)
        taking = asyncio.ensure_future(found.groups())
        await until(lambda: len(scene.ends) == 2 * BATCH)
        for group in range(4, 8):
            scene.ends[group].set_result(None)
        assert await taking == [4, 5, 6, 7]
        found.consume([0, 1, 2, 9])  # 9 was not begun here; 3 and 4 … 7 are one too many for iteration 1
        assert found.tracker.rule.holds(1, Counter(found.live.values()))
        scene.at_once, scene.version = True, 1
        for future in scene.ends.values():
            future.done() or future.set_result(None)
        taken = await found.groups()
        assert len(taken) == BATCH and not {0, 1, 2, 9} & set(taken)
        await until(lambda: not found.near().groups._running)
        assert not {0, 1, 2, 9} & set(found.live)

    go(work())


def test_a_workflow_that_cancels_itself_has_failed(local_store: Store) -> None:
    async def work() -> None:
        scene = Scene(verdicts=lambda group: asyncio.CancelledError() if group == 0 else None)
        assert await rollouts(scene, local_store, group_attempts=1).groups() == [1, 2, 3, 4]

    go(work())


def test_no_more_groups_are_under_way_than_the_servers_can_be_at() -> None:
    async def work() -> None:
        scene = Scene(at_once=False, capacity=3)
        taking = asyncio.ensure_future(rollouts(scene, some_store(), eta=2).groups())
        for group in range(BATCH):
            await until(lambda: group in scene.ends)  # noqa: B023
            assert len([future for future in scene.ends.values() if not future.done()]) <= 3
            scene.ends[group].set_result(None)
        assert await taking == [0, 1, 2, 3]

    go(work())


def test_groups_of_weights_that_the_next_iteration_does_not_have_wait() -> None:
    """A start that goes back behind a publication has them in its spool."""
    tracker = GroupTracker(Staleness(lambda k: 2, 9, lambda k: BATCH), 3)
    tracker.restore({20: 3, 21: 4})
    assert tracker.finished.of == {20: 3}


def test_the_weaker_rule_keeps_what_is_late() -> None:
    tracker = GroupTracker(Staleness(lambda k: 1, 9, lambda k: BATCH, "admission"), 3)
    tracker.restore({20: 0, 21: 4})
    assert tracker.finished.of == {20: 0}


# ── the spool ───────────────────────────────────────────────────────────────────────────────────────────────────────


def spooled(store: Store, eta: int, flush_seconds: float) -> list[int]:
    """What a start of the flow took, which is over after its first batch."""
    found = rollouts(Scene(), store, eta, flush_seconds=flush_seconds)
    taken: list[int] = []

    async def work() -> None:
        taken.extend(await found.groups())
        await until(lambda: found.tracker.ready() == (eta + 1) * BATCH)
        if not flush_seconds:
            await until(lambda: all(found.spool.records([index]) for index in found.live))

    go(work())
    return taken


def test_what_waits_for_too_long_outlives_the_flow(local_store: Store) -> None:
    taken = spooled(local_store, eta=2, flush_seconds=0.0)
    later = at(local_store, owner=2)
    waiting, rejected = later.recover(SettledGroups().add(taken))
    assert sorted(waiting) == list(range(4, 12)) and not rejected
    rows = spooled_rows(local_store, later.records(range(4, 12)), "rollout").sort_by("group_id")
    assert rows["input_ids"].to_pylist() == [[1, group, 3] for group in range(4, 12)]
    assert set(waiting.values()) == {0}


def test_what_is_taken_soon_is_not_spooled(local_store: Store) -> None:
    spooled(local_store, eta=2, flush_seconds=3600.0)
    assert [record.kind for record in records.read_spool(local_store, "run")] == ["opened"]


def test_a_start_that_lives_on_can_record_nothing_once_the_next_has_looked(local_store: Store) -> None:
    first = writer(local_store)
    first.write({0: (0, [sample(0, 0)])})
    second = at(local_store, owner=2)
    assert list(second.recover(SettledGroups())[0]) == [0]
    with pytest.raises(StartClosed, match="ended by owner 2"):
        first.write({1: (0, [sample(1, 0)])})
    writer(local_store, owner=2).write({1: (0, [sample(1, 0)])})
    assert sorted(at(local_store, owner=3).recover(SettledGroups())[0]) == [0, 1]


def test_groups_made_with_other_settings_begin_again(local_store: Store, caplog: pytest.LogCaptureFixture) -> None:
    writer(local_store).write({0: (0, [sample(0, 0)])}, [RejectedGroup(index=5, reason="failed: boom")])
    assert at(local_store, owner=2, made_with="other").recover(SettledGroups()) == ({}, [])
    assert "1 groups in the spool were made with other settings" in caplog.text
    assert list(at(local_store, owner=3).recover(SettledGroups())[0]) == [0]  # as they were made again


def test_a_restart_reads_no_record_whose_groups_are_all_settled(local_store: Store) -> None:
    """Whichever worker has written them: here two, whose starts are concurrent."""
    spool, first, second = at(local_store), writer(local_store), writer(local_store)
    for group in range(6):
        for record in (second if group % 2 else first).write({group: (0, [sample(group, 0)])}):
            spool.note(record, [group])
    assert spool.places() == [(0, 1), (1, 1)]
    spool.forget([0, 2, 1])
    assert spool.places() == [(0, 3), (1, 2)]
    spool.forget([4])
    assert spool.places() == [(0, 4), (1, 2)]  # the first may record more
    later = at(local_store, owner=2)
    later.first = spool.places()
    assert sorted(later.recover(SettledGroups().add([0, 2, 1, 4]))[0]) == [3, 5]
    assert later.places() == [(1, 2)]
    later.forget([3])
    assert later.places() == [(1, 3)]
    later.forget([5])
    assert later.places() == [(2, 0)]


def test_a_start_that_nobody_has_spoken_of_is_read_from_its_beginning(local_store: Store) -> None:
    """A worker has recorded a group, and the flow was killed before it heard of that."""
    spool = at(local_store)
    for group in (0, 1, 2):
        [record] = writer(local_store).write({group: (0, [sample(group, 0)])})
        if group != 1:
            spool.note(record, [group])
    spool.forget([0, 2])
    later = at(local_store, owner=2)
    later.first = spool.places()
    assert list(later.recover(SettledGroups().add([0, 2]))[0]) == [1]


def test_a_group_that_two_records_hold_is_taken_from_one(local_store: Store) -> None:
    """A worker that was given up for lost has recorded group 0, too, and one that another iteration needs."""
    spool = at(local_store)
    [lost] = writer(local_store).write({0: (0, [sample(0, 0)]), 1: (0, [sample(1, 0)])})
    [other] = writer(local_store).write({0: (1, [sample(0, 1)]), 2: (1, [sample(2, 1)])})
    spool.note(lost, [1])
    spool.note(other, [0])
    rows = spooled_rows(local_store, spool.records([0, 1]), "rollout").sort_by("group_id")
    assert rows["group_id"].to_pylist() == [0, 1] and rows["version_min"].to_pylist() == [1, 0]


def test_a_store_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local_store: Store) -> None:
    monkeypatch.setattr("areal_tasks.rollout.background.RETRY_SECONDS", 0.01)
    create, failures = LocalBackend.create, [StoreError("full"), StoreError("full")]

    def flaky(self: LocalBackend, path: str, content: bytes) -> None:
        if failures and not path.endswith("/0.json"):  # which opens the start
            raise failures.pop()
        create(self, path, content)

    monkeypatch.setattr(LocalBackend, "create", flaky)
    spooled(local_store, eta=1, flush_seconds=0.0)
    assert not failures


@pytest.mark.parametrize("failure", [StoreError, Unavailable])
def test_a_store_that_takes_no_iteration_costs_no_group_that_the_spool_holds(
    local_store: Store, failure: type[StoreError]
) -> None:
    async def work() -> None:
        scene, store = Scene(), FailingStore(local_store.url, Path(local_store.uri("")))
        found = rollouts(scene, store, flush_seconds=0.0)
        await found.use_workers({("0", 0)})
        await until(lambda: len(found.spool.records(range(BATCH))) and not found._assigned)
        store.failure, store.times = failure, 1
        with pytest.raises(failure, match=SAYS_SO):
            await found.groups()
        assert await found.groups() == list(range(BATCH)) and Counter(scene.begun).most_common(1) == [(0, 1)]

    go(work())


def test_groups_whose_rows_in_the_spool_are_damaged_begin_again(local_store: Store) -> None:
    async def work() -> None:
        scene = Scene()
        found = rollouts(scene, local_store, flush_seconds=0.0)
        await found.use_workers({("0", 0)})
        await until(lambda: len(found.spool.records(range(BATCH))) and not found._assigned)
        [shard] = found.spool.records([1])[0].tables["rollout"].shards
        Path(local_store.uri(shard.path)).unlink()
        assert await found.groups() == list(range(BATCH)) and scene.begun.count(1) == 2

    go(work())


def test_groups_under_way_are_given_up_and_finished_ones_kept_when_the_run_ends(local_store: Store) -> None:
    async def work() -> None:
        scene = Scene(at_once=False)
        found = rollouts(scene, local_store, flush_seconds=3600.0)
        taking = asyncio.ensure_future(found.groups())
        await until(lambda: len(scene.ends) == BATCH)
        scene.ends[2].set_result(None)
        await until(lambda: 2 in found.finished)
        await found.close()
        taking.cancel()
        assert list(at(local_store, owner=2).recover(SettledGroups())[0]) == [2]

    go(work())


def test_a_record_that_was_stored_and_not_answered_is_its_own(
    local_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = writer(local_store)
    spool.write({0: (0, [sample(0, 0)])})
    create = LocalBackend.create

    def unanswered(self: LocalBackend, *arguments: Any) -> None:
        create(self, *arguments)
        monkeypatch.undo()
        raise StoreError("no answer")

    def unread(self: LocalBackend, path: str) -> bytes:
        raise StoreError("no answer")

    with monkeypatch.context() as patch, pytest.raises(StoreError):
        patch.setattr(LocalBackend, "create", unanswered)
        patch.setattr(LocalBackend, "read", unread)
        spool.write({1: (0, [sample(1, 0)])})
    spool.write({1: (0, [sample(1, 0)]), 2: (0, [sample(2, 0)])})
    assert sorted(at(local_store, owner=2).recover(SettledGroups())[0]) == [0, 1, 2]


def test_a_rejection_of_a_group_that_waits_does_not_count(local_store: Store) -> None:
    writer(local_store).write(
        {1: (0, [sample(1, 0)])}, [RejectedGroup(index=1, reason="failed: by an earlier start that lived on")]
    )
    waiting, rejected = at(local_store, owner=2).recover(SettledGroups())
    assert list(waiting) == [1] and not rejected


def test_tables_of_the_spool_are_rollout_tables(local_store: Store) -> None:
    spool = writer(local_store)
    later = at(local_store, owner=2)
    spool.write({3: (1, [sample(3, 1)]), 1: (0, [sample(1, 0)])})
    later.recover(SettledGroups())
    table = spooled_rows(local_store, later.records([1]), "rollout")
    assert isinstance(table, pa.Table) and table["sample_id"].to_pylist() == ["1-0"]
    assert table["stale_kv"].to_pylist() == [[False, False, False]]


def test_what_an_unanswered_write_recorded_is_not_taken_for_a_later_attempt(
    local_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease was over meanwhile, and the group was generated again: the rows are those of the newer attempt."""
    create = LocalBackend.create

    def unanswered(backend: LocalBackend, path: str, content: bytes) -> None:
        create(backend, path, content)
        raise StoreError("no answer")

    def unread(backend: LocalBackend, path: str) -> bytes:
        raise StoreError("no answer")

    async def work() -> None:
        scene = Scene()
        found = rollouts(scene, local_store, eta=2, last=2, flush_seconds=3600.0)
        await found.use_workers({("0", 0)})
        await until(lambda: found.tracker.ready() == 3 * BATCH)
        with monkeypatch.context() as patch, pytest.raises(StoreError):
            patch.setattr(LocalBackend, "create", unanswered)
            patch.setattr(LocalBackend, "read", unread)
            await found.flush()
        scene.version = 1
        found._lose([0])
        await until(lambda: scene.begun.count(0) == 2 and found.tracker.ready() == 3 * BATCH)
        await found.flush()
        await until(lambda: not found._assigned)
        [record] = found.spool.records([0])
        rows = spooled_rows(local_store, [record], "rollout")
        assert rows["version_min"].to_pylist() == [1] == [found.tracker.finished.of[0]]

    go(work())
