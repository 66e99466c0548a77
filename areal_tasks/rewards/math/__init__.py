r"""Mathematical answers: finding the completion's final answer (`final`), parsing it (`answers`), comparing it with
the reference (`equal`). The rule is the table of cases in docs/reference/math.md."""

from __future__ import annotations

from functools import lru_cache

from areal_tasks.rewards.math.answers import Answer, TooLarge, Words, chosen, read_answer
from areal_tasks.rewards.math.equal import equal
from areal_tasks.rewards.math.final import NoAnswer, final_answer, reference_answer
from areal_tasks.rewards.protocol import Verdict


def verify(prompt: str, completion: str, answer: str, truncated: bool = False, stop_reason: str = "stop") -> Verdict:
    """1 when the completion's final answer equals the reference: a number, LaTeX, or a whole GSM8K solution.

    ValueError when the reference holds no answer; the sample's verdict is then `error`.
    """
    reference, found = _reference(answer), ""
    try:
        unfinished = truncated or stop_reason == "abort"
        found = final_answer(completion, prompt, unfinished, words=isinstance(reference, Words))
        right = equal(reference, read_answer(chosen(found, reference)))
    except NoAnswer as error:
        return Verdict(0.0, "unparseable", detail=str(error))
    except TooLarge as error:
        return Verdict(0.0, "incorrect", found, str(error))
    return Verdict(1.0, "correct", found) if right else Verdict(0.0, "incorrect", found)


@lru_cache(maxsize=1024)  # all samples of a group have the same
def _reference(answer: str) -> Answer:
    try:
        found = read_answer(reference_answer(answer))
    except TooLarge as error:
        raise ValueError(f"the reference answer cannot be compared: {error}") from error
    if found == Words(""):
        raise ValueError(f"the reference answer {answer[-200:]!r} holds no answer")
    return found


# Regexes, antlr's tables and sympy's caches are built at first use: build them once, before the workers are forked.
verify("", r"\boxed{\sqrt{2} + x}", r"x + \sqrt{2}")
