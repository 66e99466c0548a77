"""Units that may follow a number without changing it, and which of them are the same."""

from __future__ import annotations

import re
from typing import Final


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Factors written as words or letters after a number; words also in the plural.
MULTIPLIERS: Final = {
    **{"dozen": 12, "hundred": 100, "thousand": 10**3, "lakh": 10**5, "crore": 10**7},
    **{"million": 10**6, "billion": 10**9, "trillion": 10**12, "quadrillion": 10**15, "quintillion": 10**18},
    **{"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "mil": 10**6, "mn": 10**6, "bil": 10**9, "bn": 10**9},
    **{
        "百": 100,
        "千": 10**3,
        "万": 10**4,
        "萬": 10**4,
        "亿": 10**8,
        "億": 10**8,
        "천": 10**3,
        "만": 10**4,
        "억": 10**8,
    },
}

MAX_WORDS: Final = 6

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
_LINKS: Final = _words("and over under above below than roughly approximately about around almost nearly")
#: Words that are not part of a unit; any other word may be.
_NO_UNITS: Final = VALUES | DOUBTS | _LINKS
#: Parts of words in scripts without blanks that make another number, or another claim, of the one before.
_OTHER_SCRIPTS: Final = re.compile("[十百千万萬亿億兆半多余餘或和至到不천만억]|分之|以上|以下")
_FILLERS: Final = _words("of per a an the in each every total all altogether left more worth overall")
#: A unit's canonical name, and its other names; plurals are made singular first.
_SAME: Final = """degree deg; percent % pct percentage; dollar $ usd buck; euro € eur; pound £ gbp lb; yen ¥ jpy;
    rupee ₹ inr rs; cent ¢; hour h hr; minute min; second s sec; day d; year yr; meter m metre; kilometer km kilometre;
    centimeter cm centimetre; millimeter mm millimetre; inch inche; foot ft feet; yard yd; mile mi; gram g gm;
    kilogram kg kilo; ounce oz; liter l litre; milliliter ml millilitre; gallon gal; celsius c; fahrenheit f; watt w;
    volt v; newton n; joule j; person people; child children; man men; woman women"""
_CANONICAL: Final = {word: names.split()[0] for names in _SAME.split(";") for word in names.split()}
_COMPOUND: Final = {"mph": ("mile", "hour"), "kmh": ("kilometer", "hour"), "kph": ("kilometer", "hour")}
#: Units of two letters that are not listed above. Other words of two letters are variables.
_SHORT: Final = _words("am pm st nd rd th pt qt mg kw hz pa kb mb gb tb ha ms ns kj cc rs tv pc ev mu")
_POWERS: Final = {"square": "^2", "sq": "^2", "squared": "^2", "cubic": "^3", "cu": "^3", "cubed": "^3"}
_LETTERS: Final = frozenset("ahsmglLWVNJCF%$€£¥₹¢")  # letters and signs that are units, or the article
_ABBREVIATED: Final = frozenset("AKTH")  # units only where the mark of `\text{}` tells them from variables
_WORD: Final = re.compile(
    r"(?P<word>[^\W\d_]+|[%$€£¥₹¢])(?P<mark>\u2024?)\.?\s*(?:\^\s*\{?(?P<power>-?[123])\}?|(?P<after>squared|cubed)\b)?[\s/*'-]*"
)


def unit_of(text: str) -> frozenset[str] | None:
    """The parts of a unit in their canonical names; empty for no text, None if `text` is not a unit.

    `text` is all that follows a number: without a blank, only a well-known unit is one (`5kg`, not `5ab`).
    """
    attached = text[:1].isalpha() and text[:1].isascii()
    text = text.strip().replace("per cent", "percent").replace(r"\mu", "mu").replace(r"\cdot", "*").lstrip("-")
    text = text if text.rstrip("/* ") == "" else text.lstrip("/* ")
    if text[:1] + text[-1:] in ("()", "[]"):
        text = text[1:-1]
    words = list(_WORD.finditer(text))
    if "".join(word.group() for word in words) != text or len(words) > MAX_WORDS or not all(map(_is_unit, words)):
        return None
    if attached and not _is_known(words[0]["word"]):
        return None
    before = [None, *(word["word"].lower() for word in words)]
    parts = (_parts(word, _POWERS.get(earlier or "", "")) for word, earlier in zip(words, before, strict=False))
    return frozenset(part for found in parts for part in found)


def leading_unit(text: str) -> str:
    """The first word of what follows a number in a sentence, if it is a well-known unit."""
    match = _WORD.match(text.lstrip())
    return " " + match.group().strip() if match is not None and _is_known(match["word"]) else ""


def compatible(reference: frozenset[str], found: frozenset[str]) -> bool:
    """Whether one contains all parts of the other; a reference without a unit accepts any."""
    return reference <= found or found <= reference


def _is_unit(match: re.Match[str]) -> bool:
    word = match["word"]
    if not word.isascii():
        return not _OTHER_SCRIPTS.search(word)
    if len(word) <= 2:
        return _is_known(word) or bool(match["mark"] and word in _ABBREVIATED)
    return word.lower() not in _NO_UNITS and singular(word.lower()) not in VALUES


def _is_known(word: str) -> bool:
    if len(word) == 1:
        return word in _LETTERS
    word = word.lower()
    return any(word in known for known in (_FILLERS, _SHORT, _POWERS, _COMPOUND)) or singular(word) in _CANONICAL


def _parts(match: re.Match[str], power: str) -> list[str]:
    word = match["word"].lower()
    if word == "in" and match.end() == len(match.string):
        word = "inch"
    if word in _FILLERS or word in _POWERS:
        return []
    power = f"^{match['power']}" if match["power"] else _POWERS.get(match["after"] or "", power)
    word = singular(word)
    return [name + power for name in _COMPOUND.get(word, (_CANONICAL.get(word, word),))]


def singular(word: str) -> str:
    """`word`, in lower case, without the ending of the plural."""
    if word in _CANONICAL or len(word) < 3 or word.endswith("ss"):
        return word
    if word.endswith("ies"):
        return word[:-3] + "y"
    if re.search(r"(?:ch|sh|x|z|ss)es$", word):
        return word[:-2]
    return word.removesuffix("s")
