"""The simulations of asynchronous runs, where what they give is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import simulate_scale
from benchmarks.simulate import Layout, Load, Simulation, Times, synchronous
from benchmarks.simulate_scale import Pace, shares, speed_ups

TIMES = Times()
SMALL = Load(groups=16, iterations=12)
UNITS = {
    "group": {"cpu": 0.01}, "spool_record": {"cpu": 0.001}, "request": {"seconds": 1e-5}, "task": {"seconds": 0.001},
    "requests": 10, "tasks": 5,
}  # fmt: skip


def test_with_equal_lengths_a_synchronous_iteration_lasts_as_long_as_its_steps() -> None:
    load, times = replace(SMALL, sigma=0.0), replace(TIMES, pause=0.0, step_per_token=0.0)
    found = Simulation(load, synchronous(4), times).run()
    samples, tokens = load.groups * load.group_size, load.groups * load.group_size * (load.prompt + load.median)
    generating = load.median * (times.step + times.step_per_sample * samples / 4)
    training = tokens / (4 * times.train_rate) + times.train_fixed
    assert found.seconds == pytest.approx(load.iterations * (generating + training + times.publish) - times.publish)


def test_the_first_training_is_compiled_once() -> None:
    load = replace(SMALL, sigma=0.0)
    plain, compiled = (Simulation(load, synchronous(4), replace(TIMES, compilation=c)).run().ends for c in (0.0, 9.0))
    assert [late - early for early, late in zip(plain, compiled, strict=True)] == pytest.approx([9.0] * load.iterations)


@pytest.mark.parametrize("publish", [0.2, 100.0])
def test_weights_that_take_longer_than_an_iteration_are_skipped_and_never_too_old(publish: float) -> None:
    found = Simulation(SMALL, Layout(2, 2, 2), replace(TIMES, publish=publish)).run()
    assert sum(found.lags.values()) == SMALL.groups * SMALL.iterations and max(found.lags) <= 2
    # η + 1 iterations for each publication at most, and the first need none
    assert found.seconds >= publish * (SMALL.iterations / 3 - 1)


def test_what_saturates_slows_the_run_down(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = []

    def fake(gpus: int, eta: int, times: Times) -> Pace:
        stored.append(times.publish)
        return Pace(max(10.0, times.publish / 2), 1.0)

    monkeypatch.setattr(simulate_scale, "pace", fake)
    asynchronous, base = Pace(10.0, 1.0), Pace(30.0, 25.0)

    def found(gpus: int) -> dict[str, float]:
        return speed_ups(asynchronous, base, shares(gpus, 10.0, UNITS, weights_gb=1.0, store_gb=1.0), TIMES)

    assert found(4) == {"alone": 3.0, "store": 3.0, "all": 3.0}
    assert found(64) == {"alone": 3.0, "store": 30 / 16, "all": 30 / 20.48}  # the worker needs 20.48 s, the store 32
    generating = 25.0 - TIMES.train_fixed - TIMES.publish
    assert found(128)["all"] == pytest.approx((30 + 40.96 - generating) / 40.96)
    assert stored == [2.0, 32.0, 64.0]
