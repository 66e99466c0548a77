"""Deterministic mode: a sequence's bits do not depend on its slot, its neighbours or its time of arrival."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_tasks.engines.embedded.engine import Engine
from areal_tasks.engines.embedded.runner import CHUNK, SHORT_CHUNK, _keep, ladder, proven_shapes
from areal_tasks.engines.embedded.sequence import Sequence
from tests.inference.helpers import MAX_LENGTH, Running, make_engine, make_sequences

Bits = tuple[list[int], list[float], object]
SLOTS = 24


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Iterator[Engine]:
    engine = make_engine(model_folder, slots=SLOTS, threads=2)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def small_engine(model_folder: Path) -> Iterator[Engine]:
    engine = make_engine(model_folder, slots=5, threads=2)
    yield engine
    engine.close()


def sequences(case: int) -> list[Sequence]:
    """Request number `case`: a group of 1 to 4 samples with lengths that cross the chunk and length buckets."""
    length = [1, 2, 8, 15, 16, 17, 31, 40, 63, 64, 65, 100][case % 12]
    prompt = [3 + (case * 5 + 3 * i) % 20 for i in range(length)]
    temperature = [1.0, 0.0, 0.7][case % 3]
    return make_sequences(
        prompt,
        max_new_tokens=1 + 11 * (case % 5),
        temperature=temperature,
        sampling_seed=case,
        n=1 + case % 4,
        ignore_eos=case % 2 == 0,
    )


def bits(done: list[Sequence]) -> list[Bits]:
    return [(s.output, s.logprobs, s.finish) for s in done]


@pytest.fixture(scope="module")
def alone(engine: Engine) -> object:
    """The bits of each request when nothing else runs."""
    return cache(lambda case: bits(Running(engine, sequences(case)).wait()))


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    cases=st.lists(st.integers(0, 59), min_size=1, max_size=25),
    pauses=st.lists(st.sampled_from([0.0, 0.0, 0.001, 0.004]), min_size=25, max_size=25),
    few_slots=st.booleans(),
)
def test_bits_do_not_depend_on_company_or_time(
    engine: Engine, small_engine: Engine, alone: object, cases: list[int], pauses: list[float], few_slots: bool
) -> None:
    assert callable(alone)
    expected = [alone(case) for case in cases]
    chosen = small_engine if few_slots else engine
    running = []
    for case, pause in zip(cases, pauses, strict=False):
        running.append(Running(chosen, sequences(case)))
        time.sleep(pause)  # requests come at any time
    assert [bits(run.wait()) for run in running] == expected


def test_one_request_of_many_prompts_gives_the_bits_of_many_requests(engine: Engine, alone: object) -> None:
    assert callable(alone)
    together = Running(engine, [s for case in range(30) for s in sequences(case)]).wait()
    assert bits(together) == [b for case in range(30) for b in alone(case)]


def test_aborts_beside_it_do_not_reach_a_sequence(engine: Engine, alone: object) -> None:
    assert callable(alone)
    for case in range(4, 16):
        doomed = [Running(engine, sequences(c)) for c in range(20, 30)]
        running = Running(engine, sequences(case))
        engine.abort({s for run in doomed for s in run.sequences}.__contains__)
        assert bits(running.wait()) == alone(case)
        for run in doomed:
            run.wait()


def test_smaller_passes_were_proven(engine: Engine) -> None:
    """Not a law of nature, but what makes few sequences cheap: on the CPUs that we know all shapes prove equal."""
    shapes = engine.runner.shapes
    assert shapes.rows[-1] == SLOTS
    assert shapes.lengths[-1] == MAX_LENGTH
    assert set(shapes.prefill_rows) == {SHORT_CHUNK, CHUNK}
    with torch.inference_mode():
        assert proven_shapes(engine.runner) == shapes


def test_a_shape_with_other_bits_is_dropped() -> None:
    def run(n: int) -> torch.Tensor:
        return torch.ones(n, 2) + (1e-7 if n == 12 else 0)

    assert _keep([8, 12, 16], run) == [8, 16]


def test_ladders_reach_their_end_in_small_steps() -> None:
    assert ladder(8, 64) == [8, 12, 16, 24, 32, 48, 64]
    assert ladder(32, 40) == [32, 40]
    assert ladder(8, 8) == [8]
    assert ladder(1, 8) == [1, 2, 3, 4, 6, 8]
