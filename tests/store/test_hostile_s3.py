"""S3 servers and networks at their worst: each answer ends in a retry, or in a message that names the object."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faulty_proxy import EMPTY_LISTING, ERROR_500, ERROR_503, FLIPPED, HANG_UP, SHORT, TORN, Faults, faulty_proxy
from s3_server import BUCKET, S3Server
from store_builders import build, recipe, table
from store_listing import listed
from waiting import wait_until

from areal_tasks.store.backend import Store, StoreError, Unavailable, open_store
from areal_tasks.store.commit import verified
from areal_tasks.store.in_flight import LEDGER
from areal_tasks.store.objects import s3 as s3_module
from areal_tasks.store.objects import s3_bulk
from areal_tasks.store.objects.files import materialise, upload
from areal_tasks.store.opening import open_run
from areal_tasks.store.runs import load_run
from areal_tasks.store.shards import read_table, write_table

DATA = os.urandom(100_000)
PATH = "run/attempt=1/part-0"
Use = Callable[[Store, Path], bytes]


def fetched(store: Store, folder: Path) -> bytes:
    store.fetch_file(PATH, folder / "file")
    return (folder / "file").read_bytes()


USES: dict[str, Use] = {"read": lambda store, folder: store.read(PATH), "fetch": fetched}
EACH_USE = pytest.mark.parametrize("use", USES.values(), ids=USES.keys())


@pytest.fixture
def faults() -> Faults:
    return Faults(store_first=False, spoils=lambda method, path: method == "GET")


@pytest.fixture
def faulty(s3: S3Server, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store behind a proxy, with one object in it. It has answered before."""
    with faulty_proxy(s3.endpoint, faults) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        store = open_store(f"s3://{BUCKET}/{uuid.uuid4().hex}")
        store.put(PATH, DATA)
        monkeypatch.setattr(s3_module, "_pause", lambda attempt: 0.01)
        yield store


@EACH_USE
@pytest.mark.parametrize("answer", [TORN, SHORT, FLIPPED], ids=["torn", "short", "flipped"])
def test_what_is_damaged_on_its_way_is_asked_for_again(
    faulty: Store, faults: Faults, tmp_path: Path, use: Use, answer: tuple[int, bytes]
) -> None:
    faults.answer, faults.left = answer, 2
    assert use(faulty, tmp_path) == DATA and faults.left == 0
    faults.left = 99
    with pytest.raises(StoreError, match=rf"{PATH} arrives incomplete or altered from http.*check the network"):
        use(faulty, tmp_path)


def test_a_server_that_gives_no_checksum_does_not_let_damage_through(
    faulty: Store, faults: Faults, tmp_path: Path
) -> None:
    rows = table("rollout")
    ref = write_table(faulty, "run/attempt=2", "rollout", rows)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(DATA)
    files = upload(faulty, "run/attempt=3", tmp_path / "model")
    faults.answer, faults.left, faults.checksums = FLIPPED, 1, False
    assert read_table(faulty, ref).equals(rows) and faults.left == 0
    faults.left = 99
    with pytest.raises(StoreError, match=r"rollout-00000\.parquet is damaged"):
        read_table(faulty, ref)
    with pytest.raises(StoreError, match=r"attempt=3/weights is damaged"):
        materialise(faulty, files, tmp_path / "out")
    with pytest.raises(StoreError, match=rf"{PATH} is damaged"):
        verified(faulty, PATH, "0" * 64)


@EACH_USE
@pytest.mark.parametrize("answer", [ERROR_503, ERROR_500, HANG_UP], ids=["slow-down", "500", "hang-up"])
def test_a_server_that_is_overloaded_for_a_while_is_waited_for(
    faulty: Store, faults: Faults, tmp_path: Path, use: Use, answer: tuple[int, bytes]
) -> None:
    faults.answer, faults.left = answer, 5  # more than a store that never answered is asked
    assert use(faulty, tmp_path) == DATA and faults.left == 0


@pytest.mark.parametrize("answer", [ERROR_503, HANG_UP], ids=["slow-down", "hang-up"])
def test_patience_ends_with_a_message_that_names_the_object(
    faulty: Store, faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: tuple[int, bytes]
) -> None:
    monkeypatch.setattr(s3_module, "RETRY_SECONDS", 1.0)
    faults.answer, faults.left = answer, 999
    with pytest.raises(Unavailable, match=rf"{PATH} \(SlowDown\)|cannot be reached") as refused:
        faulty.read(PATH)
    assert "then run again" in str(refused.value)


def test_writes_too_are_repeated_and_happen_once(faulty: Store, faults: Faults) -> None:
    faults.answer, faults.left, faults.spoils = ERROR_503, 5, lambda method, path: method == "PUT"
    faults.store_first = False
    faulty.put("run/attempt=2/part", DATA)
    faults.left = 5
    faulty.create("run/commit.json", b"{}")
    assert (faulty.read("run/attempt=2/part"), faulty.read("run/commit.json")) == (DATA, b"{}")
    assert sorted(listed(faulty, "run")) == ["run/attempt=1/part-0", "run/attempt=2/part", "run/commit.json"]


def test_an_upload_that_fails_leaves_no_parts_though_its_removal_fails_at_first(
    faulty: Store, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_module, "RETRY_SECONDS", 0.1)
    deletions = iter([True])
    faults.answer, faults.left = ERROR_503, 999
    faults.spoils = lambda method, path: "partNumber" in path or (method == "DELETE" and next(deletions, False))
    with pytest.raises(Unavailable, match="SlowDown"):
        faulty.put_pieces("run/attempt=2/weights", [bytes(s3_bulk.PART_BYTES + 1)])
    left = faulty.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
    assert not [upload["Key"] for upload in left if upload["Key"].endswith("run/attempt=2/weights")]


def test_a_store_that_never_answered_is_not_waited_for(
    s3: S3Server, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults.left, faults.answer = 999, ERROR_503
    with faulty_proxy(s3.endpoint, faults) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        with pytest.raises(Unavailable, match="SlowDown"):
            open_store(f"s3://{BUCKET}/x").read("run/run.json")
    assert len(faults.seen) == s3_module._ATTEMPTS


def test_a_listing_that_shows_nothing_hides_no_history(faulty: Store, faults: Faults) -> None:
    """Where a run stands is found by asking for its commits by name: no listing can make it begin again."""
    build(open_run(faulty, "run", recipe()), range(3), {"verify": ("verify",)})
    faults.answer, faults.left, faults.spoils = EMPTY_LISTING, 999, lambda method, path: "list-type=2" in path
    assert listed(faulty, "run") == []
    run = open_run(faulty, "run", recipe())
    head = run.head()
    assert head is not None and (head.iteration, run.owner, len(run.segments)) == (2, 2, 1)
    assert run.read_stage(head.stages[0]).tables["verify"].rows == 16
    assert load_run(faulty, "run").head() == head


def test_what_a_server_does_not_answer_is_known(faulty: Store, faults: Faults) -> None:
    """The watchdog names it."""
    faults.answer, faults.left, faults.held = ERROR_503, 1, threading.Event()
    reader = threading.Thread(target=faulty.read, args=(PATH,))
    reader.start()
    [asked] = wait_until(lambda: [one for one in LEDGER.in_flight() if one.what.endswith(PATH)])
    faults.held.set()
    reader.join()
    assert asked.what.startswith(f"read s3://{BUCKET}/") and asked not in LEDGER.in_flight()
