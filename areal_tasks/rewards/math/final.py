r"""Finds the final answer in a text: the last `\boxed{…}` or `#### …`, else the last number it states."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from areal_tasks.rewards.math.answers import (
    MAX_ANSWER,
    Answer,
    Group,
    Quantity,
    Words,
    leading_number,
    read_answer,
    slashed,
)
from areal_tasks.rewards.math.spelling import plain, respelled, tidy
from areal_tasks.rewards.math.units import DOUBTS, VALUES, leading_unit, unit_of

#: Characters at the end of a text without a marked answer that are searched.
MAX_TAIL: Final = 2000

_END_OF_TURN: Final = re.compile(
    r"<\|(?:im_end|eot_id|eom_id|endoftext|end_of_text|return)\|>|</s>|<eos>|<end_of_turn>|<[|｜]end▁of▁sentence[|｜]>"
)
_THOUGHTS: Final = "(?:think|thinking|thought|reasoning)"
_THOUGHT: Final = re.compile(rf"<(?P<closes>/?){_THOUGHTS}>", re.IGNORECASE)
_THINKS_FROM_THE_START: Final = re.compile(rf"<{_THOUGHTS}>\s*\Z", re.IGNORECASE)
_UNBRACED: Final = re.compile(r"\\boxed\s*(-?\d[\d.,]*(?<=\d)|[A-Za-z](?![A-Za-z]))")
_BRACES: Final = re.compile(r"\\(?:boxed|f(?:rame)?box)\s*\{|\\[{}]|[{}]")
_LINE: Final = re.compile(r"(?<!#)####(?!#)[ \t]*(?P<answer>[^\n#]*)")
#: A Markdown heading: words, or a number followed by words.
_HEADING: Final = re.compile(r"(?![-+(\[{\\$€£¥₹.\d])|\d+[.)]\s+[A-Za-z]")
_CODE: Final = re.compile(r"```[A-Za-z]+\n.*?(?:```|\Z)", re.DOTALL)
_EMPHASIS: Final = re.compile(r"\*\*|__|`")
_MATH: Final = re.compile(
    r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|(?<![\\$\w])\$(?=\S)([^$\n]+?)(?<=\S)\$(?!\d)", re.DOTALL
)
_ANCHOR: Final = re.compile(
    r"(?:^\s*a\s*:|(?:\banswer\b|\bans\b|答案?|정답|답|\br[eé]ponse\b|\brespuesta\b|\bantwort\b|\bответ\b)"
    r"[^\n.:=\d]{0,60}?(?:\bis\b|[:=]|是|为|為|は|은|는))\s*(?P<answer>[^\n]+)",
    re.IGNORECASE | re.MULTILINE,
)
_NUMBER: Final = re.compile(r"(?<![A-Za-z\d_.)^:])[-+]?(?:[$€£¥₹]\s*)?[-+]?(?:\d|\.\d)")
_SENTENCE_END: Final = re.compile(r"[.!?](?:\s|$)|\n")
#: The beginning of another clause, such as an explanation.
_CLAUSE: Final = re.compile(
    r"[.;:](?=\s)|\(|,?\s+(?:which|so|because|since|as|for|that|where|with|when|by)\b|[,;]\s*(?=[^\x00-\x7f])"
)
#: Words behind which the numbers of a sentence are not its result.
_ASIDE: Final = re.compile(
    r"\s(?:which|because|since|where|when|attained|achieved|occurring|as (?:in|shown)|by)\s|\((?:since|because|as)\s"
)
_RETRACTED: Final = re.compile(rf"\b(?:{'|'.join(sorted(DOUBTS))})\b|n't\b", re.IGNORECASE)
_CONTRAST: Final = re.compile(
    r"(?<=[\w}$%])\s*[,(]\s*(?:not|rather than|instead of)\s+[-$]?\d[\d,.]*(?<=\d)\)?", re.IGNORECASE
)
_CONTINUED: Final = re.compile(
    r"\s*(?:[\^_]|~~|[*/]\s*[\d(\\]|\\[a-z]|(?![ahsmgl])[a-z]\b|and (?:a|one|two|three)\b"
    rf"|-?(?:{'|'.join(sorted(VALUES))})\b)",
    re.IGNORECASE,
)
_REFUSED: Final = re.compile(r"(?:\b(?:or|not|nor|than)|n't)\s+(?:[a-z]+\s+)?$", re.IGNORECASE)
#: Between two values that are one answer, as in `x = 1 and x = 2` or `5 hours and 30 minutes`.
_JOINT: Final = re.compile(r"(?:\s+[a-z]+)?,?\s+(?:and|(?P<or>or))\s+(?:[A-Za-z]\w*\s*=\s*)?")
_RATIO: Final = re.compile(r"\d+(?:\s?:\s?\d+)+")
_ANSWER_FIELD: Final = re.compile(r'"(?:final_)?answer"\s*:\s*"?([^"{},]+)"?\s*[,}]')
_DELIMITER: Final = re.compile(r"\$\$?(?=.+\$)|(?<=.)\$|\\[\[\]()]")
_ALONE: Final = re.compile(r"\(?[A-J]\)?\.?")  # the letter of a choice


class NoAnswer(ValueError):
    """The text has no final answer; the message says why."""


def final_answer(completion: str, prompt: str, unfinished: bool, words: bool) -> str:
    """The text of the final answer. NoAnswer if there is none.

    Args:
        prompt: It may end with an opening `<think>`.
        unfinished: The completion was cut off.
        words: The answer may be words; otherwise words after #### are a heading.
    """
    turn, *more = _END_OF_TURN.split(completion, maxsplit=1)
    text = _UNBRACED.sub(r"\\boxed{\1}", plain(_without_thoughts(turn, prompt)))
    marked = _marked(text, unfinished and not more, words)
    if marked is not None:
        return marked
    if unfinished and not more:
        raise NoAnswer("the text was cut off before a marked answer")
    return _stated(_CODE.sub("", text)[-MAX_TAIL:], words)


def reference_answer(answer: str) -> str:
    r"""The answer in a data set's answer column: the last `#### …` or `\boxed{…}` of a solution, else all of it."""
    text = _UNBRACED.sub(r"\\boxed{\1}", plain(answer))
    return _marked(text, unfinished=False, words=True) or text.replace("####", "").strip()


def _without_thoughts(text: str, prompt: str) -> str:
    """The text after the last `</think>`. NoAnswer if the thinking does not end."""
    tags = list(_THOUGHT.finditer(text))
    closed = tags[-1]["closes"] if tags else not _THINKS_FROM_THE_START.search(prompt)
    if not closed:
        raise NoAnswer("the thinking never ends")
    return text[tags[-1].end() :] if tags else text


# ── marked answers ──────────────────────────────────────────────────────────────────────────────────────────────────


def _marked(text: str, unfinished: bool, words: bool) -> str | None:
    """The last marked answer that is not empty; None without one. NoAnswer if it is cut off."""
    boxes, opened = _boxes(text)
    found_lines = [(line.end(), line["answer"]) for line in _LINE.finditer(text)]
    lines = [line for line in found_lines if words or not _is_heading(tidy(line[1][:MAX_ANSWER]))]
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
    for brace in _BRACES.finditer(text):
        if brace.group().endswith("{") and brace.group() != r"\{":
            opened.append((len(brace.group()) > 1, brace.end()))
        elif brace.group() == "}" and opened:
            is_box, start = opened.pop()
            if is_box and start > last:
                found.append((brace.end(), text[start : brace.start()]))
                last = start
    return found, max((start for is_box, start in opened if is_box), default=-1)


def _is_heading(line: str) -> bool:
    """Whether a line after #### is words; a formula may begin with letters, too."""
    return bool(_HEADING.match(line)) and (line.upper() == "N/A" or _has_words(read_answer(line)))


def _statement(text: str) -> str:
    """`text`, or only the value that it begins with, if another clause follows that does not retract it."""
    text = tidy(text) if len(text) <= MAX_ANSWER else text
    if not _has_words(read_answer(text)) and not text.startswith("$"):
        return text
    formula = _MATH.match(text)
    leading = leading_number(text)
    if formula is None and leading is None:
        return _SENTENCE_END.split(text, maxsplit=1)[0]
    written, rest = (formula.group(), text[formula.end() :]) if formula else leading[1:] if leading else ("", text)
    clause = _CLAUSE.search(rest)
    if clause is None or unit_of(rest[: clause.start()]) is None or _taken_back(rest):
        return text
    return written + rest[: clause.start()]


def _taken_back(rest: str) -> bool:
    """Whether the sentence doubts its value, or a later one names another."""
    sentence, *later = _SENTENCE_END.split(rest)
    return bool(_RETRACTED.search(sentence)) or any(
        _RETRACTED.search(text) and re.search(r"\d", text) for text in later
    )


def _has_words(answer: Answer) -> bool:
    return isinstance(answer, Words) or (isinstance(answer, Group) and any(map(_has_words, answer.items)))


def _is_numbers(answer: Answer) -> bool:
    return isinstance(answer, Quantity) or (isinstance(answer, Group) and all(map(_is_numbers, answer.items)))


# ── answers without a mark ──────────────────────────────────────────────────────────────────────────────────────────


def _stated(text: str, words: bool) -> str:
    """A value after the last `answer is`; else the last line, if it is numbers; else the last number or formula."""
    text = _ANSWER_FIELD.sub(r"answer: \1\n", _EMPHASIS.sub("", text))
    text = _CONTRAST.sub("", _MATH.sub(_inline, slashed(respelled(text)))).strip()
    anchors = [anchor["answer"] for anchor in _ANCHOR.finditer(text)]
    if anchors and len(anchors[-1]) <= MAX_ANSWER:
        answer = _statement(anchors[-1])
        if words or not _has_words(read_answer(answer)):
            return answer
    line = text.rpartition("\n")[2]
    if len(line) <= MAX_ANSWER and (words and len(line.split()) == 1 or _ALONE.fullmatch(line)):
        return line
    return line if len(line) <= MAX_ANSWER and _is_numbers(read_answer(line)) else _last_value(text)


def _last_value(text: str) -> str:
    values = list(_values(text))
    if not values:
        raise NoAnswer("there is no number in the text")
    values = values[: _asides(text, values)]
    begin, end, written = values[-1]
    sentence = _SENTENCE_END.split(text[end:], maxsplit=1)[0]
    joint = [written]
    for earlier, later in zip(values[-2::-1], values[:0:-1], strict=False):
        link = _JOINT.fullmatch(text[earlier[1] : later[0]])
        if link is None or (link["or"] and not _DELIMITER.match(written)):
            break
        joint, begin = [earlier[2], *joint], earlier[0]
    number = not _DELIMITER.match(written)
    if (number and _REFUSED.search(text[:begin][-40:])) or _CONTINUED.match(sentence) or _RETRACTED.search(sentence):
        raise NoAnswer("the last number of the text is changed or retracted by the words around it")
    written = ", ".join(_DELIMITER.sub("", part) for part in joint) if len(joint) > 1 else written
    return written + (leading_unit(text[end:]) if number else "")


def _asides(text: str, values: list[tuple[int, int, str]]) -> int:
    """How many of the values stand before words such as `which` in the last sentence that has values."""
    starts = [end.end() for end in _SENTENCE_END.finditer(text, 0, values[-1][0])]
    aside = _ASIDE.search(text, starts[-1] if starts else 0, values[-1][0])
    before = sum(end <= aside.start() + 1 for _, end, _ in values) if aside else 0
    return before if before and values[before - 1][0] >= (starts[-1] if starts else 0) else len(values)


def _values(text: str) -> Iterator[tuple[int, int, str]]:
    """Beginning, end and spelling of each number, and of each formula that has one."""
    position = 0
    for formula in (*_MATH.finditer(text), None):
        end = formula.start() if formula else len(text)
        yield from _numbers(text, position, end)
        if formula and re.search(r"\d", formula.group()):
            yield formula.start(), formula.end(), formula.group()
        position = formula.end() if formula else end


def _numbers(text: str, position: int, end: int) -> Iterator[tuple[int, int, str]]:
    while (match := _NUMBER.search(text, position, end)) is not None:
        leading = leading_number(text[match.start() : end])
        position = match.end()
        if leading is not None:
            ratio = _RATIO.match(text, match.start(), end)
            position = ratio.end() if ratio else match.start() + len(leading[1])
            yield match.start(), position, ratio.group() if ratio else leading[1]


def _inline(formula: re.Match[str]) -> str:
    """A formula that is a plain number, without its delimiters."""
    inner = tidy(formula.group())
    leading = leading_number(inner)
    return inner if leading is not None and unit_of(leading[2]) is not None else formula.group()
