r"""Normalises spelling: digits, signs, blanks, Markdown, and LaTeX's layout commands."""

from __future__ import annotations

import re
import sys
import unicodedata
from typing import Final

_FULL_WIDTH: Final = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
_DIGITS: Final = {
    code: str(unicodedata.decimal(chr(code))) for code in range(128, sys.maxunicode + 1) if chr(code).isdecimal()
}
_FRACTIONS: Final = {
    ord(c): " " + unicodedata.normalize("NFKC", c).replace("\u2044", "/") for c in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
}
_SYMBOLS: Final[dict[str, str]] = {
    **dict.fromkeys("\u2212\u2013\u2012\u2010\u2011\ufe63", "-"),  # minus, dashes as long as one, hyphens
    **dict.fromkeys("\u00a0\u202f\u2009\u2007\u2008\u200a\u3000", " "),
    **dict.fromkeys("\u200b\u200c\u200d\ufeff", ""),
    **{digit: f"^{value}" for value, digit in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
    **dict.fromkeys("°º˚", r"^\circ "),
    "×": r"\times ",
    "·": r"\cdot ",
    "⋅": r"\cdot ",
    "÷": "/",
    "\u2044": "/",
    "π": r"\pi ",
    "∞": r"\infty ",
    "≈": r"\approx ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\ne ",
    "±": r"\pm ",
    "√": r"\sqrt ",
}
_CHARACTERS: Final = {**_DIGITS, **_FULL_WIDTH, **_FRACTIONS, **str.maketrans(_SYMBOLS)}

_LAYOUT: Final = re.compile(
    r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|phantom\{[^{}]*\}|!)(?![a-zA-Z])|\\!"
)
_BLANKS: Final = re.compile(r"(?<!\\)\\(?:[,;:> ]|q?quad(?![a-zA-Z]))|(?<!~)~(?!~)")
_REPLACED: Final = (
    (_LAYOUT, ""),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"_\{(\w+)\}"), r"_\1"),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})|\\degree(?![a-zA-Z])"), " degrees "),
    (re.compile(r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\\(?:boxed|fbox)\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}"), r"\1"),
    (_BLANKS, " "),
)
_DELIMITERS: Final = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("__", "__"), ('"', '"'))
_LABEL: Final = re.compile(
    r"a\s*:\s*|(?:the |my )?(?:final |correct )?(?:answer|result|solution)(?: is)?\s*(?:[:=]|(?<= is))\s*"
    r"|(?:\\approx(?![a-z])|~(?!~))\s*",
    re.IGNORECASE,
)


def plain(text: str) -> str:
    """`text` with ASCII digits and signs, and LaTeX commands for symbols such as π."""
    return text.translate(_CHARACTERS)


def tidy(text: str) -> str:
    """An answer without delimiters, emphasis, layout, a label such as `Answer:`, and surrounding punctuation."""
    before = None
    while text != before:
        before = text
        text = _undressed(text.strip(" \t\n*`").rstrip(".,;:"))
        text = respelled(text)
    return " ".join(text.replace(r"\$", "$").replace(r"\%", "%").split())


def respelled(text: str) -> str:
    r"""`text` without LaTeX that only lays it out, such as `\,` and `\text{}`."""
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)
    return text


def _undressed(text: str) -> str:
    for left, right in _DELIMITERS:
        inner = text[len(left) : -len(right)]
        if text == left + inner + right and left not in inner and right not in inner:
            return inner
    return _LABEL.sub("", text, count=1) if _LABEL.match(text) else text
