"""A reward and a filter for runs with filters: rewards of whole groups are often equal, and none depends on time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # each process that verifies imports this module: without it, in a tenth of the time
    from areal_tasks.workflows import Sample


def begins_with_a_digit(prompt: str, completion: str, answer: str) -> float:
    """1 or 0: with few samples, all of a group often earn the same."""
    return float(completion[:1].isdigit())


def odd_prompts(samples: list[Sample], rewards: list[float], most: int = 10**9) -> str | None:
    """Rejects every second row of the data set, up to a number of rows."""
    row = samples[0].prompt.prompt_id
    assert len(samples) == len(rewards)
    return f"row {row} is odd" if row % 2 and row < most else None


def rejects_all(samples: list[Sample], rewards: list[float]) -> str:
    return "none is wanted"


def broken(samples: list[Sample], rewards: list[float]) -> str:
    raise RuntimeError("no filter today")
