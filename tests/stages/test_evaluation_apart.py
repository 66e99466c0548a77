"""With η > 0 and several servers, an evaluation holds one of them while the others generate with newer weights."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from stage_driver import drive, left_over, start_marked, store_in
from test_asynchronous_runs import ITERATIONS, ahead, check
from test_stages_beside import stages_of
from waiting import LIMIT, wait_until

from areal_tasks.engines.client import InferenceClient
from areal_tasks.engines.server import Server
from areal_tasks.launchers.local import LocalHandle
from areal_tasks.stages import evaluate
from areal_tasks.stages.build import Built
from areal_tasks.stages.jobs import Execute, Job, run_directly
from areal_tasks.stages.replay import replay_segments
from areal_tasks.stages.stage import Context, Inputs
from areal_tasks.store.fork import Origin
from areal_tasks.store.history.journal import append_log
from areal_tasks.store.query import run_sql
from areal_tasks.store.retention import gc, gc_remove
from areal_tasks.store.runs import Run, load_run
from schemas.recipe.recipe import Recipe

EVERY = 3


def apart(**changes: Any) -> Recipe:
    """Two servers, and an evaluation every third iteration."""
    sections: dict[str, Any] = {
        "rollout": {"flush_seconds": 0.0},
        "inference": {"servers": 2, "slots": 16, "threads": 1},
        "evaluation": {"every": EVERY, "limit": 8, "max_new_tokens": 3},
    }
    return ahead(**sections | changes)


class Gate:
    """Closed until it is opened: the evaluation of version 0 waits in it, its server held; and what is sent then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held, self.sent = "", list[str]()
        self.closed, self.opened = threading.Event(), threading.Event()
        self._evaluates, self._sends = evaluate.generated_by, Server.generate
        monkeypatch.setattr(evaluate, "generated_by", self.evaluate)
        monkeypatch.setattr(Server, "generate", lambda server, body: self.send(server, body))

    def evaluate(self, client: InferenceClient, context: Context, inputs: Inputs, label: str) -> pa.Table:
        if context.weights.version == 0 and not self.closed.is_set():
            [server] = client.servers
            self.held = server.url
            self.closed.set()
            assert self.opened.wait(LIMIT), "training waits for the evaluation"
        return self._evaluates(client, context, inputs, label)

    def send(self, server: Server, body: dict[str, Any]) -> AsyncGenerator[list[dict[str, Any]]]:
        if self.closed.is_set() and not self.opened.is_set():
            self.sent.append(server.url)
        return self._sends(server, body)


def check_evaluations(run: Run) -> None:
    """Each version that is due was evaluated once, by its own weights alone."""
    check(run)
    rows = run_sql(run.store, run.name, "SELECT iteration, weights_version AS v, versions FROM evaluate").to_pylist()
    assert {(row["iteration"], row["v"]) for row in rows} == {(0, 0), (3, 3), (ITERATIONS - 1, ITERATIONS)}
    assert len(rows) == 3 * 8 and all(set(row["versions"]) <= {row["v"], -1} for row in rows)
    names = [at for k in range(ITERATIONS) for name, at in stages_of(run, k) if name == "evaluate"]
    assert sorted(names) == [0, 3, ITERATIONS - 1]


def pool_of(job: Job) -> InferenceClient:
    return job.context.engines.servers.inference(waits=False)


def test_training_and_publication_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, versions = Gate(monkeypatch), dict[str, int | None]()

    def execute(jobs: Sequence[Job]) -> list[Built]:
        if jobs[0].label == "train 0":
            assert gate.closed.wait(LIMIT)
        if jobs[0].label == "train 3":
            wait_until(
                lambda: all(one.may_generate and one.version == 3 for one in pool_of(jobs[0]).servers), "it is back"
            )
        built = run_directly(jobs)
        if jobs[0].label == "publish 1":
            versions.update({server.url: server.version for server in pool_of(jobs[0]).servers})
            wait_until(lambda: gate.sent, "groups that are generated meanwhile")
            gate.opened.set()
        return built

    run = drive(tmp_path, "r", apart(), execute)
    check_evaluations(load_run(run.store, "r"))
    [other] = versions.keys() - {gate.held}
    assert versions == {gate.held: 0, other: 2}
    assert set(gate.sent) == {other}, "what is held generates nothing else"
    by = run_sql(run.store, "r", "SELECT DISTINCT server FROM evaluate WHERE weights_version = 0").to_pydict()
    assert by == {"server": [gate.held]}
    assert [run.commit(k).state.get("evaluating") for k in range(3)] == [0, 0, None]
    assert ("evaluate", 0) in stages_of(run, 2)


def test_a_held_server_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The evaluation is made again, by the same weights, on whichever server is there."""
    gate = Gate(monkeypatch)

    def execute(jobs: Sequence[Job]) -> list[Built]:
        built = run_directly(jobs)
        if jobs[0].label == "publish 1":
            assert gate.closed.wait(LIMIT)
            kill(jobs[0].context, gate.held)
            gate.opened.set()
        return built

    run = drive(tmp_path, "r", apart(launcher={"type": "local"}), execute)
    check_evaluations(load_run(run.store, "r"))
    by = run_sql(run.store, "r", "SELECT DISTINCT server FROM evaluate WHERE weights_version = 0").to_pydict()
    assert gate.held not in by["server"]


def kill(context: Context, url: str) -> None:
    supervisor = context.engines.supervisor
    handle = supervisor.services[supervisor.name_at(url)].handle
    assert isinstance(handle, LocalHandle)
    os.killpg(handle.process.pid, signal.SIGKILL)


def killed_with_its_flow() -> Execute:
    """Dies when iteration 5 trains, while version 3 is being evaluated."""
    evaluates, closed = evaluate.generated_by, threading.Event()

    def never(client: InferenceClient, context: Context, inputs: Inputs, label: str) -> pa.Table:
        if context.weights.version == EVERY:
            closed.set()
            threading.Event().wait()
        return evaluates(client, context, inputs, label)

    def execute(jobs: Sequence[Job]) -> list[Built]:
        if jobs[0].label == "train 5":
            assert closed.wait(LIMIT)
            os.kill(os.getpid(), signal.SIGKILL)
        return run_directly(jobs)

    evaluate.generated_by = never
    return execute


def main(folder: Path) -> None:
    drive(folder, "r", apart(), killed_with_its_flow())


def test_the_next_start_makes_the_evaluation_that_no_commit_names(tmp_path: Path) -> None:
    """By weights that are neither the newest nor the initial ones, and that gc leaves there."""
    process = start_marked(tmp_path, main, tmp_path)
    process.join()
    assert process.exitcode == -9
    wait_until(lambda: not left_over(tmp_path))
    run = load_run(store_in(tmp_path), "r")
    assert run.committed == 5 and run.commit(4).state["evaluating"] == EVERY
    append_log(run.store, "r", "failed", {"owner": 1})
    rule = gc.RetentionRule(keep_weights=1, older_than=0.0)
    removed = gc_remove.remove_planned(run.store, gc.plan_removals(run.store, rule), rule)
    assert {item.version for item in removed if item.version is not None} == {1, 2}
    drive(tmp_path, "r", apart())
    check_evaluations(load_run(run.store, "r"))


def test_a_replay_finds_an_evaluation_that_a_later_commit_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, labels = Gate(monkeypatch), list[str]()

    def execute(jobs: Sequence[Job]) -> list[Built]:
        if jobs[0].label == "train 2":
            gate.opened.set()
        return run_directly(jobs)

    def noted(jobs: Sequence[Job]) -> list[Built]:
        built = run_directly(jobs)
        labels.extend(job.label for job, one in zip(jobs, built, strict=True) if not one.reused)
        return built

    recipe = apart(schedule={"iterations": 3})
    run = drive(tmp_path, "r", recipe, execute)
    assert [("evaluate", 0) in stages_of(run, k) for k in range(3)] == [False, False, True]
    origin = Origin("r", 0, "replay", False, "train")
    asked = replay_segments(load_run(run.store, "r"), origin, "again", ["algorithm.clip_ratio=0.1"])
    again = drive(tmp_path, "again", asked[-1][1], noted, origin, asked)
    assert ("evaluate", 0) in stages_of(again, 0)
    assert "train 0" in labels and "evaluate version 0" not in labels
    recorded, kept = stages_of(run, 2), stages_of(again, 2)
    assert recorded.count(("evaluate", 2)) == kept.count(("evaluate", 2)) == 1


def test_with_one_server_the_next_weights_wait_for_the_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, order = Gate(monkeypatch), list[str]()

    def execute(jobs: Sequence[Job]) -> list[Built]:
        order.extend(f"begin {job.label}" for job in jobs)
        built = run_directly(jobs)
        order.extend(f"end {job.label}" for job in jobs)
        if jobs[0].label == "train 0":
            gate.opened.set()
        return built

    run = drive(tmp_path, "r", apart(inference={"servers": 1, "slots": 16, "threads": 1}), execute)
    check_evaluations(load_run(run.store, "r"))
    for version in (0, 3):
        assert order.index(f"end evaluate version {version}") < order.index(f"begin publish {version}")
        assert ("evaluate", version) in stages_of(run, version)
