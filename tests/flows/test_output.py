"""What commands print: strict JSON with exact numbers, and text that no terminal obeys and every terminal takes."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tarfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_tasks.store import paths
from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.query import _python_rows
from flows.cli import main, output

RUN = Path(__file__).parents[1] / "fixtures" / "schema-1" / "run.tar.xz"
#: Sets the colour and the title, moves the cursor, asks the terminal, reverses the order of text.
HOSTILE = "a\x1b[31m\x1b]0;owned\x07\x1b[2J\r\x9b5n\u202eb\x00\x7f"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(RUN) as archive:
        archive.extractall(folder, filter="data")
    return open_store(folder.as_uri())


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_float=Decimal, parse_constant=refuse)


def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["arealflow", *words])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert not ended.value.code
    return capsys.readouterr().out


numbers = st.integers() | st.decimals().filter(lambda number: not number.is_snan()) | st.floats()
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(),
    lambda part: st.lists(part) | st.lists(part).map(tuple) | st.dictionaries(st.text(), part),
    max_leaves=8,
)


def expected(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: expected(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [expected(part) for part in value]
    if isinstance(value, float | Decimal):
        number = Decimal(str(value))
        return number if number.is_finite() else None
    return value


@given(values)
def test_json_is_strict_and_keeps_every_digit(value: Any) -> None:
    assert strict(output.json_text(value)) == strict(output.json_text(value, "\n")) == expected(value)
    assert output.json_text(value, "\n").isascii() and "\n" not in output.json_text(value)


def test_every_type_of_duckdb_is_strict_json(store: Store, monkeypatch: Any, capsys: Any) -> None:
    """Also integers of 128 bits, dates that Python lacks, NaN within lists, blobs, and texts with NUL."""
    where = ("old", "SELECT * FROM test_all_types()", "--store", store.url)
    low, high, null = strict(printed(monkeypatch, capsys, "sql", *where, "--json"))
    assert (low["hugeint"], high["uhugeint"]) == (-(2**127), 2**128 - 1)
    assert (low["dec38_10"], high["bigint"]) == (Decimal("-9999999999999999999999999999.9999999999"), 2**63 - 1)
    assert high["double_array"] == [42, None, None, None, None, -42] and set(null.values()) == {None}
    assert high["interval"] == "83 years 3 months 999 days 00:16:39.999999"
    for one in ("date", "timestamp", "timestamp_ns", "uuid", "blob"):
        assert isinstance(low[one], str), one
    assert HOSTILE not in printed(monkeypatch, capsys, "sql", *where)
    assert "340282366920938463463374607431768211455" in printed(monkeypatch, capsys, "sql", *where, "--csv")


CONNECTION = duckdb.connect()
NUMBERS = {"HUGEINT": 2**127 - 1, "UHUGEINT": 2**128 - 1, "BIGINT": 2**63 - 1, "BIGNUM": 10**5000}


@given(st.sampled_from(sorted(NUMBERS)), st.integers(0), st.decimals(-(10**9), 10**9, places=9), st.floats())
def test_numbers_of_an_answer_are_those_of_the_query(kind: str, whole: int, exact: Decimal, real: float) -> None:
    whole %= NUMBERS[kind] + 1
    text = f"SELECT '{whole}'::{kind} AS w, '{exact:f}'::DECIMAL(38, 9) AS e, '{real!r}'::DOUBLE AS r, sum(7) AS s"
    [row] = strict(output.json_text(_python_rows(CONNECTION.sql(text))))
    assert row == {"w": whole, "e": exact, "r": expected(real), "s": 7}


# ── terminals ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def obeyed(text: str) -> list[str]:
    return [c for c in text if c != "\n" and (c < " " or "\x7f" <= c < "\xa0" or c == "\u202e")]


@given(st.text(st.sampled_from(HOSTILE) | st.characters()))
def test_no_control_reaches_the_terminal(text: str) -> None:
    assert not obeyed(output.visible(text).replace("\t", ""))
    assert output.visible(output.visible(text)) == output.visible(text)


def test_commands_show_hostile_data_and_json_keeps_it(store: Store, monkeypatch: Any, capsys: Any) -> None:
    (Path(store.url.removeprefix("file://")) / f"a{HOSTILE}".replace("\x00", "")).mkdir()
    store.put(paths.log_part("old", 1, "trainer", 0, 0), HOSTILE.encode() + b"\n\xff\n")
    query = f"SELECT '{HOSTILE}' AS \"{HOSTILE}\", repeat('x', 300) AS wide".replace("\x00", "")
    queries = (query, query.split(", repeat")[0])
    for words in (*(["sql", "old", text] for text in queries), ["logs", "old", "trainer"], ["runs"]):
        found = printed(monkeypatch, capsys, *words, "--store", store.url)
        assert "owned" in found or words == ["runs"]
        assert not obeyed(found), words
    [row] = strict(printed(monkeypatch, capsys, "sql", "old", queries[1], "--store", store.url, "--json"))
    assert list(row.items()) == [(HOSTILE.replace("\x00", ""),) * 2]


ASCII: list[dict[str, str]] = [{"PYTHONIOENCODING": "ascii"}, {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]


@pytest.mark.parametrize("environment", ASCII, ids=["output", "locale"])
@pytest.mark.parametrize("words", [["sql", "old", "SELECT chr(233) || chr(129414) AS e"], ["audit", "old"]])
def test_output_is_what_an_ascii_terminal_takes(store: Store, words: list[str], environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "arealflow.command", *words, "--store", store.url]
    ended = subprocess.run(command, env=os.environ | environment | {"LC_ALL": "C"}, capture_output=True)
    assert not ended.returncode, ended.stderr.decode()
    assert ended.stdout.isascii() and ended.stderr.isascii() and ended.stdout


def test_an_error_with_half_a_character_is_one_message(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["arealflow", "run", "no\ud83d\x1b[2J"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 1
    assert r"unknown recipe 'no\ud83d\x1b[2J'" in capsys.readouterr().err


def test_commands_print_by_one_module() -> None:
    """`echo`, `show` and `print_json` are what makes text fit for a terminal."""
    others = [path for path in Path(output.__file__).parent.glob("*.py") if path.name != "output.py"]
    for path in others:
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        found = {ast.unparse(call) for call in calls} & {"print", "typer.echo", "sys.stdout.write", "click.echo"}
        assert not found, path
