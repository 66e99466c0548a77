"""What a backend promises, on disk and on S3."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from store_listing import listed

from areal_tasks.store.backend import Exists, Missing, Store, StoreError, default_url, open_store
from schemas.errors import UserError


def test_what_is_created_is_read(store: Store) -> None:
    store.create("run/a.json", b"one")
    store.put("run/attempt=1/part", b"two")
    assert (store.read("run/a.json"), store.read("run/attempt=1/part")) == (b"one", b"two")
    assert store.exists("run/a.json") and not store.exists("run/b.json")
    assert store.size("run/attempt=1/part") == 3
    assert listed(store, "run") == ["run/a.json", "run/attempt=1/part"]
    assert store.children("run") == ["a.json", "attempt=1"]
    assert store.children("") == ["run"]


def test_nothing_is_there_at_first(store: Store) -> None:
    assert listed(store, "run") == [] and store.children("") == []
    for use in (store.read, store.size):
        with pytest.raises(Missing, match=r"run/a\.json"):
            use("run/a.json")


def test_create_never_overwrites(store: Store) -> None:
    store.create("a.json", b"first")
    with pytest.raises(Exists):
        store.create("a.json", b"second")
    assert store.read("a.json") == b"first"


def test_files_go_in_and_out(store: Store, tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(os.urandom(300_000))
    store.put_file("attempt=1/file", source)
    store.fetch_file("attempt=1/file", target)
    assert target.read_bytes() == source.read_bytes()


def test_local_is_a_path_only_on_disk(store: Store) -> None:
    store.put("a/b", b"data")
    local = store.local("a/b")
    assert local is None if store.url.startswith("s3:") else local is not None and local.read_bytes() == b"data"


def test_an_interrupted_create_leaves_nothing_to_see(local_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(source: str, target: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "link", die)
        patch.setattr(os, "unlink", lambda path: None)  # killed: nothing tidies up
        local_store.create("run/a.json", b"half")
    assert listed(local_store, "run") == [] and local_store.children("run") == []
    local_store.create("run/a.json", b"whole")
    assert local_store.read("run/a.json") == b"whole"


@pytest.mark.parametrize(
    ("code", "remedy"),
    [(errno.ENOSPC, "full"), (errno.EROFS, "read-only"), (errno.EDQUOT, "quota"), (errno.EIO, "input/output")],
)
def test_a_disk_that_refuses_is_explained(
    local_store: Store, monkeypatch: pytest.MonkeyPatch, code: int, remedy: str
) -> None:
    def refuse(fd: int) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch, pytest.raises(StoreError, match=remedy):
        patch.setattr(os, "fsync", refuse)
        local_store.create("run/a.json", b"data")
    assert list(Path(local_store.uri("run")).iterdir()) == []  # not even a partial file


def test_a_file_in_the_way_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"file/run\.json.*where a folder should be"):
        open_store((tmp_path / "file").as_uri()).create("run.json", b"")


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_a_folder_without_permission_is_explained(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="permission denied"):
        open_store((tmp_path / "store").as_uri()).create("run.json", b"")


@pytest.mark.parametrize("url", ["/", "/.", "gs://bucket/x", "s3://", "file://host/x", "http://x/y", "s3:/x", "a:b/c"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(UserError, match="name a folder, file:///absolute/folder or s3://bucket/prefix"):
        open_store(url)


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1), min_size=1)
)
def test_a_folder_names_the_store_in_it(parts: list[str]) -> None:
    folder = "/" + "/".join(parts)
    assume(os.path.abspath(folder) != "/")  # which is no store
    store = open_store(folder)
    assert open_store(store.url).url == store.url
    assert store.uri("a") == open_store(store.url).uri("a") == f"{os.path.abspath(folder)}/a"


def test_a_relative_folder_is_found_from_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    expected = {"runs": "runs", "./a b/": "a b", "x/../y": "y", "~/runs": "me/runs", "~no such user": "~no such user"}
    for named, place in expected.items():
        store = open_store(named)
        monkeypatch.chdir("/")  # the URL does not depend on it any more
        assert store.local("a") == tmp_path / place / "a" == open_store(store.url).local("a")
        monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AREALFLOW_STORE", "named/by/variable")
    assert open_store().local("a") == tmp_path / "named/by/variable/a"


def test_the_default_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AREALFLOW_STORE", raising=False)
    monkeypatch.setenv("AREALFLOW_HOME", str(tmp_path / "my home"))
    assert Path(open_store().uri("")) == tmp_path / "my home" / "store"
    monkeypatch.setenv("AREALFLOW_STORE", "file:///elsewhere")
    assert default_url() == "file:///elsewhere"


def test_the_store_needs_neither_torch_nor_prefect() -> None:
    names = ("runs", "query", "objects.files", "objects.s3", "objects.local")
    modules = [f"areal_tasks.store.{name}" for name in names]
    code = (
        f"import sys, {', '.join(modules)}; sys.exit(bool({{'torch', 'prefect', 'transformers'}} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
