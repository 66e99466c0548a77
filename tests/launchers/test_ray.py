"""Tasks on a real Ray cluster: a head and two nodes, on machines that share nothing."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
from machines.bed import Machines
from machines.ray_bed import FOREVER, SECRET, Bed, Flow, ray_processes
from waiting import LIMIT, wait_until

from areal_tasks.launchers import ray
from areal_tasks.launchers.cluster import LOST, Resources, Task
from areal_tasks.launchers.placement import propose
from schemas.errors import UserError
from schemas.recipe.launcher import Launcher

SHOWN: Final = "77ac-no-secret-of-the-task-1d0e"
on_ray = pytest.mark.slow("Ray's daemons, half a minute")


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


def test_a_node_that_is_drained_is_proposed_for_nothing() -> None:
    node = {"name": "n1", "total": {"CPU": 2}, "free": {"CPU": 2}, "draining": True}
    [found] = propose({"trainer": Resources(1)}, [ray.machine(node, {})], autoscales=True)
    assert (found.state, found.why) == ("waits", "needs 1 CPU on one node; n1 has as much, but is being drained")


def test_two_nodes_of_one_host_are_two_machines() -> None:
    node = {"name": "n1", "total": {"CPU": 2}, "free": {"CPU": 2}, "draining": False}
    nodes = [{**node, "id": "7c52e0a1f3"}, {**node, "id": "09b1d4e677"}, {**node, "id": "55aa", "name": "n2"}]
    machines = [ray.machine(node, {}) for node in ray.told_apart(nodes)]
    found = propose(dict.fromkeys(("trainer", "inference-0", "rollout-0"), Resources(2)), machines)
    assert [proposal.machine for proposal in found] == ["n1 (7c52e0a1)", "n1 (09b1d4e6)", "n2"]


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'arealflow\[ray\]'"):
        ray.RayCluster(Launcher(type="ray"))


@on_ray
@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("", "RAY_ADDRESS is not set: export, before `arealflow up`,"),
        ("auto", "RAY_ADDRESS='auto' is not"),
        ("ray://head:10001", "RAY_ADDRESS='ray://head:10001' is not"),
        ("head", "RAY_ADDRESS='head' is not"),
    ],
)
def test_the_address_is_not_one_of_a_head(address: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ray.ADDRESS, address)
    with pytest.raises(UserError, match=f"^{found} the HOST:PORT of a Ray cluster's head node"):
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
