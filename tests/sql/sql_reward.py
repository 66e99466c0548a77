"""A verifier with everything that can go wrong: it fails, finds nothing, and changes its mind."""

from __future__ import annotations

import itertools

from areal_tasks.rewards.protocol import Verdict

_calls = [0]


def fickle(prompt: str, completion: str, answer: str) -> Verdict | float:
    """The share of large digits; every fifth time another verdict; an error where a digit is doubled."""
    _calls[0] += 1
    found = [c for c in completion if c.isdigit()]
    if any(a == b for a, b in itertools.pairwise(found)):
        raise RuntimeError(f"doubled digit in {completion!r}")
    if not found:
        return Verdict(0.0, "unparseable", "", "no digit")
    share = sum(c > "4" for c in found) / len(found)
    return share if _calls[0] % 5 else Verdict(0.25, "incorrect", found[0], "a whim")
