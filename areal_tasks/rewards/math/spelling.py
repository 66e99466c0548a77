r"""Normalises spelling: digits, signs, blanks, Markdown, and LaTeX's layout and style."""

from __future__ import annotations

import re
import unicodedata
from typing import Final

#: Set behind a unit of one or two letters in `\text{}`: it is no product of variables.
MARK: Final = "\u2024"
_SIGNS: Final = "×times ·cdot ⋅cdot √sqrt ∛sqrt[3] ≈approx ≤le ≥ge ≠ne ±pm ∞infty ∅emptyset ∈in ∪cup ∩cap ∠angle"
_CHARACTERS: Final = str.maketrans(
    dict.fromkeys("\u2212\u2013\u2012\u2010\u2011\ufe63", "-")  # minus, dashes as long as one, hyphens
    | dict.fromkeys("\u200b\u200c\u200d\ufeff", "")
    | dict.fromkeys("。।", ". ")
    | dict.fromkeys("，、،", ", ")
    | dict.fromkeys("°º˚", "\\degree ")
    | {"÷": "/", "\u2044": "/"}
    | {sign: f"\\{name} " for sign, name in re.findall(r"(.)(\S+)\s*", _SIGNS)}
)
_RAISED: Final = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_GREEK: Final = re.compile(r"(?<![\u0370-\u03ff])[ΓΔΘΛΞΠΣΦΨΩα-ω](?![\u0370-\u03ff])")

#: An argument in braces, with braces within it.
_ARGUMENT: Final = r"\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
_DECLARED: Final = "displaystyle|textstyle|limits|rm|bf|it|sf|tt|tiny|small|large|Large|LARGE|huge|therefore|checkmark"
_STYLES: Final = (
    r"text(?!style|color)[a-z]*|math(?!bb)[a-z]+|[fm]?box|framebox|boxed|operatorname|bm|boldsymbol|pmb|underline"
    "|ensuremath"
)
_OTHER_NAMES: Final = {"lbrace": r"\{", "rbrace": r"\}", "langle": "(", "rangle": ")", "lvert": "|", "rvert": "|"} | {
    name: rf"\{name.removeprefix('b')[-4:]}"
    for name in ("bmod", "dfrac", "tfrac", "cfrac", "sfrac", "xfrac", "nicefrac")
}
_REPEATING: Final = re.compile(
    r"(?<![\d.])(\d+)\.(\d*?)(?:\\(?:overline|dot|bar)\s*\{?(\d+)\}?|\((\d+)\)|(\d+?)\5+(?:\\[lc]?dots|\.\.\.))"
)
_REPLACED: Final = (
    (re.compile(r"\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])\s*\.?"), ""),
    (re.compile(rf"\\(?:{_DECLARED})(?![a-zA-Z])|\\!|\\#"), ""),
    (re.compile(r"\\(?:[hv]space|[hv]?phantom|color|textcolor|colorbox|tag)\*?\s*\{[^{}]*\}"), ""),
    (re.compile(r"(?<!\\)\\(?:[,;:> ]|q?quad(?![a-zA-Z]))|(?<!~)~(?!~|(?<=\d~)\d)"), " "),
    (re.compile(rf"\\({'|'.join(_OTHER_NAMES)})(?![a-zA-Z])"), lambda match: _OTHER_NAMES[match[1]]),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"(?<=\d)_\{(\d+)\}"), r"_\1"),
    (re.compile(r"\{(\d{1,3}(?:,\d{3})+)\}"), lambda match: f"{{{match[1].replace(',', '')}}}"),
    (re.compile(r"\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})|\\degree(?![a-zA-Z])"), " degrees "),
    (re.compile(rf"\\(?:{_STYLES})(?![a-zA-Z]){_ARGUMENT}"), lambda match: _as_text(match[1])),
    (re.compile(r"\{([^{}]*)\\choose([^{}]*)\}|(\d+)\s+choose\s+(\d+)"), r"\\binom{\1\3}{\2\4}"),
    (re.compile(r"\bC\(\s*(\d+)\s*,\s*(\d+)\s*\)"), r"\\binom{\1}{\2}"),
    (re.compile(r"\\?sqrt\s*\(((?:[^()]|\([^()]*\))*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"(\\sqrt\[\d+\])\s*(\w)"), r"\1{\2}"),
    (re.compile(r"(?<=[\w)}])\*\*(?=[\w({-])"), "^"),
    (re.compile(r"\b(?:negative|minus)\s+(?=[\d\\$.])"), "-"),
    (re.compile(r"(\d+)\s+(?:out of|over|divided by)\s+(\d+)"), r"\1/\2"),
    (re.compile(r"\s*\(\s*\\?mod(?:ulo)?\s+\d+\s*\)|\\pmod\s*(?:\d+|\{\s*\d+\s*\})"), ""),
    (re.compile(r"(?<=\d)\s+mod(?=\s+\d)"), r" \\mod"),
    (_REPEATING, lambda match: _fraction(*match.groups(""))),
)
_FRACTION: Final = re.compile(r"(?:(\d+)\s*)?\\frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))")
#: Delimiters around all of a text.
_DRESSED: Final = re.compile(
    r"^(\$\$?|\*\*|__|\")((?:(?!\1).)*)\1$|^\\\(((?:(?!\\[()]).)*)\\\)$|^\\\[((?:(?!\\[\[\]]).)*)\\\]$", re.DOTALL
)
_LABEL: Final = re.compile(
    r"^(?:a\s*:\s*|(?:the |my )?(?:final |correct )?(?:(?:answer|result|solution)\b|ans\b\.?)(?: is\b)?\s*[:=]?\s*"
    r"|(?:option|choice)\s+(?=\(?[A-J]\b)|(?:about|approximately|roughly|around|exactly)\s+"
    r"|(?:\\approx(?![a-z])|~(?!~)|=)\s*)",
    re.IGNORECASE,
)


def plain(text: str) -> str:
    """`text` with ASCII digits and signs, and LaTeX commands for symbols such as π."""
    text = re.sub(r"[⁰¹²³⁴-⁹⁺⁻]+", lambda match: f"^{{{match[0].translate(_RAISED)}}}", text)
    text = re.sub(r"[¼-¾⅐-⅞]", r" \g<0>", text).translate(_CHARACTERS)
    text = _GREEK.sub(
        lambda match: f"\\{unicodedata.name(match[0]).split()[-1].lower()} ",
        unicodedata.normalize("NFKC", text).translate(_CHARACTERS),
    )
    return re.sub(r"(?![0-9])\d", lambda match: str(unicodedata.decimal(match[0])), text)


def tidy(text: str) -> str:
    """An answer without delimiters, emphasis, layout, a label such as `Answer:`, and surrounding punctuation."""
    before = None
    while text != before:
        before = text
        text = _DRESSED.sub(r"\2\3\4", respelled(text).strip(" \t\n*`").rstrip(".,;:"))
        text = _LABEL.sub("", text)
    return " ".join(text.replace(r"\$", "$").replace(r"\%", "%").split())


def respelled(text: str) -> str:
    r"""`text` without LaTeX that only lays it out, such as `\,` and `\text{}`."""
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)
    return text


def slashed(text: str) -> str:
    r"""`text` with its numeric fractions, such as 1\frac{1}{2}, as 1 1/2."""
    return _FRACTION.sub(r"\1 \2\3/\4\5", text)


def _as_text(argument: str) -> str:
    mark = MARK if re.fullmatch(r"\s*(?!or|to|is|no|if|in)[A-Za-z]{1,2}\s*", argument) else ""
    return f" {argument.strip()}{mark} "


def _fraction(whole: str, head: str, *tails: str) -> str:
    r"""A repeating decimal, such as 0.1\overline{6}, as a fraction."""
    tail = "".join(tails)
    return f"\\frac{{{int(whole + head + tail) - int(whole + head)}}}{{{'9' * len(tail)}{'0' * len(head)}}}"
