"""`arealflow verify-cases`: where a verifier's verdicts differ from those that people gave."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from areal_tasks.rewards.pool import VerifierPool, VerifyResult
from areal_tasks.rewards.protocol import Row
from flows.cli.output import AsJson, print_json, show
from schemas.errors import UserError
from schemas.recipe.sections import Reward

#: The field whose values the mistakes are counted by.
KIND: Final = "category"
_MISTAKES: Final = ("wrongly accepted", "wrongly rejected", "failed")
_TEXTS: Final = ("completion", "answer")
#: Mistakes that are printed; the JSON has all.
_SHOWN: Final = 40


def verify_cases(
    file: Annotated[Path, typer.Argument(help="JSON lines with completion, answer, expected (true or false).")],
    verifier: Annotated[str, typer.Option(help="math, exact, or your own as package.module:object.")] = "math",
    arguments: Annotated[str, typer.Option(help="Keyword arguments of the verifier, as a JSON object.")] = "{}",
    workers: Annotated[int, typer.Option(min=1, max=256, help="Verifier processes.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Compare a verifier with labelled cases: what it accepts wrongly, and what it rejects wrongly, by kind."""
    cases = read_cases(file)
    settings = Reward(verifier=verifier, arguments=_object(arguments, "--arguments"), workers=workers)
    with VerifierPool(settings) as pool:
        found = pool.verify([Row(case.get("prompt", ""), case["completion"], case["answer"]) for case in cases])
    judged = zip(cases, found, strict=True)
    wrong = [row(case, result, kind) for case, result in judged if (kind := mistake(case, result))]
    rows = counts(cases, wrong)
    if as_json:
        print_json({"counts": rows, "mistakes": wrong})
        return
    show(rows, False, f"{file}: {len(cases)} cases, verifier {verifier}")
    if wrong:
        title = f"The first {_SHOWN} mistakes (--json has all):" if wrong[_SHOWN:] else "Mistakes:"
        show(wrong[:_SHOWN], False, title, vertical=True)


def read_cases(file: Path) -> list[dict[str, Any]]:
    """The cases of a file of JSON lines. UserError, with the line, if the file or a case is not as documented."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error}. Name a file of JSON lines with one case each") from error
    cases = [_case(line, f"{file}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not cases:
        raise UserError(f"{file} has no cases: write one JSON object a line, with completion, answer and expected")
    return cases


def _case(line: str, where: str) -> dict[str, Any]:
    case = _object(line, where)
    for name in (*_TEXTS, *({"prompt"} & case.keys())):
        if not isinstance(case.get(name), str):
            raise UserError(f"{where}: {name!r} should be a text")
    if not isinstance(case.get("expected"), bool):
        raise UserError(f"{where}: 'expected' should be true or false: whether the completion is right")
    return case


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UserError(f"{where}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{where}: should be a JSON object, such as {{…}}")
    return found


def mistake(case: Mapping[str, Any], result: VerifyResult) -> str:
    """One of _MISTAKES; empty if the verdict is the expected one."""
    if result.verdict in ("timeout", "error"):
        return "failed"
    accepted = result.verdict == "correct"
    return "" if accepted == case["expected"] else "wrongly accepted" if accepted else "wrongly rejected"


def row(case: Mapping[str, Any], result: VerifyResult, kind: str) -> dict[str, Any]:
    """A row of the mistakes."""
    texts = {name: case[name] for name in _TEXTS}
    found = {"parsed": result.parsed, "verdict": result.verdict, "detail": result.detail}
    return {"mistake": kind, KIND: str(case.get(KIND, "")), **texts, **found}


def counts(cases: Sequence[Mapping[str, Any]], wrong: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each kind of case, where cases have one, and one for all."""
    of = Counter(str(case.get(KIND, "")) for case in cases)
    by = Counter((row[KIND], row["mistake"]) for row in wrong)
    kinds = list(of) if len(of) > 1 or "" not in of else []
    rows = [(kind, of[kind], [by[kind, name] for name in _MISTAKES]) for kind in kinds]
    rows.append(("all", len(cases), [sum(row["mistake"] == name for row in wrong) for name in _MISTAKES]))
    return [{KIND: kind, "cases": n, **dict(zip(_MISTAKES, found, strict=True))} for kind, n, found in rows]
