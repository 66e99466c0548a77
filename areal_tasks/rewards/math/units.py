"""Units that may follow a number without changing it, and which of them are the same."""

from __future__ import annotations

import re
from typing import Final

from areal_tasks.rewards.math.spelling import MARK


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ZEROS: Final = """hundred 2 百 2 thousand 3 k 3 K 3 千 3 천 3 万 4 萬 4 만 4 lakh 5 million 6 mil 6 mn 6 M 6 crore 7
    亿 8 億 8 억 8 billion 9 bil 9 bn 9 B 9 trillion 12 tn 12 quadrillion 15 quintillion 18"""
#: Factors written as words or letters after a number; words also in the plural.
MULTIPLIERS: Final = {"dozen": 12} | {word: 10 ** int(zeros) for word, zeros in re.findall(r"(\S+) (\d+)", _ZEROS)}
#: Words that change the number before them.
VALUES: Final = MULTIPLIERS.keys() | _words(
    """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety grand gross score half halve third fourth
    fifth sixth seventh eighth ninth tenth hundredth thousandth millionth squared cubed factorial plus minus base mod
    root double triple quadruple twice thrice pi tau infinity inf nan sqrt sin cos tan log ln exp max i e"""
)
#: Words that retract the number before them, or offer another.
DOUBTS: Final = _words(
    """or but nor maybe perhaps possibly probably not no neither either unless except if though although however yet
    wrong false unknown uncertain unsure guess wait actually instead rather"""
)
#: Words that are not part of a unit; any other word may be.
_NO_UNITS: Final = VALUES | DOUBTS | _words("and over under above below than roughly approximately about around almost")
#: What makes another number, or another claim, of the one before: parts of words in other scripts, words in Latin ones.
CHANGES: Final = re.compile(
    r"[十百千万萬亿億兆半多余餘或和至到不천만억]|分之|以上|以下|ではあり|[でじ][はゃ]な|または|아니|아닙|또는"
    r"|тысяч|тисяч|милли[оа]|мільй|дюжин|مليون|مليار|ألف|illions?\b|\b(?:m|b|tr)il{1,2}i?on(?!aire)[a-z]*"
    r"|\b(?:mil{1,2}[iyj](?:ar|o)[eéns]*d?[a-z]*|mil(?:h[aoõ]\w*|le|les|a)|tausende?|hundert|duizend|tusen|cientos?|docenas?"
    r"|douzaines?|dutzend|la[ck]hs?|lacs?|mio|mrd|mln|mld|bln|ribu|juta|elfu|nghìn|ngàn|triệu|tỷ|tỉ|trăm)\b",
    re.IGNORECASE,
)
_FILLERS: Final = _words("of per a an the in each every total all altogether left more worth overall")
#: A unit's canonical name, and its other names; plurals are made singular first.
_SAME: Final = """degree deg; percent % pct percentage; dollar $ usd buck; euro € eur; pound £ gbp lb; yen ¥ jpy;
    rupee ₹ inr rs; cent ¢; hour h hr; minute min; second s sec; day d; year yr; meter m metre; kilometer km kilometre;
    centimeter cm centimetre; millimeter mm millimetre; inch inche; foot ft feet; yard yd; mile mi; gram g gm;
    kilogram kg kilo; ounce oz; liter l litre; milliliter ml millilitre; gallon gal; celsius c; fahrenheit f; watt w;
    volt v; newton n; joule j; person people; child children; man men; woman women"""
_CANONICAL: Final = {word: names.split()[0] for names in _SAME.split(";") for word in names.split()}
#: Units of two letters that are not listed above. Other words of two letters are variables.
_SHORT: Final = _words("am pm st nd rd th pt qt mg kw hz pa kb mb gb tb ha ms ns kj cc rs tv pc ev mu")
#: Powers and quotients in words, and in figures.
_POWERS: Final = (
    (re.compile(r"\bmph\b"), "mile/hour"),
    (re.compile(r"\bk[mp]h\b"), "km/h"),
    (re.compile(r"\b(?:square|sq)\.?\s+([^\W\d_]+)|([^\W\d_]+)\s+squared\b"), r"\1\2^2"),
    (re.compile(r"\b(?:cubic|cu)\.?\s+([^\W\d_]+)|([^\W\d_]+)\s+cubed\b"), r"\1\2^3"),
)
_LETTERS: Final = frozenset("ahsmglLWVNJCF%$€£¥₹¢")  # letters and signs that are units, or the article
_WORD: Final = re.compile(
    rf"(?P<word>[^\W\d_]+|[%$€£¥₹¢])(?P<mark>{MARK}?)\.?\s*(?P<power>\^\s*\{{?-?[123]\}}?)?[\s/*'-]*"
)
_PLURAL: Final = re.compile(r"(?<=[cs]h)es$|(?<=[xz])es$|(?<=ss)es$|(?<!s)s$")


def unit_of(text: str) -> frozenset[str] | None:
    """The parts, in their canonical names, of the unit that is all of `text` behind a number; None if it is none.

    Without a blank, only a well-known unit is one (`5kg`, not `5ab`).
    """
    attached = text[:1].isalpha() and text[:1].isascii()
    text = text.strip().replace("per cent", "percent").replace(r"\mu", "mu").replace(r"\cdot", "*").lstrip("-")
    text = text if text.rstrip("/* ") == "" else text.lstrip("/* ")
    if text[:1] + text[-1:] in ("()", "[]"):
        text = text[1:-1]
    for pattern, power in _POWERS:
        text = pattern.sub(power, text)
    words = list(_WORD.finditer(text))
    whole = "".join(word.group() for word in words) == text and all(map(_is_unit, words))
    if not whole or (attached and not _is_known(words[0]["word"])):
        return None
    return frozenset(filter(None, map(_part, words)))


def _is_unit(match: re.Match[str]) -> bool:
    word = match["word"]
    if CHANGES.search(word) or not word.isascii():
        return not CHANGES.search(word)
    if len(word) <= 2:
        return _is_known(word) or bool(match["mark"] and word in "AKTH")  # else these are variables
    return not {word.lower(), singular(word.lower())} & _NO_UNITS


def _is_known(word: str) -> bool:
    known = word.lower() in _FILLERS | _SHORT or singular(word.lower()) in _CANONICAL
    return word in _LETTERS if len(word) == 1 else known


def _part(match: re.Match[str]) -> str:
    word = singular(match["word"].lower())
    word = "inch" if word == "in" and match.end() == len(match.string) else word
    return "" if word in _FILLERS else _CANONICAL.get(word, word) + re.sub(r"[\s{}]", "", match["power"] or "")


def singular(word: str) -> str:
    """`word`, in lower case, without the ending of the plural."""
    return word if word in _CANONICAL or len(word) < 3 else _PLURAL.sub("", re.sub("ies$", "y", word))
