"""What a run's services do or wait for, of what the flow knows; and their samples in a run with services as threads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from stage_driver import store_in, tiny
from waiting import LIMIT

from areal_tasks.engines.sampling import (
    FLOW,
    Flow,
    Observations,
    Sampler,
    State,
    cores_used,
    flow_state,
    server_state,
    trainer_state,
    worker_state,
)
from areal_tasks.engines.session import Engines
from areal_tasks.engines.workers import Backlog
from areal_tasks.launchers.usage import machine
from areal_tasks.store.opening import open_run
from schemas.views import SYSTEM


def works(what: str) -> State:
    return State(doing=what)


def waits(what: str) -> State:
    return State(waits_for=what)


@pytest.mark.parametrize(
    ("registered", "store", "flow", "trainer"),
    [
        ([], False, works("between stages"), waits("flow")),
        ([], True, waits("store"), waits("store")),
        (["train 3", "/train of version 3"], False, works("train"), works("train")),
        (["train 3", "/train of version 3", "rollout 4", "generation"], False, waits("groups"), works("train")),
        (["rollout 3", "generation"], False, waits("groups"), waits("groups")),
        (["rollout 3", "generation"], True, waits("groups"), waits("groups")),
        (["evaluate version 3", "generation"], False, waits("evaluation"), waits("evaluation")),
        (["rollout 3", "generation", "publish 2", "/publish of version 3"], False, waits("groups"), waits("groups")),
        (["publish 2", "/publish of version 3"], False, works("publish"), works("publish")),
        (["publish 2", "generation"], False, waits("servers"), waits("servers")),  # updated ones score a part
        (["publish 2", "a command to the servers"], False, waits("servers"), waits("servers")),
        (["evaluate version 2", "an answer of the rollout workers"], False, waits("servers"), waits("servers")),
        (["publish 2", "weights from the trainer", "/send of version 3"], False, waits("servers"), works("send")),
        (["verify 3", "verdicts"], False, waits("verdicts"), waits("verdicts")),
        (["advantage 3", "/health"], False, works("advantage"), waits("advantage")),
        (["publish 2", "advantage 3"], False, works("publish + advantage"), waits("publish")),
        (["rollout 0", "its start"], False, waits("start"), waits("start")),
        (["to be resumed"], False, waits("a person"), waits("a person")),
    ],
)
def test_flow_and_trainer(registered: Sequence[str], store: bool, flow: State, trainer: State) -> None:
    known = Flow(registered, store)
    assert (flow_state(known), trainer_state(known)) == (flow, trainer)


def backlog(generating: int = 0, verifying: int = 0) -> Backlog:
    return Backlog({"one": generating}, {"one": verifying}, {"one": 5}, 0, 8)


@pytest.mark.parametrize(
    ("found", "lacks", "registered", "server", "worker"),
    [
        (None, "", [], waits("requests"), waits("requests")),
        (backlog(2), "", [], works("generate"), works("generate")),
        (backlog(0, 2), "", [], waits("verdicts"), works("verify")),
        (backlog(), "", [], waits("rule"), waits("rule")),
        (backlog(2), "weights", [], waits("weights"), works("generate")),
        (backlog(2), "answers", [], waits("answers"), works("generate")),
        (backlog(2), None, [], waits("answers"), works("generate")),
        (None, "", ["evaluate version 3"], works("evaluate"), waits("requests")),
        (backlog(2), "release", ["evaluate version 3"], works("evaluate"), works("generate")),
    ],
)
def test_servers_and_workers(
    found: Backlog | None, lacks: str | None, registered: Sequence[str], server: State, worker: State
) -> None:
    flow = Flow(registered, backlog=found, server_waits={} if lacks is None else {"server": lacks})
    assert (server_state(flow, "server"), worker_state(flow, "one")) == (server, worker)
    assert worker_state(flow, "another") == (waits("requests") if found is None else waits("rule"))


def test_the_others_do_not_evaluate_while_one_is_held() -> None:
    flow = Flow(
        ["evaluate version 3"], backlog=backlog(2), server_waits={"held": "release", "server": "", "new": "weights"}
    )
    states = [server_state(flow, url) for url in ("held", "server", "new")]
    assert states == [works("evaluate"), works("generate"), waits("weights")]


def test_shares_of_a_sample_are_those_of_its_looks() -> None:
    seen = Observations()
    for now, state in enumerate([works("train"), works("train"), waits("groups"), waits("groups")]):
        seen.observe(state, now)
    row = seen.row(5.0)
    assert (row["busy"], row["works"], row["waits"]) == (0.5, [("train", 0.5)], [("groups", 0.5)])
    assert (row["doing"], row["waits_for"], row["state_seconds"]) == ("", "groups", 3.0)
    assert seen.row(6.0)["busy"] is None


def test_cpu_is_the_difference_of_measurements() -> None:
    first = machine().model_copy(update={"at": 10.0, "cpu_seconds": 4.0})
    later = first.model_copy(update={"at": 14.0, "cpu_seconds": 10.0})
    ended = first.model_copy(update={"at": 14.0, "cpu_seconds": 3.0})  # a descendant is gone
    assert (cores_used(first, later), cores_used(first, ended)) == (1.5, 0.0)
    assert cores_used(None, later) is cores_used(first, first) is cores_used(machine(), later) is None


def test_each_service_has_a_row(tmp_path: Path) -> None:
    recipe = tiny(launcher={"type": "inline"})
    run = open_run(store_in(tmp_path), "r", recipe)
    with Engines(run, recipe, tmp_path / "logs") as engines:
        sampler = Sampler(engines)
        engines.begin()
        sampler.observe()
        sampler.sample()
        rows = {row["service"]: row for row in sampler.sample()}
        engines.supervisor.wait(["rollout-0"])
        sampler.observe()
        engines.supervisor.services["rollout-0"].handle.stop(LIMIT)
        sampler.observe()
        [worker] = [row for row in sampler.sample() if row["service"] == "rollout-0"]
    assert rows.keys() >= {FLOW, "trainer", "rollout-0"}
    assert all(row.keys() <= set(SYSTEM.names) for row in rows.values())
    assert worker["waits"] == [("requests", 0.5), ("restart", 0.5)] and worker["waits_for"] == "restart"
    assert rows[FLOW]["cpu"] is not None and rows["trainer"]["cpu"] is None and rows["trainer"]["host"]
