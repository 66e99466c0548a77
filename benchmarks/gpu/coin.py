"""A verifier that costs next to nothing: heads or tails by the text's digest, so that groups have a spread."""

from __future__ import annotations

import hashlib


def verify(prompt: str, completion: str, answer: str) -> float:
    """1 for about half of all completions, the same at every call."""
    return float(hashlib.sha256(completion.encode()).digest()[0] & 1)
