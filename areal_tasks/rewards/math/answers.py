r"""Parses an answer: a number with a unit, several answers, a formula, or words. Nothing is compared or computed."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
from typing import Final

from areal_tasks.rewards.math.spelling import MARK, plain, slashed, tidy
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

_DIGITS: Final = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?:\ \d{3})+|\d+)(?![\d])"
_DECIMAL: Final = rf"(?:{_DIGITS}(?:\.\d+|\.(?!\s|$))?|\.\d+)"
_NUMBER: Final = re.compile(
    rf"""(?P<sign>[-+]?)\s*(?P<money>(?:US|A|C)?\$|[€£¥₹]|(?:USD|EUR|GBP)\b)?\s*(?P<second>[-+]?)\s*
    (?:(?P<whole>{_DIGITS})\s+(?=\d+/\d))?
    (?P<over>{_DECIMAL})(?:\s*/\s*(?P<under>{_DECIMAL}))?
    (?: [eE](?P<exponent>[-+]?\d{{1,3}})(?!\d)
      | \s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*(?: (?P<power>-?\d{{1,3}})(?!\d) | \{{(?P<braced>[-+]?\d{{1,3}})\}} )
    )?""",
    re.VERBOSE,
)
_FACTOR: Final = re.compile(r"\s*(?P<factor>[A-Za-z]+(?![A-Za-z])(?!(?<=K)\u2024)|[^\x00-\x7f])\u2024?")
_SEPARATORS: Final = (r";", r",\s+(?:and|or)\s+|\s+(?:and|or)\s+|,\s+", r",")
_CLOSES: Final = {"(": ")]", "[": ")]", "{": "}", r"\{": r"\}"}
_VECTOR: Final = re.compile(r"^\\begin\{[pb]?matrix\}([^&]*?)(?:\\\\)?\s*\\end\{[pb]?matrix\}$")  # of one column
#: Letters that are neither a product of variables nor the points of a figure.
_PROSE: Final = re.compile(
    r"(?<![A-Za-z\\])(?![A-Z]+(?![A-Za-z]))(?:(?!degrees)[A-Za-z]{4,}|(?![a-z]{3}(?![a-z]))[A-Za-z]{3}"
    r"|or|no|if|is|to|it|so|we|he|yes|all|odd)(?![A-Za-z])|(?<![\\A-Za-z])(?:[A-Za-z]+\s+[a-z]{3}(?![a-z])|[a-z]{3}\s+\w)"
)
#: A unit after a formula, in letters that are no variables.
_TAIL: Final = re.compile(
    r"(?:(?<=[\d})]\s)|(?<=pi\s))(?:[A-Za-z]{3,}|[A-Za-z]{1,2}\u2024|[cmk]m|kg|%)[A-Za-z\d\s^{}/*%\u2024-]*$"
)
_NO_FORMULA: Final = re.compile(r"[:?#`@~]|(?<!_)\d\s+\d|\d_|[^\x00-\x7f]|[-+*/']$|\\(?:cdot|times)$|\.\s|[A-Za-z]\.")
#: Words, then a colon, `=` or `is`: `total = 5`, `The area is 5`.
_NAME: Final = re.compile(
    r"^(?!(?:sin|cos|tan|log|max|min)\b)[A-Za-z]{3,}[A-Za-z .]*(?:[:=]|(?<= is)\s|(?<=equals)\s)\s*(?=\S)"
)
_NAMES: Final = re.compile(
    r"(?<![A-Za-z\\])((?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|sqrt|log|exp|max|min|gcd|lcm|det|ln|pi)(?![A-Za-z])"
)


def read_answer(text: str) -> Answer:
    """Parse `text`, which must be nothing but an answer. TooLarge if it cannot be compared."""
    if len(text) > MAX_ANSWER:
        raise TooLarge(f"the answer has more than {MAX_ANSWER} characters")
    if max(_depths(text), default=0) > MAX_DEPTH:
        raise TooLarge(f"the answer has more than {MAX_DEPTH} brackets within each other")
    return _read(tidy(plain(text)))


def chosen(text: str, reference: Answer) -> str:
    """Of an answer such as `(C) 12`, the letter or the content, as the reference has it; any other answer as it is."""
    choice = re.fullmatch(r"\(?(?P<letter>[A-J])(?:\)|[.:]\s)\s*(?P<content>\S.*)", tidy(plain(text[:MAX_ANSWER])))
    is_letter = isinstance(reference, Formula) and len(reference.latex) == 1 and reference.latex.upper() in "ABCDEFGHIJ"
    return text if choice is None else choice["letter" if is_letter else "content"]


def _read(text: str) -> Answer:
    text = _NAME.sub("", text)
    if re.fullmatch(r"(?i)\\emptyset|\\varnothing|\\\{\s*\\\}|(?:the )?(?:empty|null) set", text):
        return Group("{}", (), text)
    found = _quantity(text) or _ratio(text) or _grouped(text) or _formula(text)
    words = re.sub(rf"{MARK}|(?<!\d)[.,'-]|[.,'-](?!\d)|\breal\b", "", text.casefold()).split()
    return found or Words("".join(map(singular, words)) or "".join(text.split()))


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


def _ratio(text: str) -> Group | None:  # in its lowest terms
    parts = [int(part) for part in text.split(":")] if re.fullmatch(r"\d+(\s*:\s*\d+)+", text) else []
    return Group(":", tuple(Quantity(Fraction(part, math.gcd(*parts) or 1)) for part in parts), text) if parts else None


def _grouped(text: str) -> Answer | None:
    """Several answers; in brackets also one."""
    text = _VECTOR.sub(lambda match: f"({match[1].strip().replace(2 * chr(92), ',')})", text)
    if re.fullmatch(r"\].*,.*[\[\]]|\[.*,.*\[", text):  # ]0,1[ is (0,1)
        text = f"{text[0].replace(']', '(')}{text[1:-1]}{text[-1].replace('[', ')')}"
    opened = next((left for left in _CLOSES if text.startswith(left)), "")
    if opened and (text[-1] not in _CLOSES[opened] or 0 in _depths(text)[len(opened) - 1 : -1]):
        opened = ""
    inner = text[len(opened) : -len(opened) or None].strip()
    parts = _split(inner)
    if len(parts) > MAX_ITEMS:
        raise TooLarge(f"the answer is a list of more than {MAX_ITEMS}")
    if len(parts) == 1:
        return _read(inner) if opened else None
    return Group(opened and opened[-1] + text[-1], tuple(_read(part.strip()) for part in parts), text)


def _split(text: str) -> list[str]:
    r"""The parts between separators outside of brackets; the first that there is. A part with one \pm is two."""
    depths = _depths(text)
    parts = [text]
    for separator in _SEPARATORS:
        cuts = [match for match in re.finditer(separator, text) if depths[match.start()] == 0]
        if cuts:
            edges = [0, *(edge for cut in cuts for edge in cut.span()), len(text)]
            parts = [text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]
            break
    return [part.replace(r"\pm", sign) for part in parts for sign in ("+-" if part.count(r"\pm") == 1 else "+")]


def _depths(text: str) -> list[int]:  # how many brackets are open after each character
    return list(accumulate((c in "([{") - (c in ")]}") for c in text))


def _formula(text: str) -> Formula | None:
    text = _NAMES.sub(r"\\\1", text)
    tail = None if re.search(r"(?:sin|cos|tan|cot|sec|csc)(?![a-z]).*degrees", text) else _TAIL.search(text)
    unit = unit_of(f" {tail.group()}") if tail else None
    body = (text[: tail.start()].strip() if tail and unit else text).replace(MARK, "")
    capitals = len(body) > 1 and body.isalpha() and body.isupper()  # as HHT: their order counts, unlike that of factors
    prose = _PROSE.search(re.sub(r"\\(?:begin|end)\{[a-z]+\}", "", body))
    if not body or capitals or prose or _NO_FORMULA.search(body):
        return None
    return Formula(body, unit or frozenset())
