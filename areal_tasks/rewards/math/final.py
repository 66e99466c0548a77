r"""Finds the final answer in a text: the last `\boxed{…}` or `#### …`, else the last number it states."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from areal_tasks.rewards.math.answers import MAX_ANSWER, Answer, Group, Quantity, Words, leading_number, read_answer
from areal_tasks.rewards.math.spelling import plain, respelled, slashed, tidy
from areal_tasks.rewards.math.units import CHANGES, DOUBTS, VALUES, unit_of

#: Characters at the end of a text without a marked answer that are searched.
MAX_TAIL: Final = 2000

_END_OF_TURN: Final = re.compile(
    r"<\|(?:im_end|eot_id|eom_id|endoftext|end_of_text|return)\|>|</s>|<eos>|<end_of_turn>|<[|｜]end▁of▁sentence[|｜]>"
)
_THOUGHTS: Final = "(?:think|thinking|thought|reasoning)"
_THOUGHT: Final = re.compile(rf"<(?P<closes>/?){_THOUGHTS}>", re.IGNORECASE)
_UNBRACED: Final = re.compile(r"\\boxed\s*(-?\d[\d.,]*(?<=\d)|[A-Za-z](?![A-Za-z]))")
#: A Markdown heading: words, or a number followed by words.
_HEADING: Final = re.compile(r"(?![-+(\[{\\$€£¥₹.\d])|\d+[.)]\s+[A-Za-z]")
_DELIMITED: Final = r"\$\$.+?\$\$|\\\[.+?\\\]|\\\(.+?\\\)|(?<![\\$\w])\$(?=\S)[^$\n]+?(?<=\S)\$(?!\d)"
_MATH: Final = re.compile(_DELIMITED, re.DOTALL)
_ANCHOR: Final = re.compile(
    r"(?:^\s*a\s*:|(?:\banswer\b|\bans\b|答案?|정답|답|\br[eé]ponse\b|\brespuesta\b|\bantwort\b|\bответ\b)"
    r"[^\n.:=\d不非]{0,60}?(?:\bis\b|[:=]|[是为為は은는]\s*:?))\s*(?P<answer>[^\n]+)",
    re.IGNORECASE | re.MULTILINE,
)
#: A formula without delimiters: `3 sqrt(5)`, `nCr(5,2)`, `pi/2`.
_BARE: Final = (
    r"(?:-?\d+\s?\*?\s?)?(?:\\?[A-Za-z]+(?:\((?:[^()\n]|\([^()\n]*\))*\)|/\d+)"
    r"|\\(?:sqrt|frac|binom)(?:\[\d+\])?(?:\s*(?:\{(?:[^{}]|\{[^{}]*\})*\}|\d))+)"
)
#: A formula, a ratio, or the beginning of a number.
_VALUE: Final = re.compile(
    rf"(?P<formula>{_DELIMITED})|(?<![A-Za-z\d_.)^:])(?:(?P<bare>{_BARE})|(?P<ratio>\d+(?:\s?:\s?\d+)+)|[-+]?(?:[$€£¥₹]\s*)?[-+]?(?:\d|\.\d))",
    re.DOTALL,
)
_SENTENCE_END: Final = re.compile(r"[.!?](?:\s|$)|\n")
#: The beginning of another clause, such as an explanation.
_CLAUSE: Final = re.compile(
    r"[.;:](?=\s)|\(|,?\s+(?:which|so|because|since|as|for|that|where|with|when|by)\b|[,;]\s*(?=[^\x00-\x7f])|因为|因為|所以"
)
#: What follows a value within a sentence, and is not its result.
_ASIDE: Final = re.compile(
    r"(\d(?:[^\n.!?\d]|\.(?=\d))*)(?:,?\s(?:which|because|since|where|when|\w+ed (?:at|when)|as (?:in|shown)|by)\s"
    r"|,?\s*(?:因为|因為))(?:(?!所以|因此)[^\n.!?]|\.(?=\d))*"
)
#: The exclamation mark behind a plain number that closes a sentence, or a formula, in which it is a factorial.
_EXCLAIMED: Final = re.compile(
    rf"({_DELIMITED})|(?<![A-Za-z\d_.*/+^)-])(-?\$?\d[\d,.]*)!+(?=\s*(?:\n|\Z)|\s+[A-Z])", re.DOTALL
)
#: What stands before a number that counts steps, equations and the like.
_COUNTED: Final = re.compile(
    r"(?i)(?:\b(?:step|equation|eq\.|eq|formula|line|part|case|figure|fig\.|table)s?\s*(?:\(?\d+\)?,?\s+(?:and|or|to)\s+)?\(?|第\s*)$"
)
#: What denies the number behind it, or offers another.
_REFUSED: Final = re.compile(
    r"(?i)(?:\b(?:or|not|nor|than)|n't)\s+(?:[a-z]+\s+)?$"
    r"|(?:不是|不为|不等于|非|或者?是?|または|또는|分之|(?:[\d$}]|\d[^\W\d得达加升涨降])(?:到|至)|\d\s*[~〜])\s*(?:[a-z]\s*=\s*)?$"
)
_RETRACTED: Final = re.compile(
    rf"(?:\b(?:{'|'.join(sorted(DOUBTS))})\b|n't\b|ではあり|[でじ][はゃ]な|아니|아닙|不是|或|または|또는|分之)",
    re.IGNORECASE,
)
#: In the sentence of a value, or in a later one that names another.
_TAKEN_BACK: Final = re.compile(
    rf"\A(?:(?![.!?](?:\s|$))[^\n])*?{_RETRACTED.pattern}|(?:{_RETRACTED.pattern})[^.!?\n]*\d", re.IGNORECASE
)
_CONTRAST: Final = re.compile(
    r"(?<=[\w}$%])\s*[,(]\s*(?:not|rather than|instead of)\s+[-$]?\d[\d,.]*(?<=\d)\)?", re.IGNORECASE
)
_CONTINUED: Final = re.compile(
    r"\s*(?:[\^_]|~~|[*/]\s*[\d(\\]|\\[a-z]|(?![ahsmgl])[a-z]\b|and (?:a|one|two|three)\b"
    rf"|-?(?:{'|'.join(sorted(VALUES))})\b|{CHANGES.pattern})",
    re.IGNORECASE,
)
#: Between two values that are one answer, as in `x = 1 and x = 2` or `5 hours and 30 minutes`.
_JOINT: Final = re.compile(r"(?:\s+[a-z]+)?,?\s+(?:and|(?P<or>or))\s+(?:[A-Za-z]\w*\s*=\s*)?")


class NoAnswer(ValueError):
    """The text has no final answer; the message says why."""


def final_answer(completion: str, prompt: str, unfinished: bool, words: bool) -> str:
    """The text of the final answer, in `words` if it can be these. NoAnswer if there is none, or it is unfinished."""
    turn, *more = _END_OF_TURN.split(completion, maxsplit=1)
    text = _UNBRACED.sub(r"\\boxed{\1}", plain(_without_thoughts(turn, prompt)))
    marked = _marked(text, unfinished and not more, words)
    if marked is not None:
        return marked
    if unfinished and not more:
        raise NoAnswer("the text was cut off before a marked answer")
    return _stated(re.sub(r"(?s)```[A-Za-z]+\n.*?(?:```|\Z)", "", text)[-MAX_TAIL:], words)


def reference_answer(answer: str) -> str:
    r"""The answer in a data set's answer column: the last `#### …` or `\boxed{…}` of a solution, else all of it."""
    text = _UNBRACED.sub(r"\\boxed{\1}", plain(answer))
    return _marked(text, unfinished=False, words=True) or text.replace("####", "").strip()


def _without_thoughts(text: str, prompt: str) -> str:
    """The text after the last `</think>`. NoAnswer if the thinking does not end."""
    tags = list(_THOUGHT.finditer(text))
    closed = tags[-1]["closes"] if tags else not re.search(rf"<{_THOUGHTS}>\s*\Z", prompt, re.IGNORECASE)
    if not closed:
        raise NoAnswer("the thinking never ends")
    return text[tags[-1].end() :] if tags else text


def _marked(text: str, unfinished: bool, words: bool) -> str | None:
    """The last marked answer that is not empty; None without one. NoAnswer if it is cut off."""
    boxes, opened = _boxes(text)
    marks = re.finditer(r"(?<!#)####(?!#)[ \t]*([^\n#]*)", text)
    lines = [(mark.end(), mark[1]) for mark in marks if words or not _is_heading(tidy(mark[1][:MAX_ANSWER]))]
    end, found = max((mark for mark in (*boxes, *lines) if mark[1].strip(" \t*")), default=(0, None))
    is_line = (end, found) in lines
    if unfinished and (opened > end or (is_line and end == len(text))):
        raise NoAnswer("the text was cut off in its last marked answer")
    return _statement(found) if found and is_line else found


def _boxes(text: str) -> tuple[list[tuple[int, str]], int]:
    """End and content of each innermost closed box, and the position of the last unclosed one (or -1)."""
    found: list[tuple[int, str]] = []
    opened: list[tuple[bool, int]] = []
    last = -1  # start of the last closed box
    for brace in re.finditer(r"\\(?:boxed|f(?:rame)?box)\s*\{|\\[{}]|[{}]", text):
        if brace.group().endswith("{") and brace.group() != r"\{":
            opened.append((len(brace.group()) > 1, brace.end()))
        elif brace.group() == "}" and opened:
            is_box, start = opened.pop()
            if is_box and start > last:
                found.append((brace.end(), text[start : brace.start()]))
                last = start
    return found, max((start for is_box, start in opened if is_box), default=-1)


def _is_heading(line: str) -> bool:  # a formula may begin with letters, too
    if re.fullmatch(_BARE, line) or not _HEADING.match(line):
        return False
    return line.upper() == "N/A" or _has_words(read_answer(line))


def _statement(text: str) -> str:
    """`text`, or only the value that it begins with, if another clause follows that does not retract it."""
    if len(text) > MAX_ANSWER:
        return text
    text = tidy(text)
    formula, leading = _MATH.match(text), leading_number(text)
    if not formula and not _has_words(read_answer(text)):
        return text
    if not formula and not leading:
        return re.split(rf"{_SENTENCE_END.pattern}|,?\s*(?:因为|因為|所以)", text, maxsplit=1)[0]
    written, rest = (formula.group(), text[formula.end() :]) if formula else leading[1:] if leading else ("", text)
    clause = _CLAUSE.search(rest)
    if clause is None or unit_of(rest[: clause.start()]) is None or _TAKEN_BACK.search(rest):
        return text
    return written + rest[: clause.start()]


def _has_words(answer: Answer) -> bool:
    return isinstance(answer, Words) or (isinstance(answer, Group) and any(map(_has_words, answer.items)))


def _is_numbers(answer: Answer) -> bool:
    return isinstance(answer, Quantity) or (isinstance(answer, Group) and all(map(_is_numbers, answer.items)))


def _stated(text: str, words: bool) -> str:
    """A value after the last `answer is`; else the last line, if it is numbers; else the last number or formula."""
    text = _EXCLAIMED.sub(lambda match: match[1] or f"{match[2]}.", text)
    text = _ASIDE.sub(r"\1", _CONTRAST.sub("", slashed(respelled(re.sub(r"\*\*|__|`", "", text))))).strip()
    anchors = [anchor["answer"] for anchor in _ANCHOR.finditer(text)]
    if anchors and len(anchors[-1]) <= MAX_ANSWER:
        answer = _statement(anchors[-1])
        if words or not _has_words(read_answer(answer)):
            return answer
    line = text.rpartition("\n")[2]
    alone = re.fullmatch(r"\(?[A-J]\)?\.?", line) or (words and len(line.split()) == 1)
    return line if len(line) <= MAX_ANSWER and (alone or _is_numbers(read_answer(line))) else _last_value(text)


def _last_value(text: str) -> str:
    values = list(_values(text))
    if not values:
        raise NoAnswer("there is no number in the text")
    while len(values) > 1 and _COUNTED.search(text[: values[-1][0]][-60:]):
        values.pop()
    begin, end, written = values.pop()
    is_number, all_of_it = not _MATH.fullmatch(written), written
    while values and (link := _JOINT.fullmatch(text[values[-1][1] : begin])) and not (link["or"] and is_number):
        begin, _, earlier = values.pop()
        all_of_it = f"{tidy(earlier)}, {tidy(all_of_it)}"
    sentence = _SENTENCE_END.split(text[end:], maxsplit=1)[0]
    before = _REFUSED.search(text[:begin][-40:])
    refused = before and (is_number or not before.group().isascii())
    if refused or _CONTINUED.match(sentence) or _RETRACTED.search(sentence):
        raise NoAnswer("the last number of the text is changed or retracted by the words around it")
    return all_of_it


def _values(text: str) -> Iterator[tuple[int, int, str]]:
    """Beginning, end and spelling of each number, and of each formula that has one."""
    end = 0
    while (match := _VALUE.search(text, end)) is not None:
        begin, end, written = *match.span(), match.group()
        if match.lastgroup is None:
            leading = leading_number(text[begin:])
            written = leading[1] if leading else ""
            end = max(end, begin + len(written))
        if re.search(r"\d", written):
            yield begin, end, written
