"""Rules of CONTRIBUTING.md that can be checked in the tests' source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from waiting import LIMIT

TESTS = Path(__file__).parent
#: Where waiting is written, and programs that are no tests.
EXEMPT = {TESTS / "waiting.py", TESTS / "chaos" / "matrix.py", TESTS / "chaos" / "scene.py"}
WAITS = {"wait", "wait_for", "result", "join"}
ASKS = {"get", "post", "put", "request", "stream", "Client"}


@dataclass(frozen=True)
class Called:
    """A call in the tests: what is called, how, where, and the line that it ends on."""

    name: str
    call: ast.Call
    where: str
    line: str


@pytest.fixture(scope="module")
def calls() -> list[Called]:
    return [called for path in sorted(TESTS.rglob("*.py")) if path not in EXEMPT for called in calls_in(path)]


def calls_in(path: Path) -> Iterator[Called]:
    text = path.read_text()
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            last = node.end_lineno or node.lineno
            where = f"{path.relative_to(TESTS.parent)}:{node.lineno}"
            yield Called(dotted(node.func), node, where, lines[last - 1])


def dotted(node: ast.expr) -> str:
    """`a.b.c` as in the source; `…` for an expression that is no name."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "…"


def test_tests_wait_for_conditions(calls: list[Called]) -> None:
    """`wait_until` and `until` (waiting.py) do so. A stand-in that takes its time says why, at the end of the line."""
    found = [called.where for called in calls if called.name.endswith("sleep") and "  # " not in called.line]
    assert not found, "these sleep and do not say why"


def test_limits_are_for_machines_without_hope(calls: list[Called]) -> None:
    """Numbers below LIMIT, given to what waits or as a timeout; 0 is a look. The line says why, where one is right."""
    short = [called for called in calls if any(0 < limit < LIMIT for limit in limits(called))]
    assert not [called.where for called in short if "  # " not in called.line], "wait for LIMIT, or say why"


def limits(called: Called) -> Iterator[float]:
    """The limits that are written as numbers."""
    named = [keyword.value for keyword in called.call.keywords if (keyword.arg or "").endswith("timeout")]
    for node in [*named, *(called.call.args if called.name.rpartition(".")[2] in WAITS else [])]:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield node.value


def test_the_state_of_a_process_is_read_by_alive(calls: list[Called]) -> None:
    """psutil's `status` fails where a process ends while it is looked at; `alive` (waiting.py) says no."""
    found = [called.where for called in calls if called.name.endswith("rocess.status") or called.name == "p.status"]
    assert not found, "ask alive(process)"


def test_requests_to_servers_have_a_timeout(calls: list[Called]) -> None:
    """httpx itself gives up after 5 s."""
    asks = [called for called in calls if called.name in {f"httpx.{what}" for what in ASKS}]
    given = {called.where: {keyword.arg for keyword in called.call.keywords} for called in asks}
    assert not [where for where, names in given.items() if not names & {"timeout", "transport"}], (
        "name a timeout: LIMIT"
    )


def test_slower_tests_say_why(calls: list[Called]) -> None:
    slow = [called for called in calls if called.name.endswith("mark.slow")]
    assert not [one.where for one in slow if not one.call.args or len(ast.literal_eval(one.call.args[0])) < 10]
