"""The warnings of a run: where an iteration's metrics are beyond a threshold of the recipe's `alerts`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from schemas.recipe.sections import Alerts

Metrics = Mapping[str, Mapping[str, float]]  # of an iteration, by stage

#: A fall within this many standard deviations of single iterations is noise.
NOISE_DEVIATIONS: Final = 3.0
#: Standard deviation over mean distance of two successive draws, of a normal distribution.
DEVIATION_OF_JUMP: Final = math.sqrt(math.pi) / 2


@dataclass(frozen=True)
class Alert:
    """A named cause, the message for the user, the measured value and its threshold."""

    cause: str
    message: str
    value: float
    threshold: float


class AlertMonitor:
    """Called with each iteration's metrics, returns the warnings that the previous iteration did not raise.

    `eta` is `rollout.max_head_offpolicyness` in that iteration. The best reward is that since this start of the flow.
    """

    def __init__(self, settings: Alerts) -> None:
        self.settings = settings
        self.last: deque[float] = deque()
        self.earlier = RewardBaseline(settings.window)
        self.active: set[str] = set()

    def __call__(self, metrics: Metrics, eta: int = 0) -> list[Alert]:
        verify, found = metrics.get("verify", {}), dict[str, Alert]()
        # if no completion could be judged, the mean reward of 0 is meaningless
        if math.isfinite(verify.get("reward", math.nan)) and unjudged(verify) < 1.0:
            self.last.append(verify["reward"])
            if len(self.last) > self.settings.window:
                self.earlier.add(self.last.popleft())
        collapse = reward_collapse(self.earlier, list(self.last), self.settings)
        for alert in (collapse, *threshold_alerts(metrics, eta, self.settings)):
            if alert is not None:
                found.setdefault(alert.cause, alert)
        fresh = [alert for cause, alert in found.items() if cause not in self.active]
        self.active = set(found)
        return fresh


class RewardBaseline:
    """The rewards before the last window: their best mean over a window, and their standard deviation.

    The deviation is estimated from differences of successive iterations, so that a trend does not count as noise.
    """

    def __init__(self, window: int) -> None:
        self.window: deque[float] = deque(maxlen=window)
        self.best = -math.inf
        self.steps: list[float] = [0.0, 0.0]  # sum and number of the absolute differences

    def add(self, reward: float) -> None:
        """Add the mean reward of the next iteration."""
        if self.window:
            self.steps = [self.steps[0] + abs(reward - self.window[-1]), self.steps[1] + 1]
        self.window.append(reward)
        if len(self.window) == self.window.maxlen:
            self.best = max(self.best, fmean(self.window))

    @property
    def deviation(self) -> float:
        """The standard deviation of a single iteration's reward."""
        total, count = self.steps
        return DEVIATION_OF_JUMP * total / max(count, 1)


def reward_collapse(earlier: RewardBaseline, last: list[float], settings: Alerts) -> Alert | None:
    """The mean of the last window is far below the best of an earlier one, by more than noise."""
    best = earlier.best
    if not settings.reward_drop or not math.isfinite(best):
        return None
    mean, threshold = fmean(last), best - settings.reward_drop * abs(best)
    if mean >= threshold or best - mean <= NOISE_DEVIATIONS * earlier.deviation:
        return None
    fall = f"the mean reward of the last {len(last)} iterations is {mean:.4g}; it was {best:.4g}"
    return Alert("reward-collapse", f"{fall} (alerts.reward_drop {settings.reward_drop:g})", mean, threshold)


def unjudged(verify: Mapping[str, float]) -> float:
    """The share of the completions that could not be judged."""
    return verify.get("timeout", 0.0) + verify.get("error", 0.0)


def threshold_alerts(metrics: Metrics, eta: int, settings: Alerts) -> Iterator[Alert]:
    """The measured values that are beyond their threshold, or NaN. What was not measured is as it should be.

    Servers and trainer are compared by `train`, or by `publish` where samples are too old for that.
    """
    verify, train, publish = (metrics.get(stage, {}) for stage in ("verify", "train", "publish"))
    effective, clipped = train.get("effective_sample_size", 1.0), train.get("behaviour_clipped", 0.0)
    before, apart = "the KL to the policy before the step", "engine and trainer are {:.4g} nats apart on average"
    lag, old = train.get("lag_max", 0.0) - eta, f"a token lags {{:g}} versions more than η, {eta}"
    count = "by their behaviour weights the tokens count as {:.0%} of their number"
    for cause, field, value, text in (
        ("kl-explosion", "max_kl", train.get("kl", 0.0), "the KL to version 0 is {:.4g} nats per token"),
        ("kl-explosion", "max_kl", train.get("approx_kl", 0.0), f"{before} is {{:.4g}} nats per token"),
        ("verifier-failures", "max_unverified", unjudged(verify), "{:.0%} of the completions could not be verified"),
        ("engines-disagree", "max_logprob_gap", train.get("logprob_gap_mean", 0.0), apart),
        ("engines-disagree", "max_logprob_gap", publish.get("logprob_gap_mean", 0.0), apart),
        ("few-effective-samples", "min_effective_sample_size", effective, count),
        ("behaviour-clipped", "max_behaviour_clipped", clipped, "{:.1%} of the behaviour weights are capped or masked"),
        ("old-samples", "max_lag_beyond", lag, old),
    ):
        threshold = getattr(settings, field)
        as_wanted = value >= threshold if field.startswith("min_") else value <= threshold  # False for NaN
        if threshold and not as_wanted:
            yield Alert(cause, f"{text.format(value)} (alerts.{field} {threshold:g})", value, threshold)
