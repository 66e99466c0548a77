"""The reward: how much of the answer a completion repeats. docs/guides/reward.md says what else a reward may do."""

from __future__ import annotations

from areal_tasks.rewards.protocol import Verdict


def score(prompt: str, completion: str, answer: str) -> Verdict:
    """1 for the answer itself; else the share of its characters that stand in their place."""
    if completion == answer:
        return Verdict(1.0, "correct", parsed=completion)
    matching = sum(ours == theirs for ours, theirs in zip(completion, answer, strict=False))
    return Verdict(matching / max(len(completion), len(answer)), "incorrect", parsed=completion)
