"""The garbage collector during a run: it lets the answers of an iteration be, and nothing stays changed afterwards."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from areal_tasks.garbage import rare_collections


def collections_while_reading_answers() -> int:
    """How often the collector runs while 20 answers of 8 samples come and go: a list for each token, as in JSON."""
    seen: list[str] = []

    def note(phase: str, _info: dict[str, Any]) -> None:
        seen.append(phase)

    gc.callbacks.append(note)
    try:
        for _ in range(20):
            answer = [[-0.5, token, None] for token in range(8 * 512)]
            del answer
    finally:
        gc.callbacks.remove(note)
    return seen.count("start")


def test_answers_set_off_no_collection() -> None:
    assert collections_while_reading_answers() >= 20
    with rare_collections():
        assert collections_while_reading_answers() == 0


def test_the_collector_is_as_before_also_after_a_failure() -> None:
    before = gc.get_threshold()
    with pytest.raises(ValueError, match="stopped"), rare_collections():
        assert gc.isenabled() and gc.get_threshold() != before
        raise ValueError("stopped")
    assert gc.get_threshold() == before


def test_a_collector_that_is_off_or_rarer_stays_so() -> None:
    before = gc.get_threshold()
    try:
        for own in ((0, 10, 10), (10**9, 10, 10)):
            gc.set_threshold(*own)
            with rare_collections():
                assert gc.get_threshold()[0] == own[0]
    finally:
        gc.set_threshold(*before)
