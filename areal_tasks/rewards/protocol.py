"""What a verifier is given and what it answers. Imported by verifier processes: standard library only."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, get_args

VerdictName = Literal["correct", "incorrect", "unparseable", "timeout", "error"]

VERDICTS: Final[tuple[str, ...]] = get_args(VerdictName)

#: Verdicts without a reward: the recipe's `on_unverified` says what becomes of the sample.
UNVERIFIED: Final = frozenset({"timeout", "error"})


@dataclass(frozen=True)
class Verdict:
    """A verifier's answer for one completion. ValueError for a reward that is not finite or an unknown verdict."""

    reward: float
    verdict: VerdictName
    parsed: str = ""  # the answer found in the completion
    detail: str = ""  # why, for a person

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict {self.verdict!r} is none of {', '.join(VERDICTS)}")
        if not math.isfinite(self.reward):
            raise ValueError(f"reward {self.reward} is not a finite number")


class Verifier(Protocol):
    """Judges one completion. A bare number is a reward: `correct` above 0, else `incorrect`."""

    def __call__(self, prompt: str, completion: str, answer: str, **arguments: Any) -> Verdict | float: ...


def as_verdict(answer: object) -> Verdict:
    """What a verifier returned, as a `Verdict`. TypeError when it is neither that nor a number."""
    if isinstance(answer, Verdict):
        return answer
    if not isinstance(answer, numbers.Real):
        raise TypeError(f"the verifier returned {type(answer).__name__}; it must return a Verdict or a number")
    reward = float(answer)
    return Verdict(reward, "correct" if reward > 0 else "incorrect")
