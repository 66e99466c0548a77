r"""Mathematical answers: GSM8K's `#### 42`, `\boxed{42}`, or else the last answer math-verify can find.

The last marked answer counts. Plain numbers (sign, currency, thousands separators, decimals, a unit behind
them) are compared as decimals; everything else is parsed and compared by math-verify.
"""

from __future__ import annotations

import logging
import re
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final

import math_verify

from areal_tasks.rewards.protocol import Verdict

# The deadline of the process stands in for math-verify's alarm signals; it warns where they are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)

#: Longest marked answer, in characters; bounds the work on texts that repeat `\\boxed{` without end.
MAX_ANSWER: Final = 1000

_MARK: Final = re.compile(r"####[ \t]*(?P<line>[^\n]*)|\\boxed\s*\{")
_NUMBER: Final = re.compile(
    r"(?P<minus>-?)\s*(?:\\?[$€£¥])?\s*"
    r"(?P<digits>-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\.\d+)"
    r"(?:\s+[a-zA-Z][a-zA-Z ]*)?\s*\.?"
)


def verify(prompt: str, completion: str, answer: str) -> Verdict:
    """1 when the completion's last answer equals the reference: a number, LaTeX, or a whole GSM8K solution.

    ValueError when the reference holds no answer; the sample's verdict is then `error`.
    """
    number, parsed = _reference(answer)
    found = marked_answer(completion)
    found_number = None if found is None else plain_number(found)
    if number is not None and found_number is not None:
        return _judged(number == found_number, str(found_number))
    candidates = _parse_text(completion) if found is None else _parse_answer(found)
    if not candidates:
        return Verdict(0.0, "unparseable", detail="no answer found" if found is None else f"cannot parse {found!r}")
    return _compare(parsed, candidates)


def marked_answer(text: str) -> str | None:
    r"""What the last `####` line or closed `\boxed{}` holds that is not empty; None where there is none."""
    for mark in reversed(list(_MARK.finditer(text))):
        found = _content(text, mark).strip(" \t*")  # instruct models like **bold** answers
        if found:
            return found
    return None


def plain_number(text: str) -> Decimal | None:
    """`text` as a number, when it is nothing but one number with a currency sign or a unit of words."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        return None
    value = Decimal(match["digits"].replace(",", ""))
    return -value if match["minus"] else value


def _content(text: str, mark: re.Match[str]) -> str:
    if mark["line"] is not None:
        return mark["line"][:MAX_ANSWER]
    depth = 1
    for i, character in enumerate(text[mark.end() : mark.end() + MAX_ANSWER]):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[mark.end() : mark.end() + i]
    return ""  # never closed


@lru_cache(maxsize=1024)  # the samples of a group share it
def _reference(answer: str) -> tuple[Decimal | None, list[Any]]:
    text = marked_answer(answer) or _MARK.sub("", answer).strip()
    parsed = _parse_answer(text)
    if not parsed:
        raise ValueError(f"the reference answer {answer[-200:]!r} holds no answer that can be parsed")
    return plain_number(text), parsed


def _parse_answer(text: str) -> list[Any]:
    number = plain_number(text)
    return _parse_text(f"\\boxed{{{text if number is None else number}}}")


def _parse_text(text: str) -> list[Any]:
    """math-verify's candidates: the expression where it can be parsed, then the text it was found in."""
    try:
        return list(math_verify.parse(text, parsing_timeout=None, raise_on_error=True))
    except MemoryError:
        raise
    except Exception:  # sympy and antlr raise whatever they like at garbage: it is no answer
        return []


def _compare(reference: list[Any], candidates: list[Any]) -> Verdict:
    shown = candidates[-1] if isinstance(candidates[-1], str) else ""
    try:
        equal = math_verify.verify(reference, candidates, timeout_seconds=None, raise_on_error=True)
    except MemoryError:
        raise
    except Exception as error:
        return Verdict(0.0, "incorrect", shown, f"cannot be compared: {type(error).__name__}")
    return _judged(equal, shown)


def _judged(equal: bool, parsed: str) -> Verdict:
    return Verdict(1.0, "correct", parsed) if equal else Verdict(0.0, "incorrect", parsed)


# Regexes, antlr's tables and sympy's caches are made at first use: do it before the workers are forked, once.
verify("", r"$\frac{1}{2}$", "0.5")
