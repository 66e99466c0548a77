"""A verifier that goes on once its first verdict has been reported."""

from __future__ import annotations

import os
import time
from itertools import count
from pathlib import Path

from stage_reward import digits

CALLS = count()


def reported_digits(prompt: str, completion: str, answer: str) -> float:
    """As `stage_reward.digits`; every call but the first waits for the file that REPORTED names."""
    reported = Path(os.environ["REPORTED"])
    while next(CALLS) and not reported.exists():
        time.sleep(0.01)  # until the test has heard of the first
    return digits(prompt, completion, answer)
