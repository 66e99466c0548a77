"""The cases of docs/reference/math.md, the rule of the verifier `math`, and solutions as GSM8K writes them."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "math.md"


@dataclass(frozen=True)
class Case:
    """A row of a table: what a completion is judged to be, given a reference."""

    completion: str
    reference: str
    verdict: str
    truncated: bool


def documented_cases() -> dict[str, Case]:
    """Every row of the tables below "The rule of `math`", by its first two cells."""
    rule = DOCS.read_text().split("## The rule of `math`")[1]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in rule.splitlines() if line.startswith("| `")]
    return {f"{row[0].strip()} {row[1].strip()}": _case(*row[:3]) for row in rows}


def _case(completion: str, reference: str, verdict: str) -> Case:
    text = _text(completion)
    return Case(text.removesuffix("✂"), _text(reference), verdict.strip(), text.endswith("✂"))


def _text(cell: str) -> str:
    """The text of a cell, which is a code span of Markdown."""
    span = re.fullmatch(r"(`+)(.*)\1", cell.strip().replace(r"\|", "|"))
    assert span is not None, cell
    text = span[2][1:-1] if len(span[1]) > 1 and span[2].strip() else span[2]
    return re.sub(r"‹(.+?)×(\d+)›", lambda found: found[1] * int(found[2]), text).replace("⏎", "\n")


def worked_solution(seed: int) -> tuple[str, str]:
    """A short solution with GSM8K's calculator marks, which ends in `#### N`, and N."""
    draw = random.Random(seed)
    a, b, c = draw.randint(2, 40), draw.randint(2, 60), draw.randint(3, 900)
    sold = f"Mia sells {a} boxes at ${b} each: {a}*{b}=$<<{a}*{b}={a * b}>>{a * b}."
    kept = f"After paying ${c} she has {a * b}-{c}=$<<{a * b}-{c}={a * b - c}>>{a * b - c} left."
    shared = f"Shared by 4 that is {a * b - c}/4=<<{a * b - c}/4={(a * b - c) / 4:g}>>{(a * b - c) / 4:g} dollars each."
    answer = [f"{a * b}", f"{a * b - c}", f"{(a * b - c) / 4:g}", f"{a * b * 1000:,}"][seed % 4]
    more = [sold, f"{sold}\n{kept}", f"{sold}\n{kept}\n{shared}", f"{sold}\nA thousand such days: ${answer}"][seed % 4]
    return f"{more}\n#### {answer}", answer
