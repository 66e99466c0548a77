r"""Parses an answer: a number with a unit, several answers, a formula, or words.

Nothing is compared or computed here; answers too large for that are rejected.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
from typing import Final

from areal_tasks.rewards.math.spelling import plain, tidy
from areal_tasks.rewards.math.units import MULTIPLIERS, singular, unit_of

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
    """Several answers in `brackets`: `()`, `[)` and so on, `{}` for a set, `:` for a ratio, empty for a bare list."""

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

_LETTERS: Final = "ABCDEFGHIJ"
_CHOICE: Final = re.compile(
    rf"(?:\((?P<letter>[{_LETTERS}])\)|(?P<other>[{_LETTERS}])(?:\)|[.:]\s))\s*(?P<content>\S.*)"
)
_DIGITS: Final = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?:\ \d{3})+|\d+)(?![\d])"
_DECIMAL: Final = rf"(?:{_DIGITS}(?:\.\d+|\.(?!\s|$))?|\.\d+)"
_MONEY: Final = r"(?:US|A|C)?\$|[€£¥₹]|(?:USD|EUR|GBP)\b"
_NUMBER: Final = re.compile(
    rf"""(?P<sign>[-+]?)\s*(?P<money>{_MONEY})?\s*(?P<second>[-+]?)\s*
    (?:(?P<whole>{_DIGITS})\s+(?=\d+/\d))?
    (?P<over>{_DECIMAL})(?:\s*/\s*(?P<under>{_DECIMAL}))?
    (?: [eE](?P<exponent>[-+]?\d{{1,3}})(?!\d)
      | \s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*(?: (?P<power>-?\d{{1,3}})(?!\d) | \{{(?P<braced>[-+]?\d{{1,3}})\}} )
    )?""",
    re.VERBOSE,
)
_FRACTION: Final = re.compile(r"(?:(\d+)\s*)?\\frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))")
_FACTOR: Final = re.compile(r"\s*(?P<factor>[A-Za-z]+(?![A-Za-z])(?!\u2024)|[^\x00-\x7f])")
_RATIO: Final = re.compile(r"\d+(?:\s*:\s*\d+)+")
_BASE: Final = re.compile(r"(\d+)_\{?(\d{1,2})\}?")
_SEPARATORS: Final = (r";", r",\s+(?:and|or)\s+|\s+(?:and|or)\s+|,\s+", r",")
_CLOSES: Final = {"(": ")]", "[": ")]", "{": "}", r"\{": r"\}"}
_OUTWARD: Final = {"]": "(", "[": ")"}  # ]0,1[ is (0,1)
_EMPTY: Final = re.compile(r"\\emptyset|\\varnothing|\\\{\s*\\\}|(?:the )?(?:empty|null) set", re.IGNORECASE)
_ENVIRONMENT: Final = re.compile(r"\\(?:begin|end)\{[a-z]+\}")
_WORDS: Final = re.compile(r"(?<![A-Za-z\\])[A-Za-z]+")
#: A unit after a formula, in letters that are no variables.
_TAIL: Final = re.compile(
    r"(?:(?<=[\d})]\s)|(?<=pi\s))(?:[A-Za-z]{3,}|[A-Za-z]{1,2}\u2024|[cmk]m|kg|%)[A-Za-z\d\s^{}/*%\u2024-]*$"
)
_NO_FORMULA: Final = re.compile(
    r"[:?#`@~]|(?<!_)\d\s+\d|\d_|[^\x00-\x7f]|[-+*/]$|\\(?:cdot|times)$|\.\s|[A-Za-z]\."
    r"|(?<![\\A-Za-z])[A-Za-z]+\s+[a-z]{3}(?![a-z])|(?<![\\A-Za-z])[a-z]{3}\s+\w"  # prose
)
_ANGLES: Final = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc)(?![a-z]).*degrees")
_NO_VARIABLES: Final = frozenset({"or", "no", "if", "is", "to", "it", "so", "we", "he", "yes", "all", "odd"})
#: Words, then a colon, `=` or `is`: `total = 5`, `The area is 5`.
_NAME: Final = re.compile(
    r"^(?!(?:sin|cos|tan|log|max|min)\b)[A-Za-z]{3,}[A-Za-z .]*(?:[:=]|(?<= is)\s|(?<=equals)\s)\s*(?=\S)"
)
_PUNCTUATION: Final = re.compile(r"\u2024|(?<!\d)[.,'-]|[.,'-](?!\d)|\breal\b")
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


def chosen(text: str, reference: Answer) -> str:
    """Of an answer such as `(C) 12`, the letter or the content, whichever the reference has; any other answer as it is."""
    choice = _CHOICE.fullmatch(tidy(plain(text[:MAX_ANSWER])))
    if choice is None:
        return text
    letter = choice["letter"] or choice["other"]
    return letter if isinstance(reference, Formula) and reference.latex.upper() in _LETTERS else choice["content"]


def _read(text: str) -> Answer:
    text = _NAME.sub("", text)
    if _EMPTY.fullmatch(text):
        return Group("{}", (), text)
    found = _quantity(text) or _special(text) or _bracketed(text) or _listed(text) or _formula(text)
    return found or _words(text)


def _words(text: str) -> Words:
    words = [singular(word) for word in _PUNCTUATION.sub("", text.casefold()).split()]
    return Words("".join(words) or "".join(text.split()))


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
    return MULTIPLIERS.get(word, 0) or (len(word) > 1 and MULTIPLIERS.get(singular(word.lower()), 0)) or 0


def _value(match: re.Match[str]) -> Fraction | None:
    """None if it is no number: two signs, a mixed number such as 1 7/2, a denominator of 0."""
    over, under = _decimal(match["over"]), _decimal(match["under"] or "1")
    if len(match["sign"] + match["second"]) > 1 or not under or (match["whole"] and over >= under):
        return None
    power = match["exponent"] or match["power"] or match["braced"] or "0"
    value = (_decimal(match["whole"] or "0") + over / under) * Fraction(10) ** int(power)
    return -value if "-" in match["sign"] + match["second"] else value


def _decimal(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").replace(" ", ""))


def _quantity(text: str) -> Quantity | None:
    found = leading_number(text)
    unit = None if found is None else unit_of(found[2])
    return None if found is None or unit is None else Quantity(found[0].value, found[0].unit | unit)


def _special(text: str) -> Answer | None:
    """A ratio in its lowest terms, or a number in another base."""
    if _RATIO.fullmatch(text):
        parts = [int(part) for part in text.split(":")]
        divisor = math.gcd(*parts) or 1
        return Group(":", tuple(Quantity(Fraction(part // divisor)) for part in parts), text)
    based = _BASE.fullmatch(text)
    if based and 2 <= int(based[2]) <= 10 and all(int(digit) < int(based[2]) for digit in based[1]):
        return Quantity(Fraction(int(based[1], int(based[2]))))
    return None


def _bracketed(text: str) -> Answer | None:
    if text[:1] in ("]", "[") and text[-1:] in ("]", "[") and (text[0], text[-1]) != ("[", "]") and "," in text:
        text = f"{text[0].replace(']', '(')}{text[1:-1]}{text[-1].replace('[', ')')}"
    opened = next((left for left in _CLOSES if text.startswith(left)), None)
    if opened is None or text[-1] not in _CLOSES[opened] or 0 in _depths(text)[len(opened) - 1 : -1]:
        return None
    inner = text[len(opened) : -len(opened)]
    parts = _split(inner)
    return _read(inner.strip()) if len(parts) == 1 else _group(opened[-1] + text[-1], parts, text)


def _listed(text: str) -> Group | None:
    parts = _split(text)
    return None if len(parts) == 1 else _group("", parts, text)


def _group(brackets: str, parts: list[str], text: str) -> Group:
    if len(parts) > MAX_ITEMS:
        raise TooLarge(f"the answer is a list of more than {MAX_ITEMS}")
    return Group(brackets, tuple(_read(part.strip()) for part in parts), text)


def _split(text: str) -> list[str]:
    r"""The parts between separators outside of brackets: semicolons, else `and` and commas with blanks, else commas.

    A part with one \pm is two.
    """
    depths = _depths(text)
    parts = [text]
    for separator in _SEPARATORS:
        cuts = [match for match in re.finditer(separator, text) if depths[match.start()] == 0]
        if cuts:
            starts, ends = [0, *(cut.end() for cut in cuts)], [*(cut.start() for cut in cuts), len(text)]
            parts = [text[start:end] for start, end in zip(starts, ends, strict=True)]
            break
    return [part.replace(r"\pm", sign) for part in parts for sign in ("+-" if part.count(r"\pm") == 1 else "+")]


def _depths(text: str) -> list[int]:
    """How many brackets are open after each character."""
    return list(accumulate((c in "([{") - (c in ")]}") for c in text))


def _formula(text: str) -> Formula | None:
    text = _NAMES.sub(r"\\\1", text)
    angles = _ANGLES.search(text)
    tail = None if angles else _TAIL.search(text)
    unit = unit_of(f" {tail.group()}") if tail else None
    body = text[: tail.start()].strip() if tail and unit else text
    words = [word for word in _WORDS.findall(_ENVIRONMENT.sub("", body)) if len(word) > 1]
    capitals = len(body) > 1 and body.isalpha() and body.isupper()  # as HHT: their order counts, unlike that of factors
    if not body or capitals or not all(_is_product(word) or (angles and word == "degrees") for word in words):
        return None
    return None if _NO_FORMULA.search(body) else Formula(body, unit or frozenset())


def _is_product(word: str) -> bool:
    """Whether letters are a product of variables, or the points of a figure, rather than a word."""
    return word.isupper() or (len(word) <= 3 and word.islower() and word not in _NO_VARIABLES) or len(word) == 2
