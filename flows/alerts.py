"""The warnings of a run. Each is a small function of an iteration's metrics and the recipe's `alerts`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from schemas.recipe.sections import Alerts

Metrics = Mapping[str, Mapping[str, float]]  # of an iteration, by stage

REWARD_COLLAPSE: Final = "reward-collapse"
KL_EXPLOSION: Final = "kl-explosion"
VERIFIER_FAILURES: Final = "verifier-failures"
ENGINES_DISAGREE: Final = "engines-disagree"
FEW_EFFECTIVE_SAMPLES: Final = "few-effective-samples"
BEHAVIOUR_CLIPPED: Final = "behaviour-clipped"
OLD_SAMPLES: Final = "old-samples"
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


class Watch:
    """Called with each iteration's metrics, returns the warnings that the previous iteration did not raise.

    `eta` is `rollout.max_head_offpolicyness` in that iteration. The best reward covers this start of the flow only, not
    earlier starts.
    """

    def __init__(self, settings: Alerts) -> None:
        self.settings = settings
        self.last: deque[float] = deque()
        self.earlier = Earlier(settings.window)
        self.active: set[str] = set()

    def __call__(self, metrics: Metrics, eta: int = 0) -> list[Alert]:
        found = {alert.cause: alert for alert in self._found(metrics, eta)}
        fresh = [alert for cause, alert in found.items() if cause not in self.active]
        self.active = set(found)
        return fresh

    def _found(self, metrics: Metrics, eta: int) -> Iterator[Alert]:
        verify, train = metrics.get("verify", {}), metrics.get("train", {})
        if math.isfinite(verify.get("reward", math.nan)) and not all_unjudged(verify):
            self._remember(verify["reward"])
        checks = (
            reward_collapse(self.earlier, list(self.last), self.settings),
            kl_explosion(train, self.settings.max_kl),
            verifier_failures(verify, self.settings.max_unverified),
            engines_disagree(train, self.settings.max_logprob_gap)
            or engines_disagree(metrics.get("publish", {}), self.settings.max_logprob_gap),
            few_effective_samples(train, self.settings.min_effective_sample_size),
            behaviour_clipped(train, self.settings.max_behaviour_clipped),
            old_samples(train, self.settings.max_lag_beyond, eta),
        )
        yield from (alert for alert in checks if alert is not None)

    def _remember(self, reward: float) -> None:
        self.last.append(reward)
        if len(self.last) > self.settings.window:
            self.earlier.add(self.last.popleft())


class Earlier:
    """The rewards before the last window: their best mean over a window, and their standard deviation.

    The deviation is estimated from differences of successive iterations, so that a trend does not count as noise.
    """

    def __init__(self, window: int) -> None:
        self.window: deque[float] = deque(maxlen=window)
        self.best = -math.inf
        self.steps: list[float] = [0.0, 0.0]  # sum and number of the absolute differences

    def add(self, reward: float) -> None:
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


def reward_collapse(earlier: Earlier, last: list[float], settings: Alerts) -> Alert | None:
    """The mean of the last window is far below the best of an earlier one, by more than noise."""
    best = earlier.best
    if not settings.reward_drop or not math.isfinite(best):
        return None
    mean, threshold = fmean(last), best - settings.reward_drop * abs(best)
    if mean >= threshold or best - mean <= NOISE_DEVIATIONS * earlier.deviation:
        return None
    fall = f"the mean reward of the last {len(last)} iterations is {mean:.4g}; it was {best:.4g}"
    return Alert(REWARD_COLLAPSE, f"{fall} (alerts.reward_drop {settings.reward_drop:g})", mean, threshold)


def all_unjudged(verify: Mapping[str, float]) -> bool:
    """Whether no completion of the iteration could be judged: its mean reward of 0 is then meaningless."""
    return verify.get("timeout", 0.0) + verify.get("error", 0.0) >= 1.0


def kl_explosion(train: Mapping[str, float], limit: float) -> Alert | None:
    """A KL to version 0, or to the policy before the step, is above the limit or NaN."""
    for name, meaning in (("kl", "version 0"), ("approx_kl", "the policy before the step")):
        value = train.get(name, 0.0)
        if limit and not value <= limit:
            message = f"the KL to {meaning} is {value:.4g} nats per token (alerts.max_kl {limit:g})"
            return Alert(KL_EXPLOSION, message, value, limit)
    return None


def verifier_failures(verify: Mapping[str, float], limit: float) -> Alert | None:
    """Too large a share of the completions could not be judged."""
    share = verify.get("timeout", 0.0) + verify.get("error", 0.0)
    if not limit or share <= limit:
        return None
    message = f"{share:.0%} of the completions could not be verified (alerts.max_unverified {limit:g})"
    return Alert(VERIFIER_FAILURES, message, share, limit)


def engines_disagree(measured: Mapping[str, float], limit: float) -> Alert | None:
    """The logprobs of inference engine and trainer differ too much, or one of them is NaN.

    `measured` by the stage `train`, or by `publish` where samples are too old for that.
    """
    gap = measured.get("logprob_gap_mean", 0.0)
    if not limit or gap <= limit:  # False for NaN
        return None
    message = f"engine and trainer are {gap:.4g} nats apart on average (alerts.max_logprob_gap {limit:g})"
    return Alert(ENGINES_DISAGREE, message, gap, limit)


def few_effective_samples(train: Mapping[str, float], limit: float) -> Alert | None:
    """The behaviour weights are so unequal that few tokens dominate the step. Not measured in synchronous runs."""
    share = train.get("effective_sample_size", 1.0)
    if not limit or share >= limit:
        return None
    message = (
        f"by their behaviour weights the tokens count as {share:.0%} of their number "
        f"(alerts.min_effective_sample_size {limit:g})"
    )
    return Alert(FEW_EFFECTIVE_SAMPLES, message, share, limit)


def behaviour_clipped(train: Mapping[str, float], limit: float) -> Alert | None:
    """Many behaviour weights are capped or masked: the samples are too stale, or the engines disagree."""
    share = train.get("behaviour_clipped", 0.0)
    if not limit or share <= limit:
        return None
    message = f"{share:.1%} of the behaviour weights are capped or masked (alerts.max_behaviour_clipped {limit:g})"
    return Alert(BEHAVIOUR_CLIPPED, message, share, limit)


def old_samples(train: Mapping[str, float], limit: float, eta: int) -> Alert | None:
    """A token's lag exceeds η by more than `limit`, which `rollout.bound: admission` allows for slow groups."""
    beyond = train.get("lag_max", 0.0) - eta
    if not limit or beyond <= limit:
        return None
    message = f"a token lags {beyond:g} versions more than η, {eta} (alerts.max_lag_beyond {limit:g})"
    return Alert(OLD_SAMPLES, message, beyond, limit)
