"""When a run warns: the causes as functions of metrics, and that each is said once as long as it lasts."""

from __future__ import annotations

import math
import random

import pytest

from flows.alerts import Alert, AlertMonitor, RewardBaseline, reward_collapse, threshold_alerts
from schemas.recipe.sections import Alerts


def causes(of: AlertMonitor, rewards: list[float]) -> list[tuple[int, str]]:
    """(iteration, cause) of every alert that these rewards lead to."""
    return [(k, alert.cause) for k, reward in enumerate(rewards) for alert in of({"verify": {"reward": reward}})]


def alone(stage: str, metrics: dict[str, float], eta: int = 0, **settings: float) -> Alert | None:
    """The one alert that these metrics of a stage raise; None without any."""
    found = list(threshold_alerts({stage: metrics}, eta, Alerts.model_validate(settings)))
    assert len(found) < 2
    return found[0] if found else None


def test_a_collapse_is_seen_within_a_window_and_said_once() -> None:
    assert causes(AlertMonitor(Alerts(window=5)), [0.7] * 20 + [0.1] * 20) == [(22, "reward-collapse")]


def test_a_second_collapse_is_said_again() -> None:
    found = causes(AlertMonitor(Alerts(window=2)), [0.7] * 6 + [0.1] * 4 + [0.7] * 4 + [0.1] * 4)
    assert [cause for _, cause in found] == ["reward-collapse"] * 2


def test_a_rising_noisy_or_small_reward_is_no_collapse() -> None:
    draw = random.Random(1)
    assert not causes(AlertMonitor(Alerts(window=5)), [k / 100 for k in range(100)])
    assert not causes(AlertMonitor(Alerts(window=5)), [0.5 + draw.gauss(0, 0.1) for _ in range(300)])
    assert not causes(
        AlertMonitor(Alerts(window=5)), [sum(draw.random() < 0.1 for _ in range(32)) / 32 for _ in range(300)]
    )
    assert not causes(AlertMonitor(Alerts(window=5)), [0.0] * 50)


def test_iterations_that_nobody_judged_are_no_collapse_and_hide_none() -> None:
    watch = AlertMonitor(Alerts(window=2, max_unverified=0))
    assert not causes(watch, [0.7] * 6)
    for unjudged in ({"reward": 0.0, "timeout": 0.75, "error": 0.25}, {"reward": math.nan}):
        assert not [alert for _ in range(4) for alert in watch({"verify": unjudged})]
    assert [cause for _, cause in causes(watch, [0.1] * 4)] == ["reward-collapse"]


def test_negative_rewards_collapse_too() -> None:
    assert causes(AlertMonitor(Alerts(window=2)), [-0.2] * 6 + [-0.9] * 6) == [(6, "reward-collapse")]


def test_a_collapse_names_figures_and_setting() -> None:
    earlier = RewardBaseline(2)
    for reward in (0.8, 0.8, 0.1):
        earlier.add(reward)
    assert reward_collapse(earlier, [0.1, 0.1], Alerts(window=2)) is None, "as large as the steps before it"
    earlier = RewardBaseline(2)
    for reward in (0.8, 0.8):
        earlier.add(reward)
    alert = reward_collapse(earlier, [0.1, 0.1], Alerts(window=2))
    assert alert is not None and (alert.value, alert.threshold) == (pytest.approx(0.1), pytest.approx(0.4))
    assert alert.message == "the mean reward of the last 2 iterations is 0.1; it was 0.8 (alerts.reward_drop 0.5)"


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"kl": 1.5, "approx_kl": 0.0}, "the KL to version 0 is 1.5"),
        ({"approx_kl": 2.0}, "the KL to the policy before the step is 2"),
        ({"kl": math.nan}, "the KL to version 0 is nan"),
        ({"kl": 1.0, "approx_kl": 0.3}, ""),
        ({}, ""),
    ],
)
def test_kl(metrics: dict[str, float], said: str) -> None:
    alert = alone("train", metrics, max_kl=1.0)
    assert (alert.message if alert else "").startswith(said) and bool(alert) == bool(said)


def test_timeouts_and_errors_count_together() -> None:
    alert = alone("verify", {"timeout": 0.04, "error": 0.04, "unparseable": 0.5}, max_unverified=0.05)
    assert alert is not None and alert.value == pytest.approx(0.08)
    assert alone("verify", {"timeout": 0.05, "error": 0.0}, max_unverified=0.05) is None
    assert alone("verify", {}) is None


@pytest.mark.parametrize(("gap", "wrong"), [(0.2, True), (math.nan, True), (0.05, False)])
def test_engines_that_disagree(gap: float, wrong: bool) -> None:
    assert (alone("train", {"logprob_gap_mean": gap}, max_logprob_gap=0.05) is not None) == wrong


def test_engines_that_disagree_by_what_a_server_has_scored() -> None:
    train = {"train": {"logprob_gap_mean": 0.01}}
    assert not AlertMonitor(Alerts())({**train, "publish": {"publish_seconds": 1.0}})
    [alert] = AlertMonitor(Alerts())({"train": {}, "publish": {"logprob_gap_mean": 0.2}})
    assert (alert.cause, alert.value) == ("engines-disagree", 0.2)


@pytest.mark.parametrize(("share", "wrong"), [(0.3, True), (math.nan, True), (0.5, False), (1.0, False)])
def test_few_effective_samples(share: float, wrong: bool) -> None:
    alert = alone("train", {"effective_sample_size": share}, min_effective_sample_size=0.5)
    assert (alert is not None) == wrong
    assert alert is None or "(alerts.min_effective_sample_size 0.5)" in alert.message


@pytest.mark.parametrize(("share", "wrong"), [(0.2, True), (math.nan, True), (0.1, False), (0.0, False)])
def test_clipped_behaviour_weights(share: float, wrong: bool) -> None:
    alert = alone("train", {"behaviour_clipped": share}, max_behaviour_clipped=0.1)
    assert (alert is not None) == wrong
    assert alert is None or "(alerts.max_behaviour_clipped 0.1)" in alert.message


@pytest.mark.parametrize(("lag", "wrong"), [(7.0, True), (6.0, False), (2.0, False)])
def test_samples_far_older_than_the_bound(lag: float, wrong: bool) -> None:
    alert = alone("train", {"lag_max": lag}, eta=2, max_lag_beyond=4.0)
    assert (alert is not None) == wrong
    assert alert is None or "(alerts.max_lag_beyond 4)" in alert.message


def test_the_bound_is_that_of_the_iteration() -> None:
    watch, old = AlertMonitor(Alerts(max_lag_beyond=2)), {"train": {"lag_max": 5.0}}
    assert not watch(old, eta=4) and [alert.cause for alert in watch(old, eta=1)] == ["old-samples"]


OLD = {"lag_max": 9.0, "effective_sample_size": 0.1, "behaviour_clipped": 0.9}


def test_0_turns_a_warning_off() -> None:
    ages = {"min_effective_sample_size": 0, "max_behaviour_clipped": 0, "max_lag_beyond": 0}
    off = AlertMonitor(Alerts(reward_drop=0, max_kl=0, max_unverified=0, max_logprob_gap=0, window=1, **ages))
    wrong = {"verify": {"reward": 1.0, "error": 1.0}, "train": {"kl": 99.0, "logprob_gap_mean": 9.0, **OLD}}
    assert not off(wrong) and not off({**wrong, "verify": {"reward": 0.0, "error": 1.0}})


def test_several_causes_at_once() -> None:
    wrong = {"verify": {"reward": 1.0, "error": 1.0}, "train": {"kl": 9.0, "logprob_gap_mean": 1.0, **OLD}}
    found: list[Alert] = AlertMonitor(Alerts())(wrong)
    old = ["few-effective-samples", "behaviour-clipped", "old-samples"]
    assert [alert.cause for alert in found] == ["kl-explosion", "verifier-failures", "engines-disagree", *old]
