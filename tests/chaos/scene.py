"""A machine under `arealflow up`, its victims, and what a run there looks like from outside."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from s3_server import BUCKET, PORTS, S3Process, free_ports, start_server

from areal_tasks.engines.service import SPEC
from areal_tasks.store.backend import Store, StoreError, open_store
from areal_tasks.store.paths import iteration_commit
from flows.cli import machine
from flows.cli.automations import ask
from flows.cli.processes import FLOW_RUN, flow_processes, parts

INJECT = Path(__file__).parent / "inject"
ROOT = Path(__file__).parents[2]
LOOK_SECONDS = 0.1
SERVICES = {
    "trainer": "areal_tasks.engines.trainer",
    "inference": "areal_tasks.engines.embedded",
    "rollout": "areal_tasks.rollout.worker",
    "evaluation": "areal_tasks.rollout.worker",
}
#: `worker` is Prefect's, `rollout` one of the run's own that generate for training, `evaluation` the one that does not.
VICTIMS = ("flow", "worker", "trainer", "inference", "rollout", "evaluation", "server", "s3")


class Failed(Exception):
    """What should have come did not."""


def wait_for(what: str, true: Callable[[], bool], seconds: float) -> float:
    """Seconds until it is true. Raises Failed after `seconds`."""
    began = time.monotonic()
    while not true():
        if time.monotonic() - began > seconds:
            raise Failed(f"{what}: not within {seconds:g} s")
        time.sleep(LOOK_SECONDS)
    return time.monotonic() - began


@dataclass
class Bucket:
    """An S3 server that can be killed, and comes back on the same ports with the same keys and folder."""

    folder: Path
    ports: dict[str, int] = field(default_factory=lambda: dict(zip(PORTS, free_ports(len(PORTS)), strict=True)))
    keys: tuple[str, str] = ("chaos", "chaoschaoschaoschaos")
    server: S3Process | None = None

    def start(self) -> S3Process:
        self.server = start_server(self.folder, self.keys, self.ports)
        return self.server

    def keep(self, stopped: threading.Event, pause: Callable[[], float]) -> None:
        """Start it again whenever it has died, as an init system would, after `pause()` seconds."""
        while not stopped.wait(LOOK_SECONDS):
            if self.server is not None and self.server.process.poll() is not None:
                time.sleep(pause())
                with contextlib.suppress(RuntimeError):  # its ports may be in use for a moment: look again
                    self.start()


@dataclass
class Scene:
    """Where the matrix plays: the machine, the store of its runs, and the kill point."""

    home: Path
    api_url: str
    store: Store
    bucket: Bucket | None

    @property
    def point(self) -> Path:
        return self.home / "point.json"

    def submit(self, run: str, overrides: str) -> str:
        """Run the quickstart as a person would; the id of the flow run."""
        deployment = ask("GET", f"{self.api_url}/deployments/name/rlhf/quickstart").raise_for_status().json()
        values = {"run": run, "overrides": f"store.url={self.store.url} {overrides}"}
        path = f"{self.api_url}/deployments/{deployment['id']}/create_flow_run"
        created = ask("POST", path, {"parameters": values}).raise_for_status().json()
        return str(created["id"])

    def state(self, flow_run: str) -> str:
        """The flow run's state; empty while the server is away."""
        with contextlib.suppress(httpx.HTTPError):
            return str(ask("GET", f"{self.api_url}/flow_runs/{flow_run}").raise_for_status().json()["state_name"])
        return ""

    def committed(self, run: str, after: int) -> int:
        """The last committed iteration, looked for from `after` on."""
        with contextlib.suppress(StoreError):
            while self.store.exists(iteration_commit(run, after + 1)):
                after += 1
        return after

    def pid(self, victim: str, flow_run: str) -> int | None:
        """The victim's process now, if there is one."""
        if victim in ("worker", "server"):
            return next((process.pid for process in parts(victim)), None)
        if victim == "s3":
            server = self.bucket.server if self.bucket else None
            return server.process.pid if server and server.process.poll() is None else None
        found = [process for process, owner in flow_processes().items() if owner == flow_run]
        part, evaluates = SERVICES.get(victim, "prefect.engine"), victim == "evaluation"
        return next((one.pid for one in found if part in command(one) and is_evaluator(one) == evaluates), None)

    def left_over(self) -> list[str]:
        """Processes of flow runs that still run."""
        return [f"{process.pid} {command(process)}" for process in flow_processes()]

    def services_left(self) -> list[str]:
        """Those of them that are not the flow process itself."""
        return [process for process in self.left_over() if "prefect.engine" not in process]


def command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def is_evaluator(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error, KeyError):
        return bool(json.loads(process.environ()[SPEC])["name"] == "rollout-evaluation")
    return False


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def arm(scene: Scene, when: str, match: str, pid: int, own: bool = False) -> None:
    """Set the kill point; it is gone when it has struck. `own`: only at a write of the victim itself."""
    partial = scene.point.with_suffix(".new")
    partial.write_text(json.dumps({"when": when, "match": match, "pid": pid, "own": own}))
    partial.rename(scene.point)


def disarmed(scene: Scene) -> bool:
    """Take the kill point away; False if it has struck."""
    try:
        scene.point.unlink()
    except FileNotFoundError:
        return False
    return True


@contextmanager
def stage(home: Path, port: int, on_s3: bool, chance: random.Random) -> Iterator[Scene]:
    """`arealflow up` in a home of its own, until the block ends; then nothing of it may be left."""
    home.mkdir(parents=True)
    stopped = threading.Event()
    bucket = Bucket(home / "bucket") if on_s3 else None
    changes = {
        "AREALFLOW_HOME": str(home),
        "AREAL_CHAOS_POINT": str(home / "point.json"),
        "PYTHONPATH": os.pathsep.join([str(INJECT), str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    if bucket is not None:
        bucket.folder.mkdir()
        changes |= bucket.start().environment
        threading.Thread(target=bucket.keep, args=(stopped, lambda: chance.uniform(0.5, 3.0)), daemon=True).start()
    os.environ.pop(FLOW_RUN, None)
    os.environ.update(changes)
    store = open_store(f"s3://{BUCKET}/store" if on_s3 else (home / "store").as_uri())
    try:
        yield Scene(home, machine.start(port), store, bucket)
    finally:
        machine.down()
        stopped.set()
        if bucket is not None and bucket.server is not None:
            bucket.server.process.kill()
            bucket.server.process.wait()
