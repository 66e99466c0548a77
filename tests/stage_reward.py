"""A reward that differs from sample to sample of an untrained model, so that every iteration moves the weights."""

from __future__ import annotations


def digits(prompt: str, completion: str, answer: str) -> float:
    """The mean of the digits in the completion, in [0, 1]."""
    found = [int(c) for c in completion if c.isdigit()]
    return sum(found) / (9.0 * len(found)) if found else 0.0


def fails(prompt: str, completion: str, answer: str) -> float:
    """A verifier that can judge nothing."""
    raise RuntimeError("nothing can be judged")
