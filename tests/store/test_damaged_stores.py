"""A whole run whose files are damaged, on disk and on S3: SQL, a new start and an audit each name the file."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from faulty_proxy import EMPTY_LISTING, FLIPPED, TORN, Faults, faulty_proxy
from s3_server import BUCKET, S3Server
from stage_driver import Digests, digests_of, drive, finished, store_in, tiny
from store_listing import listed

from areal_tasks.store import paths
from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.history.audit import audit
from areal_tasks.store.objects import inventory
from areal_tasks.store.objects.inventory import entries, remove
from areal_tasks.store.query import run_sql
from areal_tasks.store.runs import load_run
from schemas.errors import UserError
from schemas.manifest import IterationCommit
from schemas.record import SCHEMA_VERSION

Damage = Callable[[bytes], bytes | None]
FIRST = 2  # iterations of the run that is damaged
QUERY = "SELECT count(*) AS n, sum(hash(input_ids)) AS ids, sum(hash(completion)) AS texts FROM rollout"
DAMAGES: dict[str, Damage] = {
    "cut": lambda data: data[:-9],
    "altered": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 4]) + data[len(data) // 2 + 1 :],
    "missing": lambda data: None,
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose store holds the first iterations of the run `r`."""
    folder = tmp_path_factory.mktemp("begun")
    finished(folder, "r", tiny(schedule={"iterations": FIRST}))
    return folder


@pytest.fixture(scope="module")
def expected(begun: Path, tmp_path_factory: pytest.TempPathFactory) -> Digests:
    """What the whole run holds that is never damaged."""
    folder = tmp_path_factory.mktemp("whole")
    shutil.copytree(begun / "store", folder / "store")
    drive(folder, "r", tiny())
    return digests_of(store_in(folder), "r")


@pytest.fixture(params=["file", "s3"])
def place(request: pytest.FixtureRequest, begun: Path, tmp_path: Path) -> Store:
    """A store of each kind with a copy of the run."""
    if request.param == "file":
        shutil.copytree(begun / "store", tmp_path / "store")
        return store_in(tmp_path)
    request.getfixturevalue("s3")
    return uploaded(begun)


def uploaded(folder: Path) -> Store:
    """A store on S3 with what that of `folder` holds."""
    there, here = store_in(folder), open_store(f"s3://{BUCKET}/{uuid.uuid4().hex[:8]}")
    for entry in entries(there, "r"):
        here.put(entry.path, there.read(entry.path))
    return here


def exchange(store: Store, path: str, data: bytes | None) -> None:
    """Put other bytes, or nothing, in the place of a file."""
    remove(store, [path])
    if data is not None:
        store.put(path, data)


def check_named(store: Store, path: str, folder: Path, how: str = "") -> None:
    """What needs the file says which it is, and `how` it is wrong; nothing is committed."""
    for use in (lambda: run_sql(store, "r", QUERY), lambda: drive(folder, "r", tiny(), store=store)):
        with pytest.raises(UserError, match=how) as error:
            use()
        assert store.uri(path) in str(error.value), error.value
    assert not store.exists(paths.iteration_commit("r", FIRST))
    assert path in {defect.path for defect in audit(store, "r").defects}


@pytest.mark.parametrize(
    ("place", "kind", "damage"),
    [
        ("file", "shard", "cut"),
        ("file", "shard", "missing"),
        ("file", "manifest", "altered"),
        ("s3", "shard", "cut"),
        pytest.param("s3", "shard", "missing", marks=pytest.mark.slow("the same as a file that is cut")),
    ],
    indirect=["place"],
)
def test_a_file_that_is_damaged_is_named_by_whoever_needs_it(
    place: Store, tmp_path: Path, kind: str, damage: str
) -> None:
    run = load_run(place, "r")
    ref = next(ref for ref in run.commit(FIRST - 1).stages if ref.stage == "rollout")
    path = run.read_stage(ref).tables["rollout"].shards[0].path if kind == "shard" else ref.path
    answer, whole = run_sql(place, "r", QUERY), place.read(path)
    exchange(place, path, DAMAGES[damage](whole))
    check_named(place, path, tmp_path, "is damaged|does not exist")
    exchange(place, path, whole)
    assert run_sql(place, "r", QUERY) == answer and audit(place, "r").sound


@pytest.mark.parametrize("place", ["file"], indirect=True)
def test_no_other_file_is_read_again_to_find_one_that_is_named(place: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run, hashed = load_run(place, "r"), list[str]()
    ref = next(ref for ref in run.commit(FIRST - 1).stages if ref.stage == "rollout")
    path = run.read_stage(ref).tables["rollout"].shards[0].path
    exchange(place, path, DAMAGES["altered"](place.read(path)))
    monkeypatch.setattr(inventory, "file_digest", lambda store, path, progress: hashed.append(path) or ("", 0))
    with pytest.raises(UserError, match=r"is damaged"):
        run_sql(place, "r", QUERY)
    assert not hashed


LARGE: dict[str, Damage] = DAMAGES | {
    "footer": lambda data: data[:-99] + bytes([data[-99] ^ 1]) + data[-98:],
    "another": lambda data: data + data[-8:],
}


@pytest.mark.parametrize("damage", LARGE.values(), ids=LARGE.keys())
def test_a_large_shard_is_not_read_whole_and_named_all_the_same(
    place: Store, damage: Damage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "WHOLE_BYTES", 0)
    run = load_run(place, "r")
    ref = next(ref for ref in run.commit(0).stages if ref.stage == "rollout")
    path = run.read_stage(ref).tables["rollout"].shards[0].path
    query = "SELECT hash(COLUMNS(*)) FROM rollout ORDER BY ALL"
    answer, whole = run_sql(place, "r", query), place.read(path)
    exchange(place, path, damage(whole))
    with pytest.raises(UserError, match=r"is damaged|does not exist") as error:
        run_sql(place, "r", query)
    assert place.uri(path) in str(error.value)
    exchange(place, path, whole)
    assert run_sql(place, "r", query) == answer


@pytest.mark.parametrize("place", ["file"], indirect=True)
def test_a_commit_of_a_newer_program_is_named(place: Store, tmp_path: Path) -> None:
    """Even if it has the fields of now: they may mean something else."""
    path = paths.iteration_commit("r", FIRST - 1)
    commit = IterationCommit.parse(place.read(path))
    exchange(place, path, commit.model_copy(update={"schema_version": SCHEMA_VERSION + 1}).encode(path))
    check_named(place, path, tmp_path, rf"newer arealflow \(schema {SCHEMA_VERSION + 1}; this one reads")


@pytest.mark.slow("several runs and all commands")
def test_a_listing_that_shows_nothing_changes_no_answer(
    s3: S3Server, begun: Path, expected: Digests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = uploaded(begun)
    answer, root = run_sql(whole, "r", QUERY), audit(whole, "r").root
    faults = Faults(answer=EMPTY_LISTING, left=10**6, spoils=lambda method, path: "list-type=2" in path)
    with faulty_proxy(s3.endpoint, faults) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        stale = open_store(whole.url)
        assert listed(stale, "r") == []
        report = audit(stale, "r")
        assert (run_sql(stale, "r", QUERY), report.sound, report.root) == (answer, True, root)
        drive(tmp_path, "r", tiny(), store=stale)
        assert digests_of(stale, "r") == expected and audit(stale, "r").iterations == len(expected)


@pytest.mark.parametrize("answer", [FLIPPED, TORN], ids=["flipped", "torn"])
def test_a_shard_that_is_damaged_on_its_way_to_sql_is_asked_for_again(
    s3: S3Server, begun: Path, monkeypatch: pytest.MonkeyPatch, answer: tuple[int, bytes]
) -> None:
    whole = uploaded(begun)
    expected = run_sql(whole, "r", QUERY)
    faults = Faults(answer=answer, checksums=False, spoils=lambda method, path: method == "GET" and ".parquet" in path)
    with faulty_proxy(s3.endpoint, faults) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        for times, damaged in ((1, False), (10**6, True)):
            faults.left = times
            if damaged:
                with pytest.raises(UserError, match=r"\.parquet (is damaged|arrives incomplete)"):
                    run_sql(open_store(whole.url), "r", QUERY)
            else:
                assert run_sql(open_store(whole.url), "r", QUERY) == expected and faults.left == 0


@pytest.mark.parametrize("kind", ["commit.json", "model.safetensors"])
def test_an_audit_takes_no_damage_on_the_way_for_a_defect(
    s3: S3Server, begun: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    whole = uploaded(begun)
    expected = audit(whole, "r")
    faults = Faults(
        answer=FLIPPED, left=1, checksums=False, spoils=lambda method, path: method == "GET" and kind in path
    )
    with faulty_proxy(s3.endpoint, faults) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        assert audit(open_store(whole.url), "r") == expected and expected.sound and faults.left == 0
