"""Files that go into an S3 store and come from it in parts."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from botocore.exceptions import ResponseStreamingError
from faulty_proxy import ALTERED, ERROR_503, HANG_UP, TORN, Faults, faulty_proxy
from s3_server import BUCKET, S3Server
from urllib3.exceptions import SSLError

from areal_tasks.store.backend import Content, Exists, Store, StoreError, open_store
from areal_tasks.store.objects import s3_bulk

PART = 5 << 20  # the least that S3 takes
DATA = os.urandom(3 * PART + 12_345)
PATH = "run/attempt=1/model.safetensors"


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_bulk, "PART_BYTES", PART)


@pytest.fixture
def faults() -> Faults:
    return Faults(store_first=False)


@pytest.fixture
def faulty(s3: S3Server, faults: Faults, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Store]:
    """A store behind a proxy, which has answered before."""
    with faulty_proxy(s3.endpoint, faults) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        store = open_store(f"s3://{BUCKET}/{tmp_path.name}")
        store.put("known", b"")
        yield store


def fetched(store: Store, path: str, target: Path) -> bytes:
    digest = store.fetch_file(path, target)
    data = target.read_bytes()
    assert digest == hashlib.sha256(data).hexdigest()
    return data


def pieces(data: bytes, *sizes: int) -> Content:
    """`data` cut into pieces of these sizes, and one of what is left."""
    starts = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    ends = [*starts[1:], len(data)]
    return [memoryview(data)[start:end] for start, end in zip(starts, ends, strict=True)]


@pytest.mark.parametrize("length", [0, 1, PART, PART + 1, 2 * PART, len(DATA)])
def test_a_file_of_any_length_goes_in_and_out(store: Store, tmp_path: Path, length: int) -> None:
    (tmp_path / "in").write_bytes(DATA[:length])
    store.put_file(PATH, tmp_path / "in")
    assert store.size(PATH) == length and fetched(store, PATH, tmp_path / "out") == DATA[:length]


@pytest.mark.parametrize("sizes", [(), (8, 0, PART), (PART - 1, 1, 2 * PART), (5,) * 40])
def test_pieces_are_laid_end_to_end(store: Store, tmp_path: Path, sizes: tuple[int, ...]) -> None:
    store.put_pieces(PATH, pieces(DATA, *sizes))
    assert fetched(store, PATH, tmp_path / "out") == DATA


def test_a_file_that_was_there_is_replaced_whole(store: Store, tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"x" * 2 * len(DATA))
    store.put_pieces(PATH, [DATA])
    assert fetched(store, PATH, tmp_path / "out") == DATA


@pytest.mark.parametrize("answer", [ERROR_503, HANG_UP, ALTERED], ids=["slow-down", "hang-up", "altered"])
def test_only_spoiled_parts_are_sent_again(
    faulty: Store, faults: Faults, tmp_path: Path, answer: tuple[int, bytes]
) -> None:
    faults.answer, faults.left, faults.spoils = answer, 3, lambda method, path: "partNumber=" in path
    faulty.put_pieces(PATH, pieces(DATA, 8))
    assert faults.left == 0 and faults.seen.count("PUT") == 1 + 4 + 3
    assert fetched(faulty, PATH, tmp_path / "out") == DATA


def test_only_spoiled_parts_are_fetched_again(faulty: Store, faults: Faults, tmp_path: Path) -> None:
    faulty.put_pieces(PATH, [DATA])
    faults.answer, faults.left, faults.spoils = TORN, 3, lambda method, path: method == "GET"
    assert fetched(faulty, PATH, tmp_path / "out") == DATA
    assert faults.left == 0 and faults.seen.count("GET") == 4 + 3


def test_an_upload_whose_last_answer_is_lost_is_done(faulty: Store, faults: Faults, tmp_path: Path) -> None:
    faults.answer, faults.left, faults.store_first = HANG_UP, 1, True
    faults.spoils = lambda method, path: method == "POST" and "uploadId=" in path
    faulty.put_pieces(PATH, [DATA])
    assert faults.left == 0 and fetched(faulty, PATH, tmp_path / "out") == DATA


def test_an_upload_that_fails_leaves_nothing_and_names_the_object(faulty: Store, faults: Faults) -> None:
    faults.answer, faults.left, faults.spoils = ALTERED, 999, lambda method, path: "partNumber=3" in path
    with pytest.raises(StoreError, match=rf"{PATH} arrives incomplete or altered .*BadDigest.*check the network"):
        faulty.put_pieces(PATH, [DATA])
    assert "DELETE" in faults.seen and not faulty.exists(PATH)


def test_a_full_disk_is_not_taken_for_a_store_that_is_away(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    store = open_store(f"s3://{BUCKET}/{tmp_path.name}")
    store.put_pieces(PATH, [DATA])
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StoreError, match=r"out cannot be written \(No space left on device\): free space"):
        store.fetch_file(PATH, tmp_path / "out")


def test_commits_between_large_files_stay_conditional(s3: S3Server, tmp_path: Path) -> None:
    store = open_store(f"s3://{BUCKET}/{tmp_path.name}")
    store.put_pieces(PATH, [DATA])
    store.create("run/commit.json", b"first")
    store.put_pieces("run/attempt=2/model.safetensors", [DATA])
    with pytest.raises(Exists):
        store.create("run/commit.json", b"second")
    assert store.read("run/commit.json") == b"first"


def test_many_files_at_once_share_the_threads(s3: S3Server, tmp_path: Path) -> None:
    store = open_store(f"s3://{BUCKET}/{tmp_path.name}")
    before = threading.active_count()
    workers = [threading.Thread(target=store.put_pieces, args=(f"{PATH}{n}", [DATA])) for n in range(6)]
    for worker in workers:
        worker.start()
    most = threading.active_count()
    for worker in workers:
        worker.join()
    assert most <= before + len(workers) + s3_bulk._THREADS
    assert all(fetched(store, f"{PATH}{n}", tmp_path / "out") == DATA for n in range(6))


def test_a_broken_tls_connection_is_told_as_a_torn_answer(tmp_path: Path) -> None:
    class Body:
        def read(self, size: int) -> bytes:
            raise SSLError("bad record mac")

        def close(self) -> None: ...

    with (
        (tmp_path / "f").open("w+b", buffering=0) as file,
        pytest.raises(ResponseStreamingError, match="bad record mac"),
    ):
        s3_bulk._receive(Body(), file, 0, 10)
