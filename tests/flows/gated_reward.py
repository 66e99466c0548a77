"""As `stage_reward`, but nothing is judged while the file that GATE names is there: so a test can hold a run."""

from __future__ import annotations

import os
import time

from stage_reward import digits


def gated(prompt: str, completion: str, answer: str) -> float:
    """`digits`, once the gate is open."""
    while os.path.exists(os.environ["GATE"]):
        time.sleep(0.05)
    return digits(prompt, completion, answer)
