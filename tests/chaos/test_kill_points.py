"""The matrix kills exactly where it says: right before a write of a certain kind, or right after it, and once."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from matrix import POINTS, Tally, difference, parser, report
from scene import INJECT, VICTIMS, Bucket, is_evaluator
from stage_driver import tiny
from store_listing import listed
from waiting import wait_until

from areal_tasks.engines.service import SPEC, spec_of
from areal_tasks.store import paths
from areal_tasks.store.backend import open_store
from areal_tasks.store.opening import open_run

WRITES = {
    "stage manifest": paths.stage_manifest("r", 3, "rollout", "0a1b"),
    "iteration commit": paths.iteration_commit("r", 3),
    "checkpoint": paths.checkpoint("r", 4, "x"),
    "published weights": paths.weights("r", 4, "x"),
}
WRITER = """
import sys
from areal_tasks.store.backend import open_store
store = open_store(sys.argv[1])
store.put("r/iteration=000003/stage=rollout/attempt=x/part-00000.parquet", b"before")
store.create(sys.argv[2], b"it")
store.put("r/later", b"after")
"""


def write(folder: Path, path: str, point: dict[str, object]) -> tuple[int, set[str]]:
    """How a process ends that writes `path` under a kill point of its own, and what the store then holds."""
    url, file = (folder / "store").as_uri(), folder / "point.json"
    environment = os.environ | {
        "AREAL_CHAOS_POINT": str(file),
        "PYTHONPATH": os.pathsep.join([str(INJECT), os.getcwd()]),
    }
    process = subprocess.Popen([sys.executable, "-c", f"input()\n{WRITER}", url, path], env=environment, stdin=-1)
    file.write_text(json.dumps({"pid": process.pid} | point))
    process.communicate(b"\\n")
    return process.returncode, set(listed(open_store(url), "r"))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", POINTS)
def test_it_strikes_at_the_write_it_names(tmp_path: Path, kind: str, when: str) -> None:
    code, there = write(tmp_path, WRITES[kind], {"when": when, "match": POINTS[kind]})
    assert code == -signal.SIGKILL
    assert (WRITES[kind] in there) == (when == "after") and "r/later" not in there
    assert not (tmp_path / "point.json").exists()


def test_other_writes_pass(tmp_path: Path) -> None:
    code, there = write(tmp_path, WRITES["checkpoint"], {"when": "before", "match": POINTS["published weights"]})
    assert code == 0 and "r/later" in there and (tmp_path / "point.json").exists()


def test_only_the_victim_itself_strikes_where_that_is_asked(tmp_path: Path) -> None:
    point = {"when": "before", "match": POINTS["checkpoint"], "pid": os.getpid(), "own": True}
    code, there = write(tmp_path, WRITES["checkpoint"], point)
    assert code == 0 and "r/later" in there, "this process would have been killed"


@pytest.mark.parametrize(("service", "evaluates"), [("rollout-evaluation", True), ("rollout-0", False)])
def test_the_worker_that_evaluates_is_told_from_the_others(tmp_path: Path, service: str, evaluates: bool) -> None:
    run = open_run(open_store(tmp_path.as_uri()), "r", tiny())
    environment = os.environ | {SPEC: spec_of(run, tiny(), service).model_dump_json()}
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"], env=environment, stdin=-1, stdout=-1
    ) as it:
        assert it.stdout is not None and it.stdout.readline() == b"\n"
        assert is_evaluator(psutil.Process(it.pid)) == evaluates
        it.communicate(b"\n")
    assert not is_evaluator(psutil.Process())


def test_an_s3_server_comes_back_as_it_was(tmp_path: Path) -> None:
    bucket = Bucket(tmp_path)
    first = bucket.start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in first.environment.items():
            patch.setenv(name, value)
        store = open_store(f"s3://arealflow/{random.randrange(10**6)}")
        store.create("r/a", b"kept")
        first.process.kill()
        first.process.wait()

        def comes_back() -> bool:
            with contextlib.suppress(RuntimeError):  # its ports may be in use for a moment
                return bool(bucket.start())
            return False

        try:
            wait_until(comes_back, "the server")
            assert store.read("r/a") == b"kept"
        finally:
            assert bucket.server is not None
            bucket.server.process.kill()
            bucket.server.process.wait()


def test_the_table_tells_slow_rounds_and_failures() -> None:
    tally = Tally("flow", points=1, runs=2, failures=["run: it differs"])
    for seconds in (10.0, 20.0, 70.0):
        tally.add("a round", seconds)
    assert tally.row().split() == ["flow", "3", "1", "20.0", "70.0", "1", "2", "1"]
    assert difference({"a": 1, "b": 2}, {"a": 1, "b": 3}) == "b"


@pytest.mark.parametrize(("limit", "late"), [(60.0, True), (61.5, False)])
def test_a_run_that_resumes_too_late_is_a_failure_that_is_named(tmp_path: Path, limit: float, late: bool) -> None:
    slow, quick, table = Tally("flow", limit), Tally("worker", limit), tmp_path / "table"
    slow.add("chaos-flow-1, iteration 7, at a random instant", 61.5)
    quick.add("chaos-worker-1, iteration 9, before checkpoint", 60.0)
    assert report([slow, quick], seed=1, seconds=200.0, table=str(table)) is not late
    failed = [line for line in table.read_text().splitlines() if line.startswith("FAILED")]
    what = "FAILED chaos-flow-1, iteration 7, at a random instant: resumed after 61.5 s, more than 60 s"
    assert failed == ([what] if late else [])


def test_a_victim_that_does_not_exist_is_named_beside_one_that_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert parser().parse_args([]).only == list(VICTIMS)
    assert parser().parse_args(["--only", "trainer,flow"]).only == ["flow", "trainer"]
    with pytest.raises(SystemExit):
        parser().parse_args(["--only", "flow,trianer"])
    assert "trianer: the victims are flow, worker, trainer" in capsys.readouterr().err
