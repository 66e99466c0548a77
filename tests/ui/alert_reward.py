"""A verifier that goes wrong in the course of a run, as the test sets."""

from __future__ import annotations

import time
from pathlib import Path


def scripted(prompt: str, completion: str, answer: str, *, calls: str, samples: int, stall: float) -> float:
    """Rewards near 1 in the first iteration; none, and one failure, in the second; later a call of `stall` seconds.

    `calls` is a file with a byte for every call so far, whichever process made it.
    """
    path = Path(calls)
    with path.open("ab") as file:
        file.write(b".")
    iteration, sample = divmod(path.stat().st_size - 1, samples)
    if (iteration, sample) == (1, 0):
        raise RuntimeError("this sample cannot be judged")
    if (iteration, sample) == (2, 0):
        time.sleep(stall)  # the run stalls
    return 1.0 - 0.01 * sample if iteration == 0 else 0.0
