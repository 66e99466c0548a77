"""Tasks on a real Ray cluster: a head and two nodes, on machines that share nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
from machines.bed import NETWORK, ROOT, Machine, Machines
from machines.clusters import start_ray
from machines.runs import UNTRAINED
from waiting import LIMIT, wait_until

from areal_tasks.launchers import ray
from areal_tasks.launchers.cluster import LOST, Resources, Task
from areal_tasks.launchers.placement import propose
from schemas.errors import UserError
from schemas.recipe.launcher import Launcher

FOLDER: Final = "/tmp/flow"
FOREVER: Final = "import os, socket, time; print(socket.gethostname(), os.getpid(), flush=True); time.sleep(1e6)"
SECRET: Final = "b5f0-a-secret-of-the-flow-93c1"
SHOWN: Final = "77ac-no-secret-of-the-task-1d0e"
NUMBERS: Final = count()
ADDED: Final = {"resources": {"CPU": 2, "object_store_memory": 80_000_000}, "node_config": {}, "max_workers": 3}
#: Ray's autoscaler. The nodes that it adds are raylets of the head's machine, and go after 12 s without work.
AUTOSCALING: Final = {
    "cluster_name": "bed",
    "max_workers": 3,
    "provider": {"type": "fake_multinode", "use_node_id_as_ip": True, "disable_node_updaters": True},
    "available_node_types": {"ray.head.default": {"resources": {"CPU": 0}, "node_config": {}}, "added": ADDED},
    "head_node_type": "ray.head.default",
    "idle_timeout_minutes": 0.2,
    **{unused: {} for unused in ("auth", "file_mounts", "cluster_synced_files")},
    **{unused: [] for unused in ("worker_setup_commands", "worker_start_ray_commands")},
}
on_ray = pytest.mark.slow("Ray's daemons, half a minute")


class Flow:
    """A flow on a machine, that obeys `ray_flow.py`'s orders."""

    def __init__(self, machine: Machine, head: str) -> None:
        self.machine = machine
        self.folder = f"{FOLDER}{next(NUMBERS)}"
        machine.run(["mkdir", self.folder])
        environment = {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": head, "AREAL_SECRET": SECRET}
        command = [sys.executable, str(ROOT / "tests" / "launchers" / "ray_flow.py"), self.folder]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = machine.popen(command, environment, **pipes)

    def ask(self, function: str, **arguments: object) -> Any:
        self.process.stdin.write(json.dumps([function, arguments]) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        if "error" in answer:
            raise UserError(answer["error"])
        return answer["result"]

    def waiting(self, name: str) -> str:
        return str(self.ask("state", name=name)[0])

    def exit_code(self, name: str) -> int | None:
        code: int | None = self.ask("state", name=name)[1]
        return code

    def ended(self, name: str) -> int:
        """The exit code, once it has ended."""
        wait_until(lambda: self.exit_code(name) is not None, f"the end of {name}")
        return self.ask("state", name=name)[1]  # type: ignore[no-any-return]

    def output(self, name: str) -> str:
        """What it has printed, once it has printed something."""
        file = self.machine.path(f"{self.folder}/{name}.out")
        wait_until(file.exists, f"output of {name}")
        return file.read_text()

    def forever(self, name: str, **resources: int) -> tuple[str, int]:
        """Submit a task that runs until it is ended: its machine and its process there."""
        self.ask("submit", name=name, code=FOREVER, **resources)
        host, process = self.output(name).split()
        return host, int(process)


class Bed:
    """Ray on three machines; flows are on the head, which runs no task."""

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self.address = f"{machines['head'].address}:6379"
        start_ray(machines["head"], "--head", "--num-cpus=0", "--include-dashboard=false")
        for name in ("node1", "node2"):
            start_ray(machines[name], f"--address={self.address}", "--num-cpus=2", **machines.s3)

    def flow(self) -> Flow:
        return Flow(self.machines["head"], self.address)

    def gone(self, host: str, process: int) -> bool:
        return not self.machines[host].path(f"/proc/{process}").exists()


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    with Machines("head", "node1", "node2") as machines:
        yield Bed(machines)


@pytest.fixture
def flow(bed: Bed) -> Iterator[Flow]:
    made = bed.flow()
    yield made
    if made.process.poll() is None:
        made.ask("close")
        made.process.stdin.close()
        made.process.wait(LIMIT)


@on_ray
def test_a_task_runs_on_a_node(flow: Flow) -> None:
    """With its environment, in a session of its own; what it prints and its exit code come back."""
    shown = "socket.gethostname(), os.environ['WORD'], os.getsid(0) == os.getpid()"
    code = f"import os, socket, sys; print({shown}); sys.exit(7)"
    flow.ask("submit", name="a", code=code, environment={"WORD": "two words"})
    assert flow.ended("a") == 7
    assert re.fullmatch(r"node[12] two words True\n", flow.output("a"))
    assert flow.waiting("a") == ""


@on_ray
def test_a_task_without_gpus_sees_none(flow: Flow) -> None:
    flow.ask("submit", name="a", code="import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))")
    assert flow.ended("a") == 0 and flow.output("a") == "''\n"


@on_ray
def test_a_task_says_what_it_waits_for(flow: Flow) -> None:
    flow.forever("a", cpus=2)
    flow.forever("b", cpus=2)
    flow.ask("submit", name="c", code=FOREVER, cpus=2)
    wait_until(lambda: "waits for 2 CPU of one node; free in the whole cluster: 0 CPU, of 4 CPU" in flow.waiting("c"))
    assert flow.exit_code("c") is None
    flow.ask("cancel", name="a")
    wait_until(lambda: flow.waiting("c") == "", "room for c")


@on_ray
def test_the_machines_and_what_of_them_is_free(flow: Flow) -> None:
    empty = [["head", 0, 0], ["node1", 2, 2], ["node2", 2, 2]]
    wait_until(lambda: flow.ask("machines") == empty, "the end of what ran before")
    where, _ = flow.forever("a", cpus=2)
    taken = [[name, has, 0 if name == where else free] for name, has, free in empty]
    wait_until(lambda: flow.ask("machines") == taken, "its share")


@on_ray
def test_what_fits_no_node_is_refused(flow: Flow) -> None:
    with pytest.raises(UserError, match=r"needs 3 CPU, 1 GPU of one node; the nodes have: 0 CPU, 0 GPU; 2 CPU, 0 GPU"):
        flow.ask("submit", name="a", code=FOREVER, cpus=3, gpus=1)


@on_ray
def test_a_cancelled_task_ends(bed: Bed, flow: Flow) -> None:
    where = flow.forever("a")
    flow.ask("cancel", name="a")
    assert flow.ended("a") == -9
    wait_until(lambda: bed.gone(*where), "its end")


@on_ray
def test_tasks_end_with_a_flow_that_is_killed_and_not_with_another(bed: Bed, flow: Flow) -> None:
    """Both name their task alike."""
    other = bed.flow()
    mine, others = flow.forever("a"), other.forever("a")
    other.process.kill()
    wait_until(lambda: bed.gone(*others), "the end of the other flow's task")
    assert flow.exit_code("a") is None and not bed.gone(*mine)


@on_ray
def test_ray_gets_no_secret_of_the_flow(bed: Bed, flow: Flow) -> None:
    """Neither Ray's processes nor tasks hold it; the same search finds what a task's environment holds."""
    where = flow.forever("a")
    flow.ask("submit", name="b", code="import os, sys; sys.exit(list(os.environ).count('AREAL_SECRET'))")
    assert flow.ended("b") == 0
    flow.ask("submit", name="c", code=FOREVER, environment={"SHOWN": SHOWN})
    flow.output("c")
    names = {name for process in ray_processes(bed) if holds(process, SHOWN) for name in [process.name()]}
    assert any("Runner" in name for name in names), names
    assert not [process for process in ray_processes(bed) if holds(process, SECRET)]
    assert not bed.gone(*where)


def ray_processes(bed: Bed) -> list[psutil.Process]:
    """Those of the head's GCS, of the raylets, of the drivers, and of Ray's workers."""
    found = [one for machine in bed.machines for one in psutil.Process(machine.pid).children(recursive=True)]
    return [one for one in found if re.search(r"gcs_server|raylet|ray_driver|ray::", " ".join(one.cmdline()[:3]))]


def holds(process: psutil.Process, text: str) -> bool:
    """Whether the text is in the memory of a process."""
    with open(f"/proc/{process.pid}/mem", "rb") as memory:
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
            spans, rights = line.split()[:2]
            begin, end = (int(bound, 16) for bound in spans.split("-"))
            if rights.startswith("rw") and "/dev/shm" not in line and text.encode() in read(memory, begin, end):
                return True
    return False


def read(memory: Any, begin: int, end: int) -> bytes:
    try:
        memory.seek(begin)
        return bytes(memory.read(end - begin))
    except (OSError, OverflowError):
        return b""


@pytest.mark.slow("Ray takes half a minute to find that a node is lost")
def test_lost_nodes() -> None:
    """A task is lost with a node that vanishes, or that is cut off."""
    with Machines("head", "node1", "node2") as machines:
        bed = Bed(machines)
        flow = bed.flow()
        first, second = flow.forever("a", cpus=2), flow.forever("b", cpus=1)
        machines.cut(second[0])
        assert flow.ended("b") == LOST and flow.exit_code("a") is None
        machines[first[0]].kill()
        assert flow.ended("a") == LOST
        assert "node has died" in flow.output("a")
        flow.ask("submit", name="c", code=FOREVER, cpus=2)
        wait_until(lambda: "waits for 2 CPU" in flow.waiting("c"), "a reason")
        flow.ask("close")


@pytest.mark.slow("Ray's driver gives up a head that has ended after a minute")
def test_a_lost_head() -> None:
    with Machines("head", "node1", "node2") as machines:
        bed = Bed(machines)
        flow = bed.flow()
        where = flow.forever("a")
        head = [one for one in ray_processes(bed) if "gcs_server" in one.cmdline()[0]]
        head[0].kill()
        assert flow.exit_code("a") is None
        with pytest.raises(UserError, match="Ray's driver has ended, or has not answered"):
            flow.ask("submit", name="b", code=FOREVER)
        assert flow.ended("a") == LOST
        wait_until(lambda: bed.gone(*where), "the end of the task")
        with pytest.raises(UserError, match="No Ray cluster answers at RAY_ADDRESS"):
            flow.ask("submit", name="c", code=FOREVER)


@pytest.mark.slow("a whole quickstart, 2 min")
def test_the_quickstart_on_a_cluster() -> None:
    """Its services run on the nodes, which have the keys of the store from the environment of `ray start`."""
    with Machines("head", "node1", "node2", s3=True) as machines:
        bed = Bed(machines)
        place = ["launcher.type=ray", f"launcher.network={NETWORK}.0/24"]
        command = [sys.executable, "-m", "arealflow.command", "run", "quickstart", *place, "schedule.iterations=1"]
        environment = {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": bed.address, **machines.s3}
        log = machines["head"].run(command, environment).stderr
        assert "iteration 0 done (1 of 1)" in log
        hosts = dict(re.findall(r"service (\S+) starts on (\S+)", log))
        assert hosts.keys() == {"trainer", "inference-0", "rollout-0", "rollout-evaluation"}
        assert set(hosts.values()) == {"node1", "node2"}


@pytest.mark.slow("a whole quickstart, 2 min")
def test_the_quickstart_on_nodes_that_the_autoscaler_adds() -> None:
    """The plan says what services wait for, nodes are added for them, and go when the run has ended."""
    with Machines("head", s3=True) as machines:
        head = machines["head"]
        head.path(config := "/tmp/autoscaling.json").write_text(json.dumps(AUTOSCALING))
        own = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", **machines.s3}
        start_ray(head, "--head", "--num-cpus=0", "--include-dashboard=false", f"--autoscaling-config={config}", **own)
        flow = Flow(head, address := f"{head.address}:6379")
        place = ["launcher.type=ray", f"launcher.network={NETWORK}.0/24", "launcher.ray.autoscaling=true"]
        environment = {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": address, **machines.s3}

        def arealflow(*arguments: str) -> subprocess.CompletedProcess[str]:
            return head.run([sys.executable, "-m", "arealflow.command", *arguments], environment)

        planned = json.loads(arealflow("plan", "quickstart", "--placement", "--json", *place).stdout)
        assert {row["state"] for row in planned} == {"waits"}
        assert "no node has 1 CPU; the largest has none: the autoscaler has to add a larger one" in planned[0]["why"]
        log = arealflow("run", "quickstart", "run=r", *place, *UNTRAINED, "schedule.iterations=1").stderr
        assert "service trainer starts on head" in log and "iteration 0 done (1 of 1)" in log
        assert "r: sound" in arealflow("audit", "r").stdout
        wait_until(lambda: flow.ask("machines") == [["head", 0, 0]], "the end of the added nodes")


def test_a_node_that_is_drained_is_proposed_for_nothing() -> None:
    node = {"name": "n1", "total": {"CPU": 2}, "free": {"CPU": 2}, "draining": True}
    [found] = propose({"trainer": Resources(1)}, [ray.machine(node, {})], autoscales=True)
    assert (found.state, found.why) == ("waits", "needs 1 CPU on one node; n1 has as much, but is being drained")


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'arealflow\[ray\]'"):
        ray.RayCluster(Launcher(type="ray"))


@on_ray
@pytest.mark.parametrize("address", ["", "auto", "ray://head:10001", "head"])
def test_the_address_is_not_one_of_a_head(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ray.ADDRESS, address)
    with pytest.raises(UserError, match="is not the HOST:PORT of a Ray cluster's head node"):
        ray.RayCluster(Launcher(type="ray"))


@on_ray
def test_nothing_listens_at_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ray.ADDRESS, "127.0.0.1:1")
    with pytest.raises(ray.ClusterUnreachable, match=r"No Ray cluster answers at RAY_ADDRESS=127\.0\.0\.1:1"):
        ray.RayCluster(Launcher(type="ray"))


def driver(folder: Path, monkeypatch: pytest.MonkeyPatch, joined: str, state: str = "") -> None:
    """A stand-in for Ray's driver: how it answers that it has joined, and a question for states after a submission.

    Empty: it does not answer.
    """
    code = f"""
import json, sys
print({joined!r}, end="", flush=True)
submitted = False
for line in sys.stdin:
    submitted = submitted or json.loads(line)[0] == "submit"
    print({state!r} if submitted and "states" in line else '""\\n' if submitted else "{{}}\\n", end="", flush=True)
"""
    (folder / "stand_in.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(ray, "DRIVER", "stand_in")
    monkeypatch.setattr(ray, "cluster_address", lambda: "head:6379")


def task(folder: Path) -> Task:
    return Task("a", ("true",), {}, Resources(), folder / "logs" / "a.out")


def test_another_version_of_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(tmp_path, monkeypatch, '"Version mismatch: Ray: 2.59.0"\n')
    with pytest.raises(UserError, match=r"(?s)Ray: 2\.59\.0.*need the same version of Ray and of Python"):
        ray.RayCluster(Launcher(type="ray")).submit(task(tmp_path))


def test_a_machine_that_is_no_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(tmp_path, monkeypatch, "")
    monkeypatch.setattr(ray, "CONNECT_SECONDS", 0.5)
    with pytest.raises(ray.ClusterUnreachable, match="This machine must be a node of the cluster"):
        ray.RayCluster(Launcher(type="ray")).submit(task(tmp_path))


@pytest.mark.parametrize("state", ["no JSON\n", ""])
def test_tasks_are_lost_with_a_driver_that_does_not_answer(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(tmp_path, monkeypatch, '""\n', state)
    monkeypatch.setattr(ray, "SILENT_SECONDS", 2.0)
    before = threading.active_count()
    cluster = ray.RayCluster(Launcher(type="ray"))
    submitted = cluster.submit(task(tmp_path))
    wait_until(lambda: submitted.exit_code() == LOST, "its loss")
    wait_until(lambda: threading.active_count() == before, "the end of the thread")
    cluster.close()


def test_listing_nodes_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(tmp_path, monkeypatch, '""\n')
    before = psutil.Process().num_fds()
    cluster = ray.RayCluster(Launcher(type="ray"))
    assert cluster.machines() == []
    cluster.close()
    del cluster
    wait_until(lambda: psutil.Process().num_fds() == before, "the end of what was open")


@on_ray
def test_a_character_of_which_a_part_is_printed_is_whole_in_the_output(tmp_path: Path) -> None:
    from areal_tasks.launchers.ray_driver import Runner

    os.mkfifo(go_on := tmp_path / "go-on")
    code = "import os, sys; os.write(1, b'caf\\xc3'); open(sys.argv[1]).read(); os.write(1, b'\\xa9\\xff')"
    runner = Runner([sys.executable, "-c", code, str(go_on)], {})
    wait_until(lambda: os.fstat(runner.printed.fileno()).st_size == 4, "the first part")
    assert runner.poll() == (b"caf\xc3", None)
    go_on.write_text("")
    runner.child.wait(LIMIT)
    assert runner.poll() == (b"\xa9\xff", 0)
