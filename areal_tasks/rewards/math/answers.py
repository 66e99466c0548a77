r"""Parses an answer: a number with a unit, several answers, a formula, or words.

Nothing is compared or computed here; answers too large for that are rejected.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
from typing import Final

from areal_tasks.rewards.math.spelling import plain, tidy
from areal_tasks.rewards.math.units import MULTIPLIERS, unit_of

#: Longest answer, in characters, most answers in a list and deepest nesting of brackets; comparing more takes long.
MAX_ANSWER: Final = 1000
MAX_ITEMS: Final = 32
MAX_DEPTH: Final = 32


class TooLarge(ValueError):
    """The answer is too large to compare; the message names the bound that it exceeds."""


@dataclass(frozen=True)
class Quantity:
    """A number, and the parts of its unit; empty if it has none."""

    value: Fraction
    unit: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Group:
    """Several answers in `brackets`: `()`, `[)` and so on, `{}` for a set, empty for a bare list."""

    brackets: str
    items: tuple[Answer, ...]
    latex: str = field(compare=False)


@dataclass(frozen=True)
class Formula:
    """LaTeX that has to be parsed to be compared, and the parts of its unit."""

    latex: str
    unit: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Words:
    """Anything else: it equals only itself."""

    text: str


Answer = Quantity | Group | Formula | Words

_DIGITS: Final = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?:\ \d{3})+|\d+)(?![\d])"
_DECIMAL: Final = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)"
_MONEY: Final = r"(?:US|A|C)?\$|[€£¥₹]|(?:USD|EUR|GBP)\b"
_NUMBER: Final = re.compile(
    rf"""(?P<sign>[-+]?)\s*(?P<money>{_MONEY})?\s*(?P<second>[-+]?)\s*
    (?:
      (?P<whole>{_DIGITS})\s+(?P<part>\d+)/(?P<parts>\d+)
    | (?P<over>{_DECIMAL})\s*/\s*(?P<under>{_DECIMAL})
    | (?P<number>{_DECIMAL})
      (?: [eE](?P<exponent>[-+]?\d{{1,3}})(?!\d)
        | \s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*(?: (?P<power>-?\d{{1,3}})(?!\d) | \{{(?P<braced>[-+]?\d{{1,3}})\}} )
      )?
    )""",
    re.VERBOSE,
)
_FRACTION: Final = re.compile(r"(?:(\d+)\s*)?\\frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))")
_FACTOR: Final = re.compile(r"\s*(?P<factor>[A-Za-z]+)(?![A-Za-z])")
_SEPARATORS: Final = (r";", r",\s+(?:and|or)\s+|\s+(?:and|or)\s+|,\s+", r",")
_CLOSES: Final = {"(": ")]", "[": ")]", "{": "}", r"\{": r"\}"}
_ENVIRONMENT: Final = re.compile(r"\\(?:begin|end)\{[a-z]+\}")
_WORDS: Final = re.compile(r"(?<![A-Za-z\\])[A-Za-z]+")
#: A unit after a formula.
_TAIL: Final = re.compile(r"(?:(?<=[\d})]\s)|(?<=pi\s))(?:[A-Za-z]{2,}|[hsmglL%])[A-Za-z\d\s^{}/*%-]*$")
_NO_FORMULA: Final = re.compile(r"[:?#`@]|(?<!_)\d\s+\d|\d_|~|[^\x00-\x7f]")
_NO_VARIABLES: Final = frozenset({"or", "no", "if", "is", "to", "it", "so", "we", "he"})
_NAME: Final = re.compile(r"^(?!(?:sin|cos|tan|log|max|min)\b)[A-Za-z]{3,}[A-Za-z ]*=\s*")  # words: `total = 5`
_FUNCTIONS: Final = (
    *("arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "sin", "cos", "tan", "cot", "sec", "csc"),
    *("sqrt", "log", "exp", "max", "min", "gcd", "lcm", "det", "ln", "pi"),
)
_NAMES: Final = re.compile(rf"(?<![A-Za-z\\])({'|'.join(_FUNCTIONS)})(?![A-Za-z])")


def read_answer(text: str) -> Answer:
    """Parse `text`, which must be nothing but an answer. TooLarge if it cannot be compared."""
    if len(text) > MAX_ANSWER:
        raise TooLarge(f"the answer has more than {MAX_ANSWER} characters")
    if max(_depths(text), default=0) > MAX_DEPTH:
        raise TooLarge(f"the answer has more than {MAX_DEPTH} brackets within each other")
    return _read(tidy(plain(text)))


def _read(text: str) -> Answer:
    text = _NAME.sub("", text)
    found = _quantity(text) or _bracketed(text) or _listed(text) or _formula(text)
    return found or Words("".join(text.casefold().split()))


def leading_number(text: str) -> tuple[Quantity, str, str] | None:
    """The number that `text` begins with, its spelling, and the rest; with its unit only if that precedes it."""
    text = slashed(text)
    match = _NUMBER.match(text)
    value = None if match is None else _value(match)
    if match is None or value is None:
        return None
    end = match.end()
    while (word := _FACTOR.match(text, end)) and (factor := _factor(word["factor"])):
        value, end = value * factor, word.end()
    return Quantity(value, unit_of(match["money"] or "") or frozenset()), text[:end], text[end:]


def slashed(text: str) -> str:
    r"""`text` with its numeric fractions, such as 1\frac{1}{2}, as 1 1/2."""
    return _FRACTION.sub(_slashed, text)


def _slashed(match: re.Match[str]) -> str:
    whole, *digits = match.groups()
    over, under = (digit for digit in digits if digit)
    return f"{whole} {over}/{under}" if whole else f"{over}/{under}"


def _factor(word: str) -> int:
    return MULTIPLIERS.get(word, 0) or (len(word) > 2 and MULTIPLIERS.get(word.lower(), 0)) or 0


def _value(match: re.Match[str]) -> Fraction | None:
    """None if it is no number: two signs, a mixed number such as 1 7/2, a denominator of 0."""
    signs = match["sign"] + match["second"]
    if len(signs) > 1:
        return None
    if match["whole"]:
        part, parts = int(match["part"]), int(match["parts"])
        value = _decimal(match["whole"]) + Fraction(part, parts) if part < parts else None
    elif match["over"]:
        under = _decimal(match["under"])
        value = _decimal(match["over"]) / under if under else None
    else:
        power = match["exponent"] or match["power"] or match["braced"] or "0"
        value = _decimal(match["number"]) * Fraction(10) ** int(power)
    return -value if value is not None and signs == "-" else value


def _decimal(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").replace(" ", ""))


def _quantity(text: str) -> Quantity | None:
    found = leading_number(text)
    unit = None if found is None else unit_of(found[2])
    return None if found is None or unit is None else Quantity(found[0].value, found[0].unit | unit)


def _bracketed(text: str) -> Answer | None:
    opened = next((left for left in _CLOSES if text.startswith(left)), None)
    if opened is None or text[-1] not in _CLOSES[opened] or 0 in _depths(text)[len(opened) - 1 : -1]:
        return None
    inner = text[len(opened) : -len(opened)]
    parts = _split(inner)
    return _read(inner.strip()) if len(parts) == 1 else _group(opened[-1] + text[-1], parts, text)


def _listed(text: str) -> Group | None:
    parts = _split(text) if text.count(r"\pm") != 1 else [text.replace(r"\pm", sign) for sign in "+-"]
    return None if len(parts) == 1 else _group("", parts, text)


def _group(brackets: str, parts: list[str], text: str) -> Group:
    if len(parts) > MAX_ITEMS:
        raise TooLarge(f"the answer is a list of more than {MAX_ITEMS}")
    return Group(brackets, tuple(_read(part.strip()) for part in parts), text)


def _split(text: str) -> list[str]:
    """The parts between separators outside of brackets: semicolons, else `and` and commas with blanks, else commas."""
    depths = _depths(text)
    for separator in _SEPARATORS:
        cuts = [match for match in re.finditer(separator, text) if depths[match.start()] == 0]
        if cuts:
            starts, ends = [0, *(cut.end() for cut in cuts)], [*(cut.start() for cut in cuts), len(text)]
            return [text[start:end] for start, end in zip(starts, ends, strict=True)]
    return [text]


def _depths(text: str) -> list[int]:
    """How many brackets are open after each character."""
    return list(accumulate((c in "([{") - (c in ")]}") for c in text))


def _formula(text: str) -> Formula | None:
    tail = _TAIL.search(text)
    unit = unit_of(f" {tail.group()}") if tail else None
    body = text[: tail.start()].strip() if tail and unit else text
    words = [word for word in _WORDS.findall(_ENVIRONMENT.sub("", body)) if len(word) > 1 and word not in _FUNCTIONS]
    capitals = len(body) > 1 and body.isalpha() and body.isupper()  # as HHT: their order counts, unlike that of factors
    if not body or _NO_FORMULA.search(body) or capitals or not all(map(_is_product, words)):
        return None
    return Formula(_NAMES.sub(r"\\\1", body), unit or frozenset())


def _is_product(word: str) -> bool:
    """Whether letters are a product of variables, or the points of a figure, rather than a word."""
    return word.isupper() or (len(word) == 2 and word not in _NO_VARIABLES)
