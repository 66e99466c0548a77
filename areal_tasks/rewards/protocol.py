"""A verifier's input and output. Imported by verifier processes: standard library only."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, get_args

VerdictName = Literal["correct", "incorrect", "unparseable", "timeout", "error"]

VERDICTS: Final[tuple[str, ...]] = get_args(VerdictName)


class Row(NamedTuple):
    """A completion to be judged. `stop_reason` is the rollout's: `stop`, `length` or `abort`."""

    prompt: str
    completion: str
    answer: str
    truncated: bool = False
    stop_reason: str = "stop"


@dataclass(frozen=True)
class Verdict:
    """A verifier's result for one completion. ValueError for a reward that is not finite or an unknown verdict."""

    reward: float
    verdict: VerdictName
    parsed: str = ""  # the answer found in the completion
    detail: str = ""  # the reason, for people

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict {self.verdict!r} is none of {', '.join(VERDICTS)}")
        if not math.isfinite(self.reward):
            raise ValueError(f"reward {self.reward} is not a finite number")


def as_verdict(answer: object) -> Verdict:
    """A verifier's answer as a `Verdict`: a number is a reward, `correct` above 0, else `incorrect`. Else TypeError."""
    if isinstance(answer, Verdict):
        return answer
    if not isinstance(answer, numbers.Real):
        raise TypeError(f"the verifier returned {type(answer).__name__}; it must return a Verdict or a number")
    reward = float(answer)
    return Verdict(reward, "correct" if reward > 0 else "incorrect")


class Result(NamedTuple):
    """One line from a worker; `last` if the process ends after it. `cpu`: its CPU seconds, ended children's too."""

    reward: float
    verdict: str
    parsed: str
    detail: str
    seconds: float
    cpu: float
    last: bool
