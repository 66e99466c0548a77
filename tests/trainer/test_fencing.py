"""Owners, versions and repeats."""

from __future__ import annotations

import threading

import pytest

from areal_tasks.engines.trainer.fencing import Fence, StaleCommand


def _loaded(version: int = 3) -> Fence[str]:
    fence: Fence[str] = Fence()
    fence.restart(version)
    return fence


def test_a_lower_owner_is_refused_for_ever() -> None:
    fence = _loaded()
    for owner in (2, 2, 5):
        fence.admit(owner)
    for _ in range(2):
        with pytest.raises(StaleCommand, match="start #2 of this run was superseded by start #5"):
            fence.admit(2)
    fence.restart(9)
    with pytest.raises(StaleCommand):
        fence.admit(4)
    fence.admit(5)


def test_the_highest_owner_wins_a_race() -> None:
    fence = _loaded()
    barrier = threading.Barrier(8)

    def enter(owner: int) -> None:
        barrier.wait()
        for _ in range(200):
            try:
                fence.admit(owner)
            except StaleCommand:
                return

    threads = [threading.Thread(target=enter, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fence.owner == 7


def test_a_change_makes_the_next_version_and_is_recalled() -> None:
    fence = _loaded()
    assert fence.recall(3, "a") is None
    assert fence.change(3, "a", lambda: "done") == "done"
    assert fence.version == 4
    assert fence.recall(3, "a") == "done"
    assert fence.recall(3, "b") is None
    with pytest.raises(StaleCommand, match="version 3 was expected, but version 4 is held"):
        fence.change(3, "b", lambda: "never")


def test_only_the_last_change_is_recalled() -> None:
    fence = _loaded()
    fence.change(3, "a", lambda: "one")
    fence.change(4, "b", lambda: "two")
    assert (fence.recall(3, "a"), fence.recall(4, "b")) == (None, "two")


def test_a_failed_change_leaves_nothing_to_go_on_from() -> None:
    fence = _loaded()
    with pytest.raises(ZeroDivisionError):
        fence.change(3, "a", lambda: str(1 // 0))
    with pytest.raises(StaleCommand, match="nothing is loaded"):
        fence.change(3, "a", lambda: "again")
    fence.restart(3)
    assert fence.change(3, "a", lambda: "again") == "again"


def test_a_load_forgets_what_was_done_to_the_old_memory() -> None:
    fence = _loaded()
    fence.change(3, "a", lambda: "one")
    fence.restart(3)
    assert fence.recall(3, "a") is None
    assert fence.change(3, "a", lambda: "two") == "two"
