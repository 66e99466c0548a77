r"""Normalises spelling: digits, signs, blanks, Markdown, and LaTeX's layout and style."""

from __future__ import annotations

import re
import sys
import unicodedata
from typing import Final

from areal_tasks.rewards.math.units import unit_of

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
    **dict.fromkeys("°º˚", r"^\circ "),
    **dict.fromkeys("。।", ". "),
    **dict.fromkeys("，、،", ", "),
    **{"×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "\u2044": "/", "√": r"\sqrt ", "∛": r"\sqrt[3] "},
    **{"≈": r"\approx ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∞": r"\infty "},
    **{"∅": r"\emptyset ", "∈": r"\in ", "∪": r"\cup ", "∩": r"\cap ", "ℝ": r"\mathbb{R}", "∠": r"\angle "},
}
_CHARACTERS: Final = {**_DIGITS, **_FULL_WIDTH, **_FRACTIONS, **str.maketrans(_SYMBOLS)}
_RAISED: Final = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_EXPONENT: Final = re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
_GREEK: Final = re.compile(r"(?<![\u0370-\u03ff])[ΓΔΘΛΞΠΣΦΨΩα-ω](?![\u0370-\u03ff])")

#: An argument in braces, with braces within it.
_ARGUMENT: Final = r"\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
_DECLARED: Final = "displaystyle|textstyle|limits|rm|bf|it|sf|tt|tiny|small|large|Large|LARGE|huge|therefore|checkmark"
_STYLES: Final = (
    r"text(?!style|color)[a-z]*|math(?!bb)[a-z]+|[fm]?box|framebox|boxed|operatorname|bm|boldsymbol|pmb|underline"
    "|ensuremath"
)
_ABBREVIATION: Final = re.compile(r"\b[A-Za-z]{1,2}\b")
_REPEATING: Final = re.compile(
    r"(?<![\d.])(\d+)\.(\d*?)(?:\\(?:overline|dot|bar)\s*\{?(\d+)\}?|\((\d+)\)|(\d+?)\5+(?:\\[lc]?dots|\.\.\.|…))"
)
_REPLACED: Final = (
    (re.compile(r"\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])\s*\.?"), ""),
    (re.compile(rf"\\(?:{_DECLARED})(?![a-zA-Z])|\\!|\\#"), ""),
    (re.compile(r"\\(?:[hv]space|[hv]?phantom|color|textcolor|colorbox|tag)\*?\s*\{[^{}]*\}"), ""),
    (re.compile(r"(?<!\\)\\(?:[,;:> ]|q?quad(?![a-zA-Z]))|(?<!~)~(?!~)"), " "),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\{(\d{1,3}(?:,\d{3})+)\}"), lambda match: f"{{{match[1].replace(',', '')}}}"),
    (re.compile(r"\\(?:[dtcsx]|nice)frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})|\\degree(?![a-zA-Z])"), " degrees "),
    (re.compile(rf"\\(?:{_STYLES})(?![a-zA-Z]){_ARGUMENT}"), lambda match: _as_text(match)),
    (re.compile(r"\\[lr]brace(?![a-z])"), lambda match: r"\{" if match[0][1] == "l" else r"\}"),
    (re.compile(r"\\[lr](?:angle|vert)(?![a-z])"), lambda match: {"la": "(", "ra": ")"}.get(match[0][1:3], "|")),
    (re.compile(r"\{([^{}]*)\\choose([^{}]*)\}"), r"\\binom{\1}{\2}"),
    (re.compile(r"\\?sqrt\s*\(((?:[^()]|\([^()]*\))*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"(\\sqrt\[\d+\])\s*(\w)"), r"\1{\2}"),
    (re.compile(r"(?<=[\w)}])\*\*(?=[\w({-])"), "^"),
    (re.compile(r"\b(?:negative|minus)\s+(?=[\d\\$.])"), "-"),
    (re.compile(r"(\d+)\s+(?:out of|over|divided by)\s+(\d+)"), r"\1/\2"),
    (re.compile(r"(?:\bC\(\s*(\d+)\s*,\s*(\d+)\s*\)|(\d+)\s+choose\s+(\d+))"), r"\\binom{\1\3}{\2\4}"),
    (re.compile(r"\s*\(\s*\\?mod(?:ulo)?\s+\d+\s*\)|\\pmod\s*(?:\d+|\{\s*\d+\s*\})"), ""),
    (re.compile(r"\\bmod(?![a-z])|(?<=\d)\s+mod(?=\s+\d)"), r" \\mod"),
    (_REPEATING, lambda match: _fraction(match)),
)
_DELIMITERS: Final = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("__", "__"), ('"', '"'))
_LABEL: Final = re.compile(
    r"a\s*:\s*|(?:the |my )?(?:final |correct )?(?:(?:answer|result|solution)\b|ans\b\.?)(?: is\b)?\s*[:=]?\s*"
    r"|(?:option|choice)\s+(?=\(?[A-J]\b)|(?:about|approximately|roughly|around|exactly)\s+"
    r"|(?:\\approx(?![a-z])|~(?!~)|=)\s*",
    re.IGNORECASE,
)


def plain(text: str) -> str:
    """`text` with ASCII digits and signs, and LaTeX commands for symbols such as π."""
    text = _EXPONENT.sub(lambda match: f"^{{{match[0].translate(_RAISED)}}}", text)
    return _GREEK.sub(_greek, text.translate(_CHARACTERS))


def _greek(match: re.Match[str]) -> str:
    name = unicodedata.name(match[0]).rpartition(" ")[2].lower().replace("lamda", "lambda")
    return f"\\{name.capitalize() if match[0].isupper() else name} "


def tidy(text: str) -> str:
    """An answer without delimiters, emphasis, layout, a label such as `Answer:`, and surrounding punctuation."""
    before = None
    while text != before:
        before = text
        text = _undressed(respelled(text).strip(" \t\n*`").rstrip(".,;:"))
    return " ".join(text.replace(r"\$", "$").replace(r"\%", "%").split())


def respelled(text: str) -> str:
    r"""`text` without LaTeX that only lays it out, such as `\,` and `\text{}`."""
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)
    return text


def _as_text(match: re.Match[str]) -> str:
    """The argument; units behind a number get a mark, which tells `m` from a variable."""
    marked = _ABBREVIATION.sub("\\g<0>\u2024", match[1])
    behind_a_number = re.search(r"\d", match.string[: match.start()]) and not match.string[match.end() :].startswith(
        "="
    )
    return f" {marked if behind_a_number and unit_of(f' {marked.strip()}') is not None else match[1]} "


def _fraction(match: re.Match[str]) -> str:
    r"""A repeating decimal, such as 0.1\overline{6}, as a fraction."""
    whole, head, *tails = match.groups()
    tail = next(tail for tail in tails if tail)
    over = int(whole + head + tail) - int(whole + head)
    return f"\\frac{{{over}}}{{{(10 ** len(tail) - 1) * 10 ** len(head)}}}"


def _undressed(text: str) -> str:
    for left, right in _DELIMITERS:
        inner = text[len(left) : -len(right)]
        if text == left + inner + right and left not in inner and right not in inner:
            return inner
    return _LABEL.sub("", text, count=1) if _LABEL.match(text) else text
