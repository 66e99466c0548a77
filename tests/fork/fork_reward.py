"""A verifier that judges as the environment says: its code changes under its name."""

from __future__ import annotations

import os

from stage_reward import digits


def scaled(prompt: str, completion: str, answer: str) -> float:
    """As `stage_reward.digits`, times FORK_SCALE."""
    return digits(prompt, completion, answer) * float(os.environ.get("FORK_SCALE", "1"))
