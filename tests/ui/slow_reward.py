"""A verifier that takes its time, for tests of what is said meanwhile."""

from __future__ import annotations

import time

from stage_reward import digits


def slow_digits(prompt: str, completion: str, answer: str) -> float:
    """As `stage_reward.digits`, a few milliseconds later."""
    time.sleep(0.005)
    return digits(prompt, completion, answer)
