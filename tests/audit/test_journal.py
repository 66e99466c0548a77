"""The log of a run, tags, and the seal that every file of the store has since schema 2."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_tasks.store import paths
from areal_tasks.store.backend import Store, StoreError, open_store
from areal_tasks.store.commit import read_record
from areal_tasks.store.history.journal import append_log, current_user, end_of_start, read_log
from areal_tasks.store.provenance import make_provenance, now
from areal_tasks.store.weights import find_tag, protect_weights, read_tags, tag_weights
from schemas.errors import UserError
from schemas.manifest import LogRecord, RunRecord, WeightsRef

REF = WeightsRef(version=3, attempt="abc", path="r/weights/version=000003/attempt=abc.json", sha256="s", digest="d")


@pytest.fixture
def here(tmp_path: Path) -> Store:
    return open_store((tmp_path / "store").as_uri())


def test_a_log_is_numbered_and_chained(here: Store) -> None:
    first = append_log(here, "r", "started", {"owner": 1, "until": "stop", "share": 0.5, "dry": True})
    second = append_log(here, "r", "cancelled", prefect_flow_run_id="f")
    assert read_log(here, "r") == [first, second]
    assert (first.n, first.user, first.pid, first.previous) == (1, current_user(), os.getpid(), "")
    assert first.details == {"owner": 1, "until": "stop", "share": 0.5, "dry": True}
    assert second.previous == hashlib.sha256(here.read(paths.log("r", 1))).hexdigest()
    assert second.prefect_flow_run_id == "f"


def test_the_end_of_a_start_is_found_without_reading_what_was_logged_before_it(here: Store) -> None:
    append_log(here, "r", "started", {"owner": 1})
    append_log(here, "r", "placed", {"owner": 1})  # start 1 is killed
    append_log(here, "r", "resumed", {"owner": 2})
    assert [end_of_start(here, "r", owner) for owner in (1, 2, 3)] == [None, None, None]
    end = append_log(here, "r", "failed", {"owner": 2})
    append_log(here, "r", "changed", {"owner": 1})
    assert [end_of_start(here, "r", owner) for owner in (1, 2, 3)] == [None, end, None]
    Path(here.uri(paths.log("r", 2)).removeprefix("file://")).write_text("damaged")
    assert end_of_start(here, "r", 2) == end


def test_lines_written_at_once_all_stand_in_the_log(here: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: append_log(here, "r", "exported", {"i": i}), range(24)))
    log = read_log(here, "r")
    assert [record.n for record in log] == list(range(1, 25))
    assert sorted(record.details["i"] for record in log) == list(range(24))
    for before, after in pairwise(log):
        assert after.previous == hashlib.sha256(here.read(paths.log("r", before.n))).hexdigest()


def test_only_known_actions_are_logged(here: Store) -> None:
    with pytest.raises(ValueError, match="unknown action 'tidied'"):
        append_log(here, "r", "tidied")


def test_a_tag_is_given_once(here: Store) -> None:
    tag = tag_weights(here, "r", "best", REF)
    assert tag_weights(here, "r", "best", REF) == tag == find_tag(here, "r", "best")
    assert [(t.tag, t.version, t.weights_attempt) for t in read_tags(here, "r")] == [("best", 3, "abc")]
    with pytest.raises(UserError, match=r"tag 'best' of run 'r' is version 3 already"):
        tag_weights(here, "r", "best", REF.model_copy(update={"version": 4}))
    for name in ("../x", "1", "protected-1", ""):
        with pytest.raises(UserError, match="cannot be a tag"):
            tag_weights(here, "r", name, REF)
    with pytest.raises(UserError, match="'newest' cannot be a tag: it always means"):
        tag_weights(here, "r", "newest", REF)
    protect_weights(here, "r", REF)
    assert [record.action for record in read_log(here, "r")] == ["tagged", "protected"]


def record() -> RunRecord:
    return RunRecord(run="r", flow="rlhf", seed=1, attempt="a", provenance=make_provenance(0, now()))


def test_a_record_read_back_encodes_to_the_same_bytes() -> None:
    data = record().encode("r/run.json")
    assert RunRecord.parse(data).seal_holds(data, "r/run.json") and RunRecord.parse(data).encode("r/run.json") == data
    first = {
        "schema_version": 1,
        "run": "r",
        "flow": "rlhf",
        "seed": 1,
        "attempt": "a",
        "parent": "",
        "parent_iteration": 0,
    }
    old = json.dumps(first | {"provenance": record().provenance.model_dump()}, indent=1).encode()
    there = RunRecord.parse(old)
    assert (there.kind, there.counterfactual, there.schema_version) == ("", False, 1)
    assert there.encode("r/run.json") == old


@given(st.data())
def test_the_seal_betrays_every_bit(data: st.DataObject) -> None:
    path = "r/run.json"
    whole = record().encode(path)
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    altered = bytearray(whole)
    altered[bit // 8] ^= 1 << bit % 8
    assert record().seal_holds(whole, path) and not record().seal_holds(bytes(altered), path)


def test_a_record_whose_seal_is_broken_is_not_read(here: Store) -> None:
    append_log(here, "r", "started", {"owner": 1})
    path = Path(here.uri(paths.log("r", 1)))
    path.write_bytes(path.read_bytes().replace(b'"owner": 1', b'"owner": 2'))
    with pytest.raises(StoreError, match=r"log/1\.json is damaged \(its seal does not hold\)"):
        read_record(here, paths.log("r", 1), LogRecord)
