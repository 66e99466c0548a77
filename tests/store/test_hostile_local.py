"""A disk that is full, files that are damaged, a clock that jumps: a message that names the file, never wrong data."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_disk import small_disk
from store_builders import build, recipe, table
from store_listing import listed

from areal_tasks.store import provenance, shards
from areal_tasks.store.backend import Store, StoreError, open_store
from areal_tasks.store.commit import read_record
from areal_tasks.store.objects import inventory
from areal_tasks.store.objects.inventory import check_file, open_file
from areal_tasks.store.opening import open_run
from areal_tasks.store.query import run_sql
from areal_tasks.store.runs import load_run
from areal_tasks.store.shards import content_digest, encode, footer_holds, read_table, write_table
from schemas.errors import UserError
from schemas.manifest import FileRef, StageManifest

SMALL = 512 << 10  # bytes of the disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", SMALL) as place:
        yield place


def test_a_disk_that_fills_up_in_the_middle_of_a_shard(disk: Path) -> None:
    """Nothing of the shard is left, nothing that was committed suffers, and there is room again once some is made."""
    store = open_store((disk / "store").as_uri())
    build(open_run(store, "run", recipe()), [0], {"verify": ("verify",)})
    before = listed(store, "")
    (disk / "ballast").write_bytes(bytes(SMALL - 256 * 1024))
    rows = table("rollout", rows=4000, tokens=60)
    with pytest.raises(StoreError, match=r"attempt=big/rollout-00000\.parquet cannot be used: the disk is full: free"):
        write_table(store, "run/iteration=000001/stage=rollout/attempt=big", "rollout", rows)
    assert listed(store, "") == before
    assert run_sql(store, "run", "SELECT count(*) AS n FROM verify").to_pylist() == [{"n": 16}]
    (disk / "ballast").unlink()
    few = rows.slice(0, 100)
    assert read_table(store, write_table(store, "run/attempt=small", "rollout", few)).equals(few)


def test_a_limit_on_the_size_of_files_is_told_as_such(tmp_path: Path) -> None:
    """What a full disk does, for who may not mount one: the system refuses a write half-way through."""
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from areal_tasks.store.backend import StoreError, open_store\n"
        "from areal_tasks.store.objects.inventory import entries\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        f"store = open_store({tmp_path.as_uri()!r})\n"
        "try: store.put('run/attempt=1/part', bytes(200_000))\n"
        "except StoreError as error: print(error, entries(store, ''))\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "run/attempt=1/part cannot be used: the system allows no larger file (ulimit -f)" in found
    assert found.rstrip().endswith("[]")


# ── damaged files ───────────────────────────────────────────────────────────────────────────────────────────────────


def flipped(data: bytes, draw: random.Random) -> bytes:
    """`data` with one bit altered somewhere."""
    at = draw.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]


@pytest.mark.parametrize("whole_bytes", [1 << 20, 0], ids=["small", "large"])
def test_no_altered_bit_of_a_shard_makes_sql_tell_something_else(
    local_store: Store, whole_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small shards are hashed whole; in large ones the footer and each page that is read have checksums."""
    monkeypatch.setattr(inventory, "WHOLE_BYTES", whole_bytes)
    build(open_run(local_store, "run", recipe()), range(2), {"verify": ("verify",)})
    query = "SELECT count(*) AS n, sum(hash(reward)) AS rewards, sum(hash(detail)) AS details FROM verify"
    expected, run = run_sql(local_store, "run", query), load_run(local_store, "run")
    path = Path(local_store.uri(run.read_stage(run.commit(1).stages[0]).tables["verify"].shards[0].path))
    whole, tries = path.read_bytes(), 10 if whole_bytes else 25
    footer, draw = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little"), random.Random(0)
    for first, last, least in ((4, footer, tries // 12), (footer, len(whole), tries)):
        noticed = 0
        for _ in range(tries):  # of the pages, about a quarter are of a column that the query reads
            path.write_bytes(whole[:first] + flipped(whole[first:last], draw) + whole[last:])
            try:
                assert run_sql(local_store, "run", query).equals(expected)
            except UserError as error:
                assert f"{path} is damaged" in str(error)
                noticed += 1
        assert noticed >= (tries if whole_bytes else least)


def test_a_footer_has_a_checksum_that_other_programs_ignore(
    local_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = table("verify")
    data = encode(rows)
    local_store.put("file", data)
    assert pq.read_table(local_store.uri("file")).equals(rows)
    with open_file(local_store, "file") as file:
        assert footer_holds(file, len(data))
    monkeypatch.setattr(shards, "_TAIL_BYTES", 64)  # a footer that is longer than what is read at first
    for stored, holds in (
        (data, True),
        (older(data), False),
        (data[:-20] + bytes([data[-20] ^ 1]) + data[-19:], False),
    ):
        assert footer_holds(pa.BufferReader(stored), len(stored)) is holds


def older(data: bytes) -> bytes:
    """A shard without the checksum of its footer, as earlier versions wrote it."""
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    return data[: footer - 40] + data[footer:]


def test_a_large_file_of_an_earlier_version_is_verified_as_a_whole(
    local_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "WHOLE_BYTES", 0)
    named = table("verify").set_column(0, "sample_id", pa.array(["arealsum"] * 16))  # not taken for the checksum's mark
    data = older(encode(named))
    file = FileRef(path="file", sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))
    local_store.put("file", data)
    check_file(local_store, file)
    for at in range(0, len(data), 7):
        Path(local_store.uri("file")).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(StoreError, match="file is damaged"):
            check_file(local_store, file)


def test_every_altered_bit_of_a_footers_checksum_length_or_end_is_noticed() -> None:
    data = encode(table("verify"))
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    for at in (*range(footer - 40, footer), *range(len(data) - 8, len(data))):
        for bit in range(8):
            altered = data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]
            assert not footer_holds(pa.BufferReader(altered), len(altered)), (at - len(data), bit)


Damage = Callable[[Path], None]
DAMAGES: dict[str, Damage] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-7]) and None,
    "empty": lambda path: path.write_bytes(b"") and None,
    "flipped": lambda path: path.write_bytes(flipped(path.read_bytes(), random.Random(0))) and None,
    "gone": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
@pytest.mark.parametrize(
    "record", ["run.json", "segments/0.json", "owners/1.json", "iteration=000000/commit.json", "manifest"]
)
def test_a_record_that_is_lost_or_altered_is_named_and_nothing_is_written_over_it(
    local_store: Store, damage: Damage, record: str
) -> None:
    build(open_run(local_store, "run", recipe()), range(3), {"verify": ("verify",)})
    ref = load_run(local_store, "run").commit(0).stages[0]
    path = Path(local_store.uri(ref.path if record == "manifest" else f"run/{record}"))
    damage(path)
    before = listed(local_store, "")
    use = {
        "manifest": lambda: read_record(local_store, ref.path, StageManifest, ref.sha256),
        "iteration=000000/commit.json": lambda: open_run(local_store, "run", recipe()).commit(0),
    }.get(record, lambda: open_run(local_store, "run", recipe()))
    if record == "owners/1.json" and path.exists():  # that it is there is all it says
        return
    with pytest.raises(StoreError, match=rf"{path.name}.*(is damaged|is missing|does not exist)"):
        use()
    assert [p for p in listed(local_store, "") if "owners" not in p] == [p for p in before if "owners" not in p]


# ── a clock that jumps ──────────────────────────────────────────────────────────────────────────────────────────────


def test_no_key_digest_or_order_depends_on_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are shown, and never compared: a clock that jumps by years makes no difference."""
    steady, jumping = (open_store((tmp_path / name).as_uri()) for name in ("steady", "jumping"))
    build(open_run(steady, "run", recipe()), range(4), {"verify": ("verify",)})
    years = iter([2026, 1990, 2099, 2020, 2031, 1970] * 100)
    monkeypatch.setattr(provenance, "now", lambda: f"{next(years)}-01-01T00:00:00.000000+00:00")
    for k in range(4):  # a new start each time
        build(open_run(jumping, "run", recipe()), [k], {"verify": ("verify",)})
    query = "SELECT iteration, list(sample_id) AS ids, sum(reward) AS reward FROM verify GROUP BY 1 ORDER BY 1"
    assert run_sql(jumping, "run", query).equals(run_sql(steady, "run", query))
    runs = [load_run(store, "run") for store in (steady, jumping)]
    for k in range(4):
        one, other = (run.commit(k).stages[0] for run in runs)
        assert (one.key, one.digest) == (other.key, other.digest)
    head = runs[1].head()
    assert head is not None and (head.iteration, head.provenance.owner) == (3, 4)
    assert content_digest(table("verify")) == content_digest(table("verify"))
