"""A verifier's input and output. Imported by verifier processes: standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Complex, Real
from typing import Final, Literal, NamedTuple, SupportsFloat, TypeGuard, get_args

VerdictName = Literal["correct", "incorrect", "unparseable", "timeout", "error"]

#: The largest number that the column of rewards, of float32, can hold.
FLOAT32_MAX: Final = (2 - 2**-23) * 2.0**127

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
    """A verifier's result for one completion. Its reward becomes a `float`, whatever kind of number is given.

    ValueError for a reward that is not finite, or that float32 cannot hold, or an unknown verdict; TypeError for a
    reward that is no number.
    """

    reward: float
    verdict: VerdictName
    parsed: str = ""  # the answer found in the completion
    detail: str = ""  # the reason, for people

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict {self.verdict!r} is none of {', '.join(VERDICTS)}")
        object.__setattr__(self, "reward", _as_reward(self.reward))


def as_verdict(answer: object) -> Verdict:
    """A verifier's answer as a `Verdict`: a number is a reward, `correct` above 0, else `incorrect`. Else TypeError."""
    if isinstance(answer, Verdict):
        return answer
    if not _is_number(answer):
        raise TypeError(f"the verifier returned {type(answer).__name__}; it must return a Verdict or a number")
    reward = _as_reward(answer)
    return Verdict(reward, "correct" if reward > 0 else "incorrect")


def _is_number(value: object) -> TypeGuard[SupportsFloat]:
    """Whether it is a real number of any library's kinds; NumPy's texts and complex numbers could be converted, too."""
    other = isinstance(value, str | bytes) or (isinstance(value, Complex) and not isinstance(value, Real))
    return isinstance(value, SupportsFloat) and not other


def _as_reward(number: object) -> float:
    """A finite number that float32 holds, of Python's, NumPy's, torch's or another library's kinds."""
    if not _is_number(number):
        raise TypeError(f"the reward must be a number, not {type(number).__name__}")
    try:
        reward = float(number)
    except OverflowError:  # an int that is larger than any float
        reward = math.inf
    if not abs(reward) <= FLOAT32_MAX:  # nor is that of NaN
        raise ValueError(f"reward {reward:g} is not a finite number that float32 can hold: scale your rewards")
    return reward


class Result(NamedTuple):
    """One line from a worker; `last` if the process ends after it. `cpu`: its CPU seconds, ended children's too."""

    reward: float
    verdict: str
    parsed: str
    detail: str
    seconds: float
    cpu: float
    last: bool
