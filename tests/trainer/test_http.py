"""The service as a process: the token, concurrent retries, a restart elsewhere, and the lifeline."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from trainer_builders import World, advantage, rlhf_recipe, rollout
from waiting import LIMIT, alive, wait_until
from warm_processes import Popen

from areal_tasks.engines.lifeline import LIFELINE
from areal_tasks.engines.service import SPEC
from areal_tasks.engines.trainer.commands import (
    Checkpoint,
    Done,
    Finish,
    Finished,
    Health,
    Load,
    Publish,
    Train,
    Trained,
    Written,
)
from areal_tasks.secret import TOKEN
from areal_tasks.store.paths import service
from schemas.manifest import ServiceRecord, WeightsRef
from schemas.record import Record

LENGTHS = [9, 4, 13, 6, 11, 3, 8, 5, 10, 7, 12, 5]
SECRET = "a-token"


def _environment(world: World, restart: int) -> dict[str, str]:
    path = os.pathsep.join(p for p in sys.path if p)
    spec = world.spec(restart=restart).model_dump_json()
    return {**os.environ, SPEC: spec, TOKEN: SECRET, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


class Service:
    """A trainer process and how to talk to it."""

    def __init__(self, world: World, restart: int) -> None:
        self.read, self.write = os.pipe()
        environment = {**_environment(world, restart), LIFELINE: str(self.read)}
        command = [sys.executable, "-m", "areal_tasks.engines.trainer"]
        self.process = Popen(command, env=environment, pass_fds=[self.read], start_new_session=True)
        path = service("r", 1, "trainer", restart)
        wait_until(lambda: self.process.poll() is not None or world.store.exists(path), "the service")
        assert self.process.poll() is None
        url = ServiceRecord.parse(world.store.read(path)).url
        self.http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {SECRET}"}, timeout=LIMIT)

    def post(self, name: str, body: Record) -> httpx.Response:
        return self.http.post(f"/{name}", content=body.model_dump_json())

    def end(self) -> None:
        self.http.close()
        os.close(self.write)
        self.process.wait(LIMIT)
        os.close(self.read)


@pytest.fixture
def start(world: World) -> Iterator[Callable[[int], Service]]:
    world.recipe = rlhf_recipe(trainer={"threads": 1})
    started: list[Service] = []

    def begin(restart: int) -> Service:
        started.append(Service(world, restart))
        return started[-1]

    yield begin
    for one in started:
        one.end()


def _train(world: World, version: int) -> Train:
    table = rollout(LENGTHS, seed=version, version=version)
    return world.train_command(version, {"rollout": table, "advantage": advantage(table, seed=version)})


def _good(kind: type[Record], answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return kind.model_validate_json(answer.content)


def _saved(world: World, one: Service, kind: str, version: int, attempt: str) -> WeightsRef:
    named: dict[str, Any] = {"owner": 1, "version": version, "prefix": world.folder(kind, version, attempt)}
    if kind == "weights":
        return world.commit(kind, version, attempt, _good(Written, one.post("publish", Publish(**named))).files)
    _good(Done, one.post("checkpoint", Checkpoint(**named)))
    return world.commit(kind, version, attempt, _good(Finished, one.post("finish", Finish(**named, wait=True))).files)


def test_six_iterations_are_three_a_checkpoint_and_three_in_a_new_process(
    world: World, start: Callable[[int], Service]
) -> None:
    one = start(0)
    assert one.http.get("/health", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert _good(Health, one.http.get("/health")).version is None
    assert one.post("train", _train(world, 0)).status_code == 409
    assert one.http.post("/train", content=b'{"owner": 1}').status_code == 422
    _good(Done, one.post("load", Load(owner=1, version=0, weights=world.initial)))
    for version in range(3):
        _check_repeats(one, _train(world, version))
    weights, state = (_saved(world, one, kind, 3, "a") for kind in ("weights", "checkpoint"))
    for version in range(3, 6):
        _good(Trained, one.post("train", _train(world, version)))
    straight = _saved(world, one, "weights", 6, "b")
    one.process.kill()
    two = start(1)
    _good(Done, two.post("load", Load(owner=1, version=3, weights=weights, checkpoint=state)))
    for version in range(3, 6):
        _good(Trained, two.post("train", _train(world, version)))
    assert _saved(world, two, "weights", 6, "c").digest == straight.digest
    _check_owners(world, two)


def _check_repeats(one: Service, command: Train) -> None:
    """Four at once: one steps, the others wait and get its result; all while /health answers."""
    with ThreadPoolExecutor(5) as pool:
        answers = [pool.submit(one.post, "train", command) for _ in range(4)]
        assert one.http.get("/health").status_code == 200
    first, *others = [_good(Trained, a.result()) for a in answers]
    assert all(other == first for other in others)
    health = _good(Health, one.http.get("/health"))
    assert (health.version, health.step, health.busy) == (command.version + 1, 2 * (command.version + 1), False)


def _check_owners(world: World, two: Service) -> None:
    """A higher owner takes over at once; the lower one is refused from then on."""
    _good(Done, two.post("load", Load(owner=2, version=0, weights=world.initial)))
    for command in (_train(world, 0), _train(world, 6)):
        refusal = two.post("train", command)
        assert refusal.status_code == 403
        assert "start #1 of this run was superseded by start #2" in refusal.json()["error"]
    health = _good(Health, two.http.get("/health")).model_dump(exclude={"stored"})
    fresh = {"version": 0, "step": 0, "owner": 2, "busy": False, "kept": None, "done": 0, "of": 0, "storing": ""}
    assert health == fresh


_PARENT = """
import os, subprocess, sys, time
read, write = os.pipe()
os.environ["AREAL_LIFELINE_FD"] = str(read)
command = [sys.executable, "-m", "areal_tasks.engines.trainer"]
child = subprocess.Popen(command, pass_fds=[read], start_new_session=True)
print(child.pid, flush=True)
time.sleep(3600)
"""


def test_the_service_dies_with_a_parent_that_is_killed(world: World, tmp_path: Path) -> None:
    world.recipe = rlhf_recipe(trainer={"threads": 1})
    command = [sys.executable, "-c", _PARENT]
    with subprocess.Popen(command, env=_environment(world, 7), stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        wait_until(lambda: world.store.exists(service("r", 1, "trainer", 7)), "the service")
        assert child.is_running()
        parent.send_signal(signal.SIGKILL)
    wait_until(lambda: not alive(child), "its end")
