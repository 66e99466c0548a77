"""One flow run under a real worker, through everything that can befall it: its run is as if nothing had happened."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from stage_driver import Digests, digests, drive, store_in, tiny

from areal_tasks.store import paths
from areal_tasks.store.journal import read_log
from flows.cli import automations, machine, upkeep
from flows.cli.automations import ask
from flows.pauses import LOOK_SECONDS
from flows.rlhf import rlhf
from schemas.recipe.recipe import RlhfRecipe

START_SECONDS = 120.0
ITERATIONS = 12


def wait_for(what: str, true: Callable[[], Any], seconds: float = START_SECONDS) -> float:
    """Seconds until it was true."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < seconds, what
        time.sleep(0.1)
    return time.monotonic() - began


def command_of(pid: int) -> list[str]:
    """A process's command line; nothing of one that has just ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).cmdline()
    return []


@dataclass
class Scene:
    """A flow run of its own and the run it makes. While `gate` is there the run is held before its next verdict."""

    api: str
    folder: Path
    recipe: RlhfRecipe
    flow_run: str
    gate: Path

    def set(self, kind: str, name: str = "", **details: Any) -> None:
        state = {"type": kind, "name": name or None, "state_details": details}
        path = f"{self.api}/flow_runs/{self.flow_run}/set_state"
        answer = ask("POST", path, {"state": state}).raise_for_status().json()
        assert answer["status"] == "ACCEPT", answer

    def resume(self) -> None:
        answer = ask("POST", f"{self.api}/flow_runs/{self.flow_run}/resume", {}).json()
        assert answer["status"] == "ACCEPT", answer

    def state(self) -> dict[str, Any]:
        answer = ask("GET", f"{self.api}/flow_runs/{self.flow_run}")
        state: dict[str, Any] = answer.raise_for_status().json()["state"]
        return state

    def processes(self) -> list[int]:
        return [pid for pid, owner in upkeep.flow_processes().items() if owner == self.flow_run]

    def flow_process(self) -> int:
        return next(pid for pid in self.processes() if "prefect.engine" in psutil.Process(pid).cmdline())

    def services(self) -> list[int]:
        """The trainer and the inference server."""
        return [pid for pid in self.processes() if "areal_tasks.engines" in " ".join(command_of(pid))]

    def committed(self) -> int:
        store, k = store_in(self.folder), 0
        while store.exists(paths.iteration_commit("r", k)):
            k += 1
        return k

    def held(self, owner: int) -> None:
        """Wait until that start of the run is at work, and stands before the gate."""
        store = store_in(self.folder)
        wait_for(f"owner {owner}", lambda: store.exists(paths.owner("r", owner)))
        folder = f"r/iteration={self.committed():06d}/stage=rollout"
        wait_for(folder, lambda: any(name.endswith(".json") for name in store.children(folder)))
        wait_for("services", lambda: len(self.services()) == 2)  # the rollout may be of the start before
        wait_for("verifiers", lambda: len(self.processes()) == 6)  # three, which start with the services

    def move_on(self) -> None:
        """Let some iterations pass, and hold the run again."""
        k = self.committed()
        self.gate.unlink()
        wait_for("a commit", lambda: self.committed() > k)
        self.gate.touch()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Digests:
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GATE", str(folder / "gate"))
        drive(folder, "whole", recipe(folder))
    return digests(folder, "whole")


def recipe(folder: Path) -> RlhfRecipe:
    made = tiny(
        reward={"verifier": "gated_reward:gated", "timeout_seconds": 3600},
        schedule={"iterations": ITERATIONS, "artifact_every": ITERATIONS},
        launcher={"type": "local"},
        store={"url": store_in(folder).url},
    )
    assert isinstance(made, RlhfRecipe)
    return made


@pytest.fixture(scope="module")
def scene(api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """A worker, and a flow run that it has been given."""
    folder = tmp_path_factory.mktemp("befallen")
    gate = folder / "gate"
    gate.touch()
    with pytest.MonkeyPatch.context() as patch:
        tests = Path(__file__).parent
        patch.setenv("GATE", str(gate))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")]))
        machine.prefect(["work-pool", "create", machine.POOL, "--type", "process", "--overwrite"], api)
        automations.install(api)
        worker = machine.spawn_worker(api)
        try:
            yield Scene(api, folder, recipe(folder), submit(api, recipe(folder)), gate)
        finally:
            gate.unlink(missing_ok=True)
            machine.stop(worker)


def submit(api: str, recipe: RlhfRecipe) -> str:
    """A deployment of the flow `rlhf`, and a flow run of it."""

    def post(path: str, body: dict[str, Any]) -> str:
        return str(ask("POST", f"{api}{path}", body).raise_for_status().json()["id"])

    step = {"prefect.deployments.steps.set_working_directory": {"directory": os.getcwd()}}
    deployment = {
        "name": "befallen",
        "flow_id": post("/flows/", {"name": "rlhf"}),
        "entrypoint": "flows.rlhf.rlhf",
        "pull_steps": [step],
        "work_pool_name": machine.POOL,
    }
    parameters = {"recipe": recipe.model_dump(mode="json"), "run": "r"}
    return post(f"/deployments/{post('/deployments/', deployment)}/create_flow_run", {"parameters": parameters})


def test_a_killed_flow_process_is_started_again_by_itself(scene: Scene) -> None:
    scene.held(owner=1)
    scene.move_on()
    before = scene.processes()
    os.kill(scene.flow_process(), signal.SIGKILL)
    wait_for("the services to end", lambda: not set(before) & set(scene.processes()), 10.0)
    scene.held(owner=2)
    assert scene.state()["name"] == "Running"


def test_a_suspended_flow_run_leaves_no_process_and_is_resumed(scene: Scene) -> None:
    scene.set("PAUSED", "Suspended", pause_reschedule=True)
    scene.gate.unlink()
    wait_for("the processes to end", lambda: not scene.processes(), 30.0)
    assert scene.state()["name"] == "Suspended"
    scene.gate.touch()
    scene.resume()
    scene.held(owner=3)


def test_a_paused_flow_run_keeps_its_services_and_goes_on(scene: Scene) -> None:
    """It is paused in the middle of a stage, which may end; the next one does not begin."""
    there, k = scene.processes(), scene.committed()
    scene.set("PAUSED", "Paused")
    time.sleep(2 * LOOK_SECONDS)
    scene.gate.unlink()
    time.sleep(4.0)  # without the pause some iterations would pass
    assert scene.committed() == k < ITERATIONS and scene.processes() == there
    assert len(scene.services()) == 2
    scene.gate.touch()
    scene.resume()
    wait_for("the flow to notice", lambda: scene.state()["name"] == "Running")
    scene.move_on()
    assert not store_in(scene.folder).exists(paths.owner("r", 4))


def test_a_cancelled_flow_run_is_gone_within_10_s_and_can_be_retried(scene: Scene) -> None:
    scene.set("CANCELLING")
    wait_for("everything to end", lambda: not scene.processes(), 10.0)
    wait_for("the state", lambda: scene.state()["name"] == "Cancelled", 10.0)
    scene.set("SCHEDULED", "AwaitingRetry")
    scene.held(owner=4)


def test_a_zombie_of_an_old_owner_can_change_nothing(scene: Scene, expected: Digests) -> None:
    zombie = scene.flow_process()
    os.kill(zombie, signal.SIGSTOP)
    scene.gate.unlink()
    assert rlhf(scene.recipe, run="r")["iterations"] == ITERATIONS
    assert digests(scene.folder, "r") == expected
    before = set(store_in(scene.folder).list("r"))
    os.kill(zombie, signal.SIGCONT)
    wait_for("the zombie to end", lambda: not scene.processes(), 60.0)
    wait_for("its state", lambda: scene.state()["type"] == "FAILED", 10.0)
    assert "'r' has been started again since" in scene.state()["message"]
    assert digests(scene.folder, "r") == expected
    later = {name for name in set(store_in(scene.folder).list("r")) - before if name.endswith("commit.json")}
    assert not later


def test_the_runs_log_tells_of_every_start_and_how_it_ended(scene: Scene) -> None:
    lines = [line for line in read_log(store_in(scene.folder), "r") if "owner" in line.details]
    told = {n: [line.action for line in lines if line.details["owner"] == n] for n in range(1, 6)}
    assert told == {  # killed, suspended, cancelled, taken over, and the one that came to the last iteration
        1: ["started"],
        2: ["resumed", "suspended"],
        3: ["resumed", "cancelled"],
        4: ["resumed", "failed"],
        5: ["resumed", "finished"],
    }
