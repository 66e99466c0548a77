"""`arealflow verify-cases`: a verifier beside labelled cases."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from test_cli import call

GOOD = {"completion": "#### 5", "answer": "5", "expected": True}
CASES = [
    GOOD | {"category": "plain"},
    GOOD | {"completion": "#### 6", "expected": False, "category": "plain", "prompt": "?", "source": "mine"},
    GOOD | {"completion": "5", "answer": "#### 6", "expected": True, "category": "odd"},
    GOOD | {"expected": False, "category": "odd"},
    GOOD | {"completion": "", "expected": False},
]


def written(folder: Path, cases: list[Any]) -> Path:
    path = folder / "cases.jsonl"
    path.write_text("\n".join(json.dumps(case) for case in cases) + "\n\n")
    return path


def row(kind: str, cases: int, accepted: int, rejected: int, failed: int = 0) -> dict[str, Any]:
    counts = {"wrongly accepted": accepted, "wrongly rejected": rejected, "failed": failed}
    return {"category": kind, "cases": cases, **counts}


def test_mistakes_are_counted_by_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(written(tmp_path, CASES))
    found = json.loads(call(capsys, monkeypatch, "verify-cases", path, "--json").out)
    assert found["counts"] == [row("plain", 2, 0, 0), row("odd", 2, 1, 1), row("", 1, 0, 0), row("all", 5, 1, 1)]
    assert [(one["mistake"], one["parsed"]) for one in found["mistakes"]] == [
        ("wrongly rejected", "5"), ("wrongly accepted", "5")
    ]  # fmt: skip
    table = call(capsys, monkeypatch, "verify-cases", path, "--verifier", "math")
    assert table.code == 0 and "5 cases, verifier math" in table.out and "wrongly accepted" in table.out


def test_a_users_verifier_runs_in_processes_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(
        "import os\n"
        "def right(prompt, completion, answer, limit=0):\n"
        "    return os._exit(3) if completion == '5' else len(completion) > limit\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    cases = [{name: value for name, value in case.items() if name != "category"} for case in CASES]
    arguments = ("verify-cases", str(written(tmp_path, cases)), "--verifier", "mine:right")
    found = json.loads(call(capsys, monkeypatch, *arguments, "--arguments", '{"limit": 1}', "--json").out)
    assert found["counts"] == [row("all", 5, 2, 0, 1)]
    assert [one["verdict"] for one in found["mistakes"]] == ["correct", "error", "correct"]
    assert "mine" not in sys.modules


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (GOOD | {"expected": "yes"}, "cases.jsonl, line 2: 'expected' should be true or false"),
        (GOOD | {"answer": 5}, "line 2: 'answer' should be a text"),
        (GOOD | {"prompt": None}, "line 2: 'prompt' should be a text"),
        ({"completion": "5"}, "line 2: 'answer' should be a text"),
        ([GOOD], "line 2: should be a JSON object"),
    ],
)
def test_a_case_that_is_not_as_documented_is_named(
    case: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = call(capsys, monkeypatch, "verify-cases", str(written(tmp_path, [GOOD, case])))
    assert found.code == 1 and message in found.err and found.err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        (None, [], "cases.jsonl cannot be read: "),
        (b"\xff\n", [], "cannot be read: "),
        (b"\n", [], "has no cases"),
        (b"{\n", [], "line 1: not JSON"),
        (json.dumps(GOOD).encode(), ["--verifier", "maths"], "'maths' is none of math, exact"),
        (json.dumps(GOOD).encode(), ["--arguments", "{"], "--arguments: not JSON"),
        (json.dumps(GOOD).encode(), ["--arguments", '{"strict": 1}'], "unexpected keyword argument 'strict'"),
    ],
)
def test_a_mistake_is_one_line(
    content: bytes | None,
    words: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if content is not None:
        (tmp_path / "cases.jsonl").write_bytes(content)
    found = call(capsys, monkeypatch, "verify-cases", str(tmp_path / "cases.jsonl"), *words)
    assert found.code == 1 and message in found.err and found.err.count("\n") == 1
