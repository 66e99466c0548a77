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
_BRACES: Final = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]")
_LINE: Final = re.compile(r"(?<!#)####(?!#)[ \t]*(?P<answer>[^\n#]*)")
_HEADING: Final = re.compile(r"(?![-+(\[{\\$€£¥₹.\d]|[A-Za-z](?:$|\s*[-+*^=(\d]))|\d+[.)]\s+[A-Za-z]")
_CODE: Final = re.compile(r"```[A-Za-z]+\n.*?(?:```|\Z)", re.DOTALL)
_EMPHASIS: Final = re.compile(r"\*\*|__|`")
_MATH: Final = re.compile(
    r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|(?<![\\$\w])\$(?=\S)([^$\n]+?)(?<=\S)\$(?!\d)", re.DOTALL
)
_ANCHOR: Final = re.compile(
    r"(?:^\s*a\s*:|\banswer\b[^\n.:=\d]{0,60}?(?:\bis\b|[:=]))\s*(?P<answer>[^\n]+)", re.IGNORECASE | re.MULTILINE
)
_NUMBER: Final = re.compile(r"(?<![\w.)^_])[-+]?(?:[$€£¥₹]\s*)?[-+]?(?:\d|\.\d)")
_SENTENCE_END: Final = re.compile(r"[.!?](?:\s|$)|\n")
#: The beginning of another clause, such as an explanation.
_CLAUSE: Final = re.compile(r"[.;:](?=\s)|\(|,?\s+(?:which|so|because|since|as|for|that|where|with|when)\b")
_RETRACTED: Final = re.compile(rf"\b(?:{'|'.join(sorted(DOUBTS))})\b|n't\b", re.IGNORECASE)
_CONTINUED: Final = re.compile(
    r"\s*(?:[\^_]|~~|[*/]\s*[\d(\\]|\\[a-z]|(?![ahsmgl])[a-z]\b|and (?:a|one|two|three)\b"
    rf"|-?(?:{'|'.join(sorted(VALUES))})\b)",
    re.IGNORECASE,
)
_REFUSED: Final = re.compile(r"(?:\b(?:or|not|nor|than)|n't)\s+(?:[a-z]+\s+)?$", re.IGNORECASE)


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
    text = plain(_without_thoughts(turn, prompt))
    marked = _marked(text, unfinished and not more, words)
    if marked is not None:
        return marked
    if unfinished and not more:
        raise NoAnswer("the text was cut off before a marked answer")
    return _stated(_CODE.sub("", text)[-MAX_TAIL:], words)


def reference_answer(answer: str) -> str:
    r"""The answer in a data set's answer column: the last `#### …` or `\boxed{…}` of a solution, else all of it."""
    text = plain(answer)
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
    # Markdown headings: words, or a number followed by words
    lines = [line for line in found_lines if words or not _HEADING.match(tidy(line[1][:MAX_ANSWER]))]
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


def _statement(text: str) -> str:
    """`text`, or only the number that it begins with, if another clause follows that does not retract it."""
    text = tidy(text) if len(text) <= MAX_ANSWER else text
    leading = leading_number(text) if _has_words(read_answer(text)) else None
    if leading is None:
        return text
    _, written, rest = leading
    clause = _CLAUSE.search(rest)
    if clause is None or unit_of(rest[: clause.start()]) is None or _RETRACTED.search(rest):
        return text
    return written + rest[: clause.start()]


def _has_words(answer: Answer) -> bool:
    return isinstance(answer, Words) or (isinstance(answer, Group) and any(map(_has_words, answer.items)))


def _is_numbers(answer: Answer) -> bool:
    return isinstance(answer, Quantity) or (isinstance(answer, Group) and all(map(_is_numbers, answer.items)))


# ── answers without a mark ──────────────────────────────────────────────────────────────────────────────────────────


def _stated(text: str, words: bool) -> str:
    """A value after the last `answer is`; else the last line, if it is numbers; else the last number or formula."""
    text = _MATH.sub(_inline, slashed(respelled(_EMPHASIS.sub("", text)))).strip()
    anchors = [anchor["answer"] for anchor in _ANCHOR.finditer(text)]
    if anchors and len(anchors[-1]) <= MAX_ANSWER:
        answer = _statement(anchors[-1])
        if words or not _has_words(read_answer(answer)):
            return answer
    line = text.rpartition("\n")[2]
    return line if len(line) <= MAX_ANSWER and _is_numbers(read_answer(line)) else _last_value(text)


def _last_value(text: str) -> str:
    formulas = [formula for formula in _MATH.finditer(text) if re.search(r"\d", formula.group())]
    after = formulas[-1].end() if formulas else 0
    begin, written, rest = max(_numbers(text, after), default=(after, "", text[after:]))
    if not written and not formulas:
        raise NoAnswer("there is no number in the text")
    before = text[:begin] if written else text[: formulas[-1].start()]
    sentence = _SENTENCE_END.split(rest, maxsplit=1)[0]
    if _REFUSED.search(before[-40:]) or _CONTINUED.match(sentence) or _RETRACTED.search(sentence):
        raise NoAnswer("the last number of the text is changed or retracted by the words around it")
    return written + leading_unit(rest) if written else formulas[-1].group()


def _numbers(text: str, position: int) -> Iterator[tuple[int, str, str]]:
    """Position and spelling of each number, and the text after it."""
    while (match := _NUMBER.search(text, position)) is not None:
        leading = leading_number(text[match.start() :])
        position = match.end()
        if leading is not None:
            position = match.start() + len(leading[1])
            yield match.start(), *leading[1:]


def _inline(formula: re.Match[str]) -> str:
    """A formula that is a plain number, without its delimiters."""
    inner = tidy(formula.group())
    leading = leading_number(inner)
    return inner if leading is not None and unit_of(leading[2]) is not None else formula.group()
