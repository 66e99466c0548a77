"""The verifier `exact`: the completion must be the answer and nothing else."""

from __future__ import annotations

from areal_tasks.rewards.protocol import Verdict


def verify(prompt: str, completion: str, answer: str) -> Verdict:
    """1 when the completion equals the reference answer, except for surrounding white space."""
    found = completion.strip()
    if not found:
        return Verdict(0.0, "unparseable", detail="the completion is empty")
    if found == answer.strip():
        return Verdict(1.0, "correct", found)
    return Verdict(0.0, "incorrect", found)
