"""Every row is checked before a run starts, in each format by the same rule, and refused by its place."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_tasks.data.datasets import check_data, load_rows
from schemas.errors import UserError
from schemas.recipe.load import load_recipe
from schemas.recipe.sections import Data

GOOD = {"question": "q", "answer": "a"}
#: As a line of JSON, and what the message says.
WRONG = {
    '{"question": "q", "answer": null}': "not null",
    '{"question": "q", "answer": NaN}': "not NaN",
    '{"question": -Infinity, "answer": "a"}': "not -Infinity",
    '{"question": "q", "answer": 1e400}': "not Infinity",
    '{"question": "q", "answer": true}': "not true",
    '{"question": "q", "answer": {"b": ["\\ud83d"]}}': r'not {"b": ["\ud83d"]}',
    '{"question": "a \\ud83d", "answer": "a"}': r"'a \ud83d', which ends in half a character",
    '{"question": "q", "answer": "\\udc00b"}': r"'\udc00', which ends in half a character",
    '{"question": "q"}': "has no column 'answer'",
    '{"question": "", "answer": "a"}': "is empty",
    '{"question": " \\n\\u00a0", "answer": "a"}': "is empty",
    '["q", "a"]': "should be an object",
    '{"question": "q", "answer": ' + "9" * 5000 + "}": "is no valid JSON",
    "[" * 100_000: "is no valid JSON",
    '{"question": "\udcff", "answer": "a"}': "is no valid JSON",  # bytes that are no UTF-8
}


def check(source: Path) -> None:
    check_data(load_recipe("quickstart", [f"data.source={source}", "evaluation={}"]))


@pytest.mark.parametrize("row", WRONG)
def test_a_wrong_row_is_refused_before_the_start(tmp_path: Path, row: str) -> None:
    lines = tmp_path / "rows.jsonl"
    lines.write_bytes("\n".join([json.dumps(GOOD)] * 2000 + [row, "{"]).encode(errors="surrogateescape"))
    for refusing in (lambda: check(lines), lambda: load_rows(Data(source=str(lines)), "train")):
        with pytest.raises(UserError) as refused:
            refusing()
        assert f"{lines}', line 2001" in str(refused.value) and WRONG[row] in str(refused.value)
        assert "\n" not in str(refused.value) and str(refused.value).encode()
    assert len(load_rows(Data(source=str(lines), limit=2000), "train")) == 2000


cells = (
    st.lists(st.none() | st.floats()) | st.lists(st.none() | st.integers(-(2**63), 2**63 - 1)) | st.lists(st.booleans())
)
texts = st.lists(st.none() | st.text() | st.text(" \n\t\x1c\x85\xa0\u2028\u200b"))
kinds = st.sampled_from([None, pa.string_view(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])


def outcome(data: Data) -> Any:
    try:
        return load_rows(data, "train")
    except UserError as error:
        return str(error).partition(": column")[2] or "empty"


@given(texts | cells, st.booleans(), kinds)
def test_parquet_follows_the_rule_of_single_rows(column: list[Any], is_prompt: bool, kind: Any) -> None:
    names = ("question", "answer") if is_prompt else ("answer", "question")
    is_text = any(isinstance(value, str) for value in column)
    values = pa.array(column, pa.string()).cast(kind) if is_text and kind else pa.array(column)
    table = pa.table({names[0]: values, names[1]: pa.array(["x"] * len(column), pa.string())})
    with tempfile.TemporaryDirectory() as folder:
        pq.write_table(table, f"{folder}/rows.parquet")
        rows = [json.dumps({names[0]: value, names[1]: "x"}) for value in column]
        Path(folder, "rows.jsonl").write_text("\n".join(rows))
        found = [outcome(Data(source=f"{folder}/rows.{suffix}")) for suffix in ("parquet", "jsonl")]
    assert found[0] == found[1]


@pytest.mark.parametrize("wrong", [None, float("nan"), float("inf")])
def test_a_wrong_row_of_parquet_is_named(tmp_path: Path, wrong: float | None) -> None:
    answers = pa.array([1.5] * 70_000 + [wrong])
    pq.write_table(pa.table({"question": pa.array(["q"] * len(answers)), "answer": answers}), tmp_path / "r.parquet")
    with pytest.raises(UserError, match=r"r\.parquet', row 70001: column 'answer' should hold text or a number, not "):
        check(tmp_path / "r.parquet")


@pytest.mark.parametrize("encoded", [False, True])
def test_bytes_of_parquet_that_are_no_text_are_named(tmp_path: Path, encoded: bool) -> None:
    raw = pa.array([b"q"] * 9 + [b"\xed\xa0\xbd"]).cast(pa.binary())
    text = pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())
    text = text.dictionary_encode() if encoded else text
    pq.write_table(pa.table({"question": text, "answer": text}), tmp_path / "r.parquet")
    with pytest.raises(UserError, match=r"r\.parquet', row 10: column 'question' should hold text or a number, not "):
        check(tmp_path / "r.parquet")


def test_rows_of_parquet_are_checked_as_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one by one: the rule for single rows is asked about few."""
    count = 200_000
    pq.write_table(pa.table({"question": ["q"] * count, "answer": pa.array(range(count))}), tmp_path / "r.parquet")
    asked: list[Any] = []
    monkeypatch.setattr("areal_tasks.data.datasets._text", lambda value, *_: asked.append(value) or str(value))
    check(tmp_path / "r.parquet")
    assert not asked


def test_parquet_with_two_columns_of_one_name_or_damaged_pages_is_refused(tmp_path: Path) -> None:
    names = ["question", "answer", "answer"]
    pq.write_table(pa.table([pa.array(["q"])] * 3, names=names), tmp_path / "twice.parquet")
    with pytest.raises(UserError, match="has several columns 'answer': rename all but one"):
        check(tmp_path / "twice.parquet")
    file = tmp_path / "pages.parquet"
    pq.write_table(pa.table({"question": ["q"] * 500, "answer": list(range(500))}), file)
    content = bytearray(file.read_bytes())
    content[4:200] = b"\xff" * 196
    file.write_bytes(content)
    with pytest.raises(UserError, match="is no valid Parquet file"):
        check(file)
