"""As `stage_reward`, but nothing is judged while the gate is closed: so a test can hold a run.

It is closed while the file that GATE names is there and is empty, or names another file that is there.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from stage_reward import digits


def sign(gate: Path, pid: int) -> Path:
    """This file is there while the process of that id stands before the gate."""
    return gate.with_name(f"{gate.name}.{pid}")


def is_closed(gate: Path) -> bool:
    try:
        closes_with = gate.read_text()
    except FileNotFoundError:
        return False
    return not closes_with or Path(closes_with).exists()


def gated(prompt: str, completion: str, answer: str) -> float:
    """`digits`, once the gate is open."""
    gate = Path(os.environ["GATE"])
    while is_closed(gate):
        sign(gate, os.getpid()).touch()
        time.sleep(0.02)  # until the test opens it
    sign(gate, os.getpid()).unlink(missing_ok=True)
    return digits(prompt, completion, answer)
