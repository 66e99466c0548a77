"""A path is a path: no character of a store's or a data file's name is taken for part of a URL or for a pattern."""

from __future__ import annotations

import json
import os
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from s3_server import BUCKET

from areal_tasks.data.datasets import Row, load_rows
from areal_tasks.store.backend import Store, open_store, store_url
from areal_tasks.store.parallel import parallel
from areal_tasks.store.query import run_sql
from schemas.errors import UserError
from schemas.recipe.sections import Data
from schemas.recipe.sources import holds_credentials, s3_place

HOSTILE = "exp#1?key=%41%2F*[a]{b}::c:&é🦆'\"\\ \t\n;@~+!"
RUN = Path(__file__).parents[1] / "fixtures" / "schema-1" / "run.tar.xz"

letters = st.sampled_from(HOSTILE) | st.characters(exclude_characters="/\0", exclude_categories=["Cs"])
names = st.text(letters, min_size=1, max_size=12).filter(lambda name: name not in (".", ".."))
non_utf8 = st.binary(min_size=1, max_size=6).map(lambda name: os.fsdecode(name.replace(b"/", b"").replace(b"\0", b"")))


def root(store: Store) -> str:
    return str(store.root)  # type: ignore[attr-defined]


@given(names | non_utf8.filter(lambda name: name not in ("", ".", "..")))
def test_a_store_is_the_folder_that_is_named(name: str) -> None:
    path = Path("/stores") / name
    raw = (
        [f"file://{path}", f"file:{path}", f"file://localhost{path}"] if "%" not in name and name.isprintable() else []
    )
    for named in (str(path), path.as_uri(), *raw):
        assert root(open_store(named)) == str(path)
        assert open_store(open_store(named).url).url == open_store(named).url
        assert not holds_credentials(store_url(named))
    assume(":" not in name and not name.startswith("~"))
    assert root(open_store(name)) == os.path.join(os.getcwd(), name)


@given(names)
def test_a_prefix_in_s3_is_the_one_that_is_named(name: str) -> None:
    assert s3_place(f"s3://bucket/stores/{name}") == ("bucket", f"stores/{name}")


@pytest.mark.parametrize(
    "named", ["a\ud83d", "file:///a\ud83d", "a\0b", "file:///a%00b", "s3://b/\ud83d", "s3://b#x/y"]
)
def test_what_can_be_no_name_is_refused(named: str) -> None:
    with pytest.raises(UserError, match=r"is not supported"):
        open_store(named)


@given(names)
def test_a_data_file_is_the_one_that_is_named(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{name}.jsonl")
        path.write_text(json.dumps({"question": "q", "answer": name}))
        for source in (str(path), path.as_uri(), str(path.with_name("{split}.jsonl"))):
            assert load_rows(Data(source=source), name) == [Row(0, "q", name)]


@pytest.mark.parametrize("kind", ["file", "s3"])
def test_runs_are_read_below_any_name(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    with tarfile.open(RUN) as archive:
        archive.extractall(tmp_path / HOSTILE, filter="data")
    copy = open_store(str(tmp_path / HOSTILE))
    if kind == "s3":
        request.getfixturevalue("s3")
        in_s3 = HOSTILE.replace("key=", "").replace("\\", "")  # SeaweedFS lists `\\` as `/`
        copy = open_store(f"s3://{BUCKET}/{tmp_path.name}/{in_s3}")
        files = [path for path in (tmp_path / HOSTILE).rglob("*") if path.is_file()]
        parallel(lambda path: copy.put(path.relative_to(tmp_path / HOSTILE).as_posix(), path.read_bytes()), files)
    other = open_store(copy.url.replace("1", "2"))
    assert copy.children("") == ["old"] and not other.children("")
    assert run_sql(copy, "old", "SELECT count(*) AS n, any_value(prompt) AS p FROM samples").to_pylist()[0]["n"]
