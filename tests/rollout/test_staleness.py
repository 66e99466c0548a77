"""The staleness rule against its definition, and the tracker under random interleavings."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_tasks.rollout.group_tracker import GroupTracker
from areal_tasks.rollout.settled import SettledGroups
from areal_tasks.rollout.staleness import Staleness, Versions

BATCHES = st.lists(st.integers(1, 5), min_size=1, max_size=12)


def staleness(eta: int, batches: list[int]) -> Staleness:
    return Staleness(lambda k: eta, len(batches) - 1, batches.__getitem__)


def schedulable(k: int, deadlines: list[int], batches: list[int]) -> bool:
    """By trying: iterations k … last take the most urgent groups; every group must be taken by its deadline."""
    left = sorted(deadlines)
    for j in range(k, len(batches)):
        taken, left = left[: batches[j]], left[batches[j] :]
        if any(deadline < j for deadline in taken):
            return False
    return not left


@given(st.integers(0, 4), BATCHES, st.lists(st.integers(0, 11), max_size=20), st.integers(0, 11))
def test_the_invariant_holds_exactly_where_a_schedule_exists(
    eta: int, batches: list[int], versions: list[int], k: int
) -> None:
    rule_, k = staleness(eta, batches), min(k, len(batches) - 1)
    assert rule_.holds(k, Counter(versions)) == schedulable(k, [rule_.deadline(v) for v in versions], batches)


@given(st.integers(0, 4), BATCHES, st.lists(st.integers(0, 11), max_size=20), st.integers(0, 11), st.integers(0, 11))
def test_room_is_the_largest_number_that_keeps_the_invariant(
    eta: int, batches: list[int], versions: list[int], version: int, k: int
) -> None:
    rule_, k = staleness(eta, batches), min(k, len(batches) - 1)
    live = Counter(versions)
    if not rule_.holds(k, live):
        return
    room = rule_.room(k, live, version)
    assert rule_.holds(k, live + Counter({version: room}))
    assert not rule_.holds(k, live + Counter({version: room + 1}))


@given(st.integers(0, 6), st.integers(1, 8), st.integers(0, 5), st.integers(0, 200))
def test_with_constant_batches_begun_in_order_it_is_the_rule_of_areal(eta: int, b: int, k: int, live: int) -> None:
    """accepted + running < (η + version + 1) · B, where version is k and k · B groups have been consumed."""
    rule_ = Staleness(lambda k: eta, 10_000, lambda j: b)
    oldest_first = Counter(
        k + i // b - eta for i in range(live) if k + i // b - eta <= k
    )  # begun in order, as early as allowed
    room = rule_.room(k, oldest_first, k) if rule_.holds(k, oldest_first) else 0
    assert room == max(0, (eta + k + 1) * b - k * b - oldest_first.total())


CHANGING = st.lists(st.integers(1, 4), min_size=12, max_size=12)


@given(CHANGING, st.integers(0, 11))
def test_a_deadline_is_the_last_iteration_until_which_each_allows_the_lag(etas: list[int], version: int) -> None:
    rule_ = Staleness(etas.__getitem__, 11, lambda k: 1)
    last = rule_.deadline(version)
    assert version <= last <= 11 and all(k - version <= etas[k] for k in range(version + 1, last + 1))
    assert last == 11 or last + 1 - version > etas[last + 1]


@given(CHANGING, BATCHES, st.lists(st.tuples(st.integers(0, 11), st.booleans()), max_size=20), st.integers(0, 11))
def test_another_rule_keeps_as_many_finished_groups_as_have_a_schedule(
    etas: list[int], batches: list[int], groups: list[tuple[int, bool]], k: int
) -> None:
    """Then as many others: whatever is given up, no more could be kept."""
    batches = (batches * 12)[:12]
    after = Staleness(etas.__getitem__, 11, batches.__getitem__)
    tracker = GroupTracker(Staleness(lambda k: 20, 11, lambda k: 99), k)
    for index, (version, finished) in enumerate(groups):
        (tracker.finished if finished else tracker.running).add(index, min(version, k))
    before = tracker.running.of | tracker.finished.of
    running, finished_ones = tracker.change_rule(after)
    kept, live = Counter(tracker.finished.of.values()), Counter((tracker.running.of | tracker.finished.of).values())
    assert after.holds(k, live) and len(before) == live.total() + len(running) + len(finished_ones)
    assert not any(group in tracker for group in [*running, *finished_ones])
    assert not any(after.holds(k, live + Counter([before[group]])) for group in running)
    assert not any(after.holds(k, kept + Counter([before[group]])) for group in finished_ones)


@given(BATCHES, st.integers(0, 20), st.integers(0, 20), st.integers(0, 11))
def test_the_weaker_rule_keeps_as_many_groups_as_iterations_take(
    batches: list[int], finished: int, running: int, k: int
) -> None:
    batches = (batches * 12)[:12]
    tracker = GroupTracker(Staleness(lambda k: 20, 11, lambda k: 99, "admission"), k)
    for index in range(finished + running):
        (tracker.finished if index < finished else tracker.running).add(index, index % (k + 1))
    without = tracker.change_rule(Staleness(lambda k: 1, 11, batches.__getitem__, "admission"))
    most = sum(batches[k:])
    assert len(tracker.finished.of) == min(finished, most) and tracker.live() == min(finished + running, most)
    assert tracker.live() + sum(map(len, without)) == finished + running


def test_the_weaker_rule_looks_no_further_than_the_groups_go() -> None:
    asked = list[int]()

    def batch(k: int) -> int:
        asked.append(k)
        return 100

    tracker = GroupTracker(Staleness(lambda k: 4, 100_000, batch, "admission"), 7)
    tracker.restore(dict.fromkeys(range(500), 0))
    assert tracker.ready() == 500 and set(asked) == set(range(7, 12)) and len(asked) <= 500 * 5


def test_synchronous_training_admits_one_batch_of_the_newest_version() -> None:
    rule_ = Staleness(lambda k: 0, 9, lambda j: 4)
    assert [rule_.room(3, {}, version) for version in (2, 3)] == [0, 4]
    assert rule_.room(3, {3: 4}, 3) == 0


def test_what_begins_while_an_iteration_writes_its_groups_is_not_too_old_afterwards() -> None:
    """Group 1 began with version 0 and finished with 1, which leaves a place for one more group of version 0."""
    tracker = GroupTracker(staleness(1, [1, 1, 1]), 1, SettledGroups().add([0]))
    assert tracker.lease(0) == [1]
    tracker.finish(1, version=1)
    assert tracker.take() == [1] and tracker.lease(0) == []
    assert tracker.lease(1) == [2] and tracker.consume([1]) == []


def test_groups_that_an_iteration_chose_and_another_start_left_are_still_counted() -> None:
    """That start chose groups 8 and 9, so that 0 and 1 wait for iterations 1 and 2, which have no place for more."""
    tracker = GroupTracker(staleness(2, [2, 1, 1]), 0)
    for group in tracker.lease(0):
        tracker.finish(group, version=0)
    assert tracker.take() == [0, 1]
    tracker.consume([8, 9])
    assert tracker.finished.of == {0: 0, 1: 0} and tracker.lease(0) == []


def test_the_weaker_rule_lets_an_iteration_leave_a_slow_group_behind() -> None:
    finished = Versions()
    for group in (1, 2, 3, 4):
        finished.add(group, 0)
    strict = Staleness(lambda k: 0, 9, lambda j: 4)
    weak = Staleness(lambda k: 0, 9, lambda j: 4, "admission")
    assert strict.take(0, finished, {0: 1}) is None  # the slow one may be trained on by iteration 0 alone
    assert weak.take(0, finished, {0: 1}) == [1, 2, 3, 4]


VERSIONED = st.lists(st.tuples(st.integers(0, 11), st.booleans()), max_size=20)


@given(st.integers(0, 4), BATCHES, VERSIONED, st.integers(0, 11))
def test_an_iteration_takes_what_is_due_first_and_only_if_the_rest_can_follow(
    eta: int, batches: list[int], groups: list[tuple[int, bool]], k: int
) -> None:
    rule_, k = staleness(eta, batches), min(k, len(batches) - 1)
    finished, running = Versions(), Versions()
    for group, (version, done) in enumerate(groups):
        (finished if done else running).add(group, version)
    due_first = sorted(finished.of, key=lambda group: (rule_.deadline(finished.of[group]), group))
    left = Counter(finished.of[group] for group in due_first[batches[k] :]) + running.counts
    taken = rule_.take(k, finished, running.counts)
    assert (taken is not None) == (len(due_first) >= batches[k] and rule_.holds(k + 1, left))
    assert taken is None or taken == sorted(due_first[: batches[k]])


@given(st.lists(st.integers(0, 40), unique=True), st.integers(0, 10))
def test_settled_groups_are_a_set(indices: list[int], prefix: int) -> None:
    settled = SettledGroups(prefix).add(indices)
    expected = set(range(prefix)) | set(indices)
    assert {i for i in range(60) if i in settled} == expected
    assert (
        GroupTracker(staleness(4, [9] * 9), 0, settled).lease(0, 5) == [i for i in range(100) if i not in expected][:5]
    )
    assert all(b > settled.prefix for b in settled.beyond)


@pytest.mark.parametrize("eta", [0, 1, 4])
def test_lengths_trained_on_are_the_lengths_generated(eta: int) -> None:
    """With heavy-tailed lengths no group is dropped or overtaken for ever: the two multisets are one."""
    import random

    draw, batches = random.Random(eta), [6] * 40
    lengths = {i: draw.lognormvariate(0, 1.5) for i in range(6 * 40 + 200)}
    tracker, clock, ends, order = GroupTracker(staleness(eta, batches), 0), 0.0, {}, []
    version = 0
    while tracker.next < len(batches):
        ends |= {index: clock + lengths[index] for index in tracker.lease(version)}
        if (chosen := tracker.take()) is not None:
            tracker.consume(chosen)
            order += chosen
            version = tracker.next
            continue
        index = min(ends, key=ends.__getitem__)
        clock = ends.pop(index)
        tracker.finish(index, tracker.running.of[index])
    assert sorted(order) == list(range(6 * 40))
