"""Rows from everywhere a recipe may name, and a clear message for each way that data can be wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from areal_tasks.data.datasets import Row, load_rows
from areal_tasks.store.backend import Store
from schemas.errors import UserError
from schemas.recipe.sections import Data

ROWS = [{"question": "1+1?", "answer": "2"}, {"question": "a\u2028b", "answer": 3}, {"question": "ü", "answer": "4.5"}]
WANTED = [Row(0, "1+1?", "2"), Row(1, "a\u2028b", "3"), Row(2, "ü", "4.5")]


def jsonl(path: Path) -> None:
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n\n", encoding="utf-8")


def json_array(path: Path) -> None:
    path.write_text(json.dumps(ROWS))


def parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([{**row, "answer": str(row["answer"])} for row in ROWS]), path)


@pytest.mark.parametrize(("suffix", "write"), [(".jsonl", jsonl), (".json", json_array), (".parquet", parquet)])
def test_files_of_each_format(tmp_path: Path, suffix: str, write: Callable[[Path], None]) -> None:
    write(tmp_path / f"train{suffix}")
    assert load_rows(Data(source=f"{tmp_path}/{{split}}{suffix}"), "train") == WANTED
    assert load_rows(Data(source=f"{tmp_path}/train{suffix}", limit=2), "any") == WANTED[:2]
    assert load_rows(Data(source=f"file://{tmp_path}/train{suffix}"), "any") == WANTED


def test_an_object_store_url() -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/bucket/test.jsonl", b'{"question": "q", "answer": "a"}')
    assert load_rows(Data(source="memory://bucket/{split}.jsonl"), "test") == [Row(0, "q", "a")]
    with pytest.raises(UserError, match=r"memory://bucket/train\.jsonl': there is no such file"):
        load_rows(Data(source="memory://bucket/{split}.jsonl"), "train")


def test_an_unknown_kind_of_url_is_refused() -> None:
    with pytest.raises(UserError, match=r"nosuch://x\.jsonl' cannot be read: .*check URL"):
        load_rows(Data(source="nosuch://x.jsonl"), "train")


def test_sums_are_rows_too() -> None:
    rows = load_rows(Data(source="sums://2", limit=5), "train")
    assert [row.prompt_id for row in rows] == [0, 1, 2, 3, 4]
    assert all(row.prompt.endswith("=") for row in rows)


BAD = [
    ("", "is empty"),
    ("\n\n", "is empty"),
    ('{"question": "q", "answer": "a"}\n{"question": "q",', "line 2 is no valid JSON"),
    ('{"question": "q", "answer": "a"}\n[1, 2]', "line 2 should be an object with named columns, not list"),
    (
        '{"question": "q", "solution": "a"}',
        "line 1 has no column 'answer'; it has 'question', 'solution'.*data.answer_column",
    ),
    ('{"text": "q", "answer": "a"}', "no column 'question'; it has 'text', 'answer'.*data.prompt_column"),
    ('{"question": "q", "answer": null}', "line 1: column 'answer' should hold text or a number, not null"),
    ('{"question": ["q"], "answer": "a"}', r"column 'question' should hold text or a number, not \[\"q\"\]"),
    ('{"question": "q", "answer": true}', "not true"),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_bad_lines_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(UserError, match=message):
        load_rows(Data(source=f"{tmp_path}/rows.jsonl"), "train")


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"question": "\xff\xfe", "answer": "a"}')
    with pytest.raises(UserError, match="line 1 is no valid JSON"):
        load_rows(Data(source=f"{tmp_path}/rows.jsonl"), "train")


def test_a_missing_file_says_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"there is no such file .looked for {tmp_path}/gone.jsonl"):
        load_rows(Data(source="gone.jsonl"), "train")


def test_a_json_object_is_no_data_set(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('{"question": "q"}')
    with pytest.raises(UserError, match="should hold one array"):
        load_rows(Data(source=f"{tmp_path}/rows.json"), "train")


def test_damaged_parquet_and_missing_columns(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nonsense PAR1")
    with pytest.raises(UserError, match="no valid Parquet"):
        load_rows(Data(source=f"{tmp_path}/bad.parquet"), "train")
    pq.write_table(pa.table({"question": ["q"]}), tmp_path / "short.parquet")
    with pytest.raises(UserError, match="no column 'answer'; it has 'question'"):
        load_rows(Data(source=f"{tmp_path}/short.parquet"), "train")


# ── Hugging Face data sets, from a local repository ─────────────────────────────────────────────────────────────────


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `datasets` repository as on the hub: a card that names configurations, and Parquet files by split."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "owner" / "arithmetic"
    (folder / "main").mkdir(parents=True)
    parquet(folder / "main" / "train-00000-of-00001.parquet")
    pq.write_table(
        pa.table({"question": ["held out"], "answer": ["0"]}), folder / "main" / "test-00000-of-00001.parquet"
    )
    splits = "[{split: train, path: main/train-*}, {split: test, path: main/test-*}]"
    card = f"---\nconfigs:\n- config_name: main\n  data_files: {splits}\n---\n"
    (folder / "README.md").write_text(card)
    return folder


def test_a_datasets_repository(repository: Path) -> None:
    data = Data(source=str(repository), subset="main")
    assert load_rows(data, "train") == WANTED
    assert load_rows(data, "test") == [Row(0, "held out", "0")]
    with pytest.raises(UserError, match="no column 'solution'; it has 'question', 'answer'"):
        load_rows(data.model_copy(update={"answer_column": "solution"}), "train")


def test_unknown_split_and_subset_say_what_there_is(repository: Path) -> None:
    with pytest.raises(UserError, match=r"split 'validation', cannot be loaded.*train.*test"):
        load_rows(Data(source=str(repository), subset="main"), "validation")
    with pytest.raises(UserError, match=r"cannot be loaded.*main"):
        load_rows(Data(source=str(repository), subset="socratic"), "train")


def test_a_repository_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(UserError, match=r"nobody/nothing', split 'train', cannot be loaded: .*a file .* needs no hub"):
        load_rows(Data(source="nobody/nothing"), "train")


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"needs the package 'datasets': pip install"):
        load_rows(Data(source="openai/gsm8k", subset="main"), "train")


def test_an_s3_url_on_a_real_server(s3_store: Store) -> None:
    s3_store.put("rows/train.jsonl", b'{"question": "q", "answer": "a"}')
    source = f"{s3_store.url}/rows/{{split}}.jsonl"
    assert load_rows(Data(source=source), "train") == [Row(0, "q", "a")]
    with pytest.raises(UserError, match=r"rows/test\.jsonl': there is no such file"):
        load_rows(Data(source=source), "test")
    with pytest.raises(UserError, match=r"no-such-bucket/train\.jsonl'"):
        load_rows(Data(source="s3://no-such-bucket/{split}.jsonl"), "train")
