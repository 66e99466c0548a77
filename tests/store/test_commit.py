"""The commit protocol: one winner, whatever the network answers."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_proxy import ERROR_403, ERROR_409, ERROR_500, HANG_UP, Faults, faulty_proxy
from s3_server import BUCKET, S3Server
from store_builders import commit_stage, manifest, table
from waiting import rendezvous
from warm_processes import Process

from areal_tasks.store import paths
from areal_tasks.store.backend import Store, StoreError, open_store
from areal_tasks.store.commit import commit_once, find_record, new_attempt, read_record
from areal_tasks.store.objects import s3 as s3_module
from areal_tasks.store.provenance import make_provenance, now
from areal_tasks.store.shards import read_table
from schemas.manifest import RunRecord, StageManifest
from schemas.record import SCHEMA_VERSION

ROUNDS = 8


def record(attempt: str = "") -> RunRecord:
    provenance = make_provenance(1, now())
    return RunRecord(run="r", flow="rlhf", seed=1, attempt=attempt or new_attempt(), provenance=provenance)


def test_the_first_commit_wins_and_the_second_learns_of_it(store: Store) -> None:
    first, second = record(), record()
    assert commit_once(store, "r/run.json", first) == (first, True)
    assert commit_once(store, "r/run.json", second) == (first, False)
    assert commit_once(store, "r/run.json", first) == (first, True)  # a repeat is recognised as mine


def test_a_record_whose_bytes_were_altered_in_transit_is_read_again(local_store: Store) -> None:
    given = record()
    commit_once(local_store, "r/run.json", given)
    whole, answers = local_store.read("r/run.json"), list[bytes]()

    def read(path: str) -> bytes:
        answers.append(whole if answers else whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
        return answers[-1]

    local_store.read = read  # type: ignore[method-assign]
    assert read_record(local_store, "r/run.json", RunRecord) == given
    assert len(answers) == 2


def _race(url: str, folder: Path, seed: int) -> None:
    """Commit the same stages as another process does just then; write down who won, and what we have committed."""
    store, outcome = open_store(url), []
    for k in range(ROUNDS):
        rows = table("verify", iteration=k, seed=seed)
        mine = manifest(store, "race", k, "verify", {"verify": rows}, key="the-same-key")
        path = paths.stage_manifest("race", k, "verify", mine.key)
        rendezvous(folder, f"round-{k}")
        there, won = commit_once(store, path, mine)
        assert won == (there.attempt == mine.attempt)
        assert read_table(store, there.tables["verify"]).equals(rows) == won
        outcome.append((there.attempt, mine.attempt))
    (folder / f"outcome-{seed}.json").write_text(json.dumps(outcome))


def test_two_processes_committing_the_same_stage_end_up_with_one_winner(store: Store, tmp_path: Path) -> None:
    racers = [Process(_race, store.url, tmp_path / "race", seed) for seed in (1, 2)]
    assert [racer.wait() for racer in racers] == [0, 0]
    outcomes = [json.loads((tmp_path / "race" / f"outcome-{seed}.json").read_text()) for seed in (1, 2)]
    for one, other in zip(*outcomes, strict=True):
        winners, attempts = {one[0], other[0]}, {one[1], other[1]}
        assert len(winners) == 1 and winners <= attempts and len(attempts) == 2


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def faulty(s3: S3Server, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with faulty_proxy(s3.endpoint, faults) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        monkeypatch.setattr(s3_module, "RETRY_SECONDS", 0.0)
        yield open_store(f"s3://{BUCKET}/{uuid.uuid4().hex}")


@pytest.mark.parametrize("answer", [ERROR_500, HANG_UP], ids=["500", "hang-up"])
@pytest.mark.parametrize("times", [1, 99], ids=["once", "always"])
def test_a_put_that_was_stored_but_failed_is_mine(
    faulty: Store, faults: Faults, answer: tuple[int, bytes], times: int
) -> None:
    faults.answer, faults.left = answer, times
    mine = record()
    assert commit_once(faulty, "r/run.json", mine) == (mine, True)
    assert faults.seen.count("PUT") > 1  # it was tried again, and refused by the server itself


def test_a_put_that_failed_while_another_won_is_not_mine(faulty: Store, faults: Faults) -> None:
    theirs = record()
    commit_once(faulty, "r/run.json", theirs)
    faults.left = 99
    assert commit_once(faulty, "r/run.json", record()) == (theirs, False)


def test_a_put_that_was_not_stored_is_reported(faulty: Store, faults: Faults) -> None:
    faults.left, faults.store_first = 99, False
    with pytest.raises(StoreError, match=r"r/run\.json \(InternalError\).*free space"):
        commit_once(faulty, "r/run.json", record())
    assert find_record(faulty, "r/run.json", RunRecord) is None


def test_a_read_only_bucket_is_reported(faulty: Store, faults: Faults) -> None:
    faults.left, faults.store_first, faults.answer = 1, False, ERROR_403
    with pytest.raises(StoreError, match="may not do that: let them read and write the bucket"):
        commit_once(faulty, "r/run.json", record())


def test_two_conditional_puts_that_meet_are_tried_again(faulty: Store, faults: Faults) -> None:
    faults.left, faults.store_first, faults.answer = 2, False, ERROR_409
    mine = record()
    assert commit_once(faulty, "r/run.json", mine) == (mine, True)


def test_an_answer_lost_while_reading_is_asked_for_again(faulty: Store, faults: Faults) -> None:
    mine = record()
    commit_once(faulty, "r/run.json", mine)
    faults.left, faults.answer, faults.spoils = 1, HANG_UP, lambda method, path: method == "GET"
    assert read_record(faulty, "r/run.json", RunRecord) == mine


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"run": "r"}'], ids=["empty", "cut", "list", "incomplete"])
def test_a_damaged_record_is_named(store: Store, damage: bytes) -> None:
    store.put("r/run.json", damage)
    with pytest.raises(StoreError, match=r"r/run\.json is damaged .*Restore this file from a backup"):
        read_record(store, "r/run.json", RunRecord)
    with pytest.raises(StoreError, match="is damaged"):
        commit_once(store, "r/run.json", record())  # never taken for a win, nor overwritten
    assert store.read("r/run.json") == damage


def test_a_record_of_a_newer_version_is_named(local_store: Store) -> None:
    newer = record().model_copy(update={"schema_version": SCHEMA_VERSION + 1}).encode("r/run.json")
    local_store.put("r/run.json", newer.replace(b'"seed"', b'"soul"'))
    with pytest.raises(
        StoreError, match=rf"newer arealflow \(schema {SCHEMA_VERSION + 1}; this one reads {SCHEMA_VERSION}\): upgrade"
    ):
        read_record(local_store, "r/run.json", RunRecord)


def test_metrics_that_are_not_finite_survive(local_store: Store) -> None:
    made = manifest(local_store, "r", 0, "verify", {"verify": table("verify")})
    made = made.model_copy(update={"metrics": {"nan": float("nan"), "inf": float("-inf")}})
    ref = commit_stage(local_store, made)
    metrics = read_record(local_store, ref.path, StageManifest).metrics
    assert metrics["nan"] != metrics["nan"] and metrics["inf"] == float("-inf")


def test_a_record_is_readable_by_eye(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    commit_once(store, "r/run.json", record())
    assert (tmp_path / "r" / "run.json").read_text().splitlines()[2:4] == [
        f' "schema_version": {SCHEMA_VERSION},',
        ' "run": "r",',
    ]
