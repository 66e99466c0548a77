"""One flow run under a real worker, through everything that can befall it: its run is as if nothing had happened."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
from gated_reward import sign
from prefect_api import ask
from stage_driver import Digests, digests, drive, store_in, tiny
from store_listing import listed
from waiting import wait_until

from areal_tasks.store import paths
from areal_tasks.store.history.journal import read_log
from flows.cli import automations
from flows.cli.processes import POOL, end, flow_processes, python, spawn
from flows.rlhf import rlhf
from schemas.recipe.recipe import RlhfRecipe

ITERATIONS = 12


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


def command_of(pid: int) -> list[str]:
    """A process's command line; nothing of one that has just ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).cmdline()
    return []


@dataclass
class Scene:
    """A flow run of its own and the run it makes. While `gate` is closed the run is held before its next verdict."""

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
        return [process.pid for process, owner in flow_processes().items() if owner == self.flow_run]

    def flow_process(self) -> int:
        return next(pid for pid in self.processes() if "prefect.engine" in command_of(pid))

    def services(self) -> list[int]:
        """The trainer and the inference server."""
        return [pid for pid in self.processes() if "areal_tasks.engines" in " ".join(command_of(pid))]

    def logged(self, text: str) -> datetime | None:
        """When the flow run's log said so for the first time."""
        query = {"logs": {"flow_run_id": {"any_": [self.flow_run]}}, "sort": "TIMESTAMP_ASC"}
        lines = ask("POST", f"{self.api}/logs/filter", query).raise_for_status().json()
        return next((moment(line["timestamp"]) for line in lines if text in line["message"]), None)

    def tasks(self) -> list[dict[str, Any]]:
        """The task runs that have begun."""
        query = {"flow_runs": {"id": {"any_": [self.flow_run]}}, "task_runs": {"start_time": {"is_null_": False}}}
        rows: list[dict[str, Any]] = ask("POST", f"{self.api}/task_runs/filter", query).raise_for_status().json()
        return rows

    def ended(self, task: str) -> datetime | None:
        """When the task run of that name was completed."""
        found = [one["end_time"] for one in self.tasks() if (one["name"], one["state_type"]) == (task, "COMPLETED")]
        return moment(found[0]) if found else None

    def committed(self) -> int:
        store, k = store_in(self.folder), 0
        while store.exists(paths.iteration_commit("r", k)):
            k += 1
        return k

    def held(self, owner: int) -> None:
        """Wait until that start of the run is at work, and stands before the gate."""
        wait_until(lambda: store_in(self.folder).exists(paths.owner("r", owner)), f"owner {owner}")
        wait_until(lambda: any(sign(self.gate, pid).exists() for pid in self.processes()), "a verifier at the gate")
        assert len(self.services()) == 2

    def move_on(self) -> None:
        """Let an iteration pass, and hold the run again."""
        k = self.committed()
        self.open_until(k)
        wait_until(lambda: self.committed() > k, "a commit")

    def open_until(self, k: int) -> None:
        """Open the gate; the commit of iteration `k` closes it."""
        self.gate.write_text(store_in(self.folder).uri(paths.iteration_commit("r", k)).removeprefix("file://"))


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
        automations.install(api)
        automations.put(api, automations.read_automation("recovery"))  # as on a server without a keeper
        worker = spawn("worker", python("patient_worker"), api)
        try:
            yield Scene(api, folder, recipe(folder), submit(api, recipe(folder)), gate)
        finally:
            gate.unlink(missing_ok=True)
            end([worker])


def submit(api: str, recipe: RlhfRecipe) -> str:
    """A deployment of the flow `rlhf`, and a flow run of it."""

    def post(path: str, body: dict[str, Any]) -> str:
        return str(ask("POST", f"{api}{path}", body).raise_for_status().json()["id"])

    step = {"prefect.deployments.steps.set_working_directory": {"directory": os.getcwd()}}
    deployment = {
        "name": "befallen",
        "flow_id": post("/flows/", {"name": "rlhf"}),
        "entrypoint": "warm_flow.rlhf",
        "pull_steps": [step],
        "job_variables": {"env": {"PREFECT_WORKER_QUERY_SECONDS": "7"}},
        "work_pool_name": POOL,
    }
    parameters = {"recipe": recipe.model_dump(mode="json"), "run": "r"}
    return post(f"/deployments/{post('/deployments/', deployment)}/create_flow_run", {"parameters": parameters})


def test_a_flow_process_has_its_deployments_variables_and_a_group_of_its_own(scene: Scene) -> None:
    scene.held(owner=1)
    flow = scene.flow_process()
    assert os.getpgid(flow) == flow
    assert psutil.Process(flow).environ()["PREFECT_WORKER_QUERY_SECONDS"] == "7", "not the worker's own"


def test_a_killed_flow_process_is_started_again_by_itself(scene: Scene) -> None:
    scene.held(owner=1)
    scene.move_on()
    before = scene.processes()
    os.kill(scene.flow_process(), signal.SIGKILL)
    wait_until(lambda: not set(before) & set(scene.processes()), "the end of the services")
    scene.held(owner=2)
    assert scene.state()["name"] == "Running"


def test_a_suspended_flow_run_leaves_no_process_and_is_resumed(scene: Scene) -> None:
    scene.set("PAUSED", "Suspended", pause_reschedule=True)
    wait_until(Path(f"{scene.gate}.suspended").exists, "the flow to hear of it")
    scene.gate.unlink()
    wait_until(lambda: not scene.processes(), "the end of the processes")
    assert scene.state()["name"] == "Suspended"
    scene.gate.touch()
    scene.resume()
    scene.held(owner=3)


def test_a_paused_flow_run_keeps_its_services_and_goes_on(scene: Scene) -> None:
    """It is paused in the middle of a stage, which may end; the next one does not begin."""
    there, k = scene.processes(), scene.committed()
    scene.set("PAUSED", "Paused")
    wait_until(lambda: scene.logged("paused: no stage begins"), "the flow to notice")
    scene.open_until(k)
    ended = wait_until(lambda: scene.ended(f"verify {k}"), "the end of the stage")
    assert scene.committed() == k < ITERATIONS and scene.processes() == there
    assert len(scene.services()) == 2
    asked = datetime.now(UTC)
    scene.resume()
    assert wait_until(lambda: scene.logged("the flow run is resumed"), "the flow to go on") >= asked
    wait_until(lambda: scene.committed() > k, "a commit")
    wait_until(lambda: scene.ended(f"advantage {k}"), "the next stage, as the server knows it")
    assert not [task["name"] for task in scene.tasks() if ended < moment(task["start_time"]) < asked]
    assert not store_in(scene.folder).exists(paths.owner("r", 4))


def test_a_cancelled_flow_run_is_gone_and_can_be_retried(scene: Scene) -> None:
    scene.set("CANCELLING")
    wait_until(lambda: not scene.processes(), "the end of everything")
    wait_until(lambda: scene.state()["name"] == "Cancelled", "the state")
    scene.set("SCHEDULED", "AwaitingRetry")
    scene.held(owner=4)


def test_a_zombie_of_an_old_owner_can_change_nothing(scene: Scene, expected: Digests) -> None:
    zombie = scene.flow_process()
    os.kill(zombie, signal.SIGSTOP)
    scene.gate.unlink()
    assert rlhf(scene.recipe, run="r")["iterations"] == ITERATIONS
    assert digests(scene.folder, "r") == expected
    before = set(listed(store_in(scene.folder), "r"))
    os.kill(zombie, signal.SIGCONT)
    wait_until(lambda: not scene.processes(), "the end of the zombie")
    wait_until(lambda: scene.state()["type"] == "FAILED", "its state")
    assert "'r' has been started again since" in scene.state()["message"]
    assert digests(scene.folder, "r") == expected
    later = {name for name in set(listed(store_in(scene.folder), "r")) - before if name.endswith("commit.json")}
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
