"""Tasks on a real Slurm, whose machines share nothing: one runs the flow and the controller, two are nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from machines.bed import ROOT, Machines, Process, first_line
from machines.slurm import Slurm, start_slurm
from waiting import wait_until

from areal_tasks.launchers import slurm
from areal_tasks.launchers.cluster import PREEMPTED, Resources, Task
from schemas.errors import UserError
from schemas.recipe.launcher import Launcher

SECRET = "hf_not_for_others"


class Flow:
    """A program on the first machine that submits tasks (`slurm_flow.py`)."""

    def __init__(self, process: Process) -> None:
        self.process = process
        first_line(process)

    def ask(self, expression: str) -> Any:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{expression}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def submit(self, name: str, *command: str, **more: Any) -> None:
        assert self.ask(f"submit({name!r}, *{command!r}, **{more!r})") is None

    def waiting(self, name: str) -> str:
        found: str = self.ask(f"tasks[{name!r}].waiting()")
        return found

    def ended(self, name: str) -> int:
        """The exit code, once there is one."""
        return int(wait_until(lambda: self.ask(f"[tasks[{name!r}].exit_code()]") != [None] and self.code(name), name))

    def code(self, name: str) -> str:
        return str(self.ask(f"tasks[{name!r}].exit_code()"))


Begin = Callable[..., Flow]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    with Machines("head", "node1", "node2") as bed:
        yield start_slurm(bed, ["node1", "node2"])


@pytest.fixture
def begin(cluster: Slurm) -> Iterator[Begin]:
    """Starts flows. Their jobs end with the test."""

    def start(*inside: str, **settings: Any) -> Flow:
        program = [sys.executable, str(ROOT / "tests" / "launchers" / "slurm_flow.py"), json.dumps(settings)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        environment = cluster.environment | {"HF_TOKEN": SECRET, "PYTHONPATH": str(ROOT)}
        begun.append(cluster.head.popen([*inside, *program], environment, **pipes))
        return Flow(begun[-1])

    begun: list[Process] = []
    cluster.head.run(["mkdir", "-p", "/run/flow"])  # the nodes have no such folder
    yield start
    for process in begun:
        process.kill()
    for node in [cluster.bed[name] for name in cluster.nodes if not cluster.bed[name].pid]:
        node.start()
        cluster.begin(node, "slurmd")
    cluster.run("scancel", "--user=root")
    wait_until(lambda: not cluster.run("squeue", "--noheader"), "the end of all jobs")
    wait_until(cluster.idle, "idle nodes")


def printed(cluster: Slurm, name: str) -> str:
    """What a job has written on its node."""
    found = [node.path(f"/tmp/{name}.out") for node in cluster.bed if node.pid]
    return "".join(path.read_text() for path in found if path.exists())


def test_a_task_runs_with_its_environment_and_nothing_else(cluster: Slurm, begin: Begin) -> None:
    flow = begin()
    value = 'a "b", c=$d\ne'
    script = "env; printf '<%s>' \"$AREAL_SPEC\"; exit 3"
    flow.submit("env", "/bin/sh", "-c", script, AREAL_SPEC=value)
    assert flow.ended("env") == 3
    found = printed(cluster, "env")
    assert f"<{value}>" in found
    names = {line.partition("=")[0] for line in found.splitlines() if "=" in line}
    assert {"AREAL_SPEC", "PATH", "HOME"} <= names
    assert not [name for name in names if name.startswith(("HF_", "PYTHON"))]
    shown = cluster.run("scontrol", "show", "job") + cluster.run("scontrol", "write", "batch_script", "1", "-")
    assert SECRET not in shown + found
    assert "in /tmp/env.out" in flow.ask("open('/run/flow/env.out').read()")


def test_a_task_waits_for_resources_and_says_why(begin: Begin) -> None:
    flow = begin()
    for name in ("one", "two", "three"):
        flow.submit(name, "sleep", "1000", cpus=8)
    wait_until(lambda: flow.waiting("three") in ("Resources", "Priority"), "a reason")
    wait_until(lambda: not flow.waiting("one") and not flow.waiting("two"), "two that run")
    flow.ask("tasks['one'].cancel()")
    assert flow.ended("one") == 143
    wait_until(lambda: not flow.waiting("three"), "the third")


def free(flow: Flow) -> list[list[Any]]:
    """Name, free CPUs and free memory of each machine."""
    found: list[list[Any]] = flow.ask("[[m.name, m.free.cpus, m.free.memory_mb] for m in cluster.machines()]")
    return sorted(found)


def test_the_machines_and_what_of_them_is_free(cluster: Slurm, begin: Begin) -> None:
    flow = begin(options=["--nodelist=node2"])
    assert free(flow) == [["node1", 8, 8192], ["node2", 8, 8192]]
    flow.submit("one", "sleep", "1000", cpus=3, memory_mb=500)
    wait_until(lambda: free(flow) == [["node1", 8, 8192], ["node2", 5, 7692]], "its share")
    assert free(begin(partition="short"))[1] == ["node2", 5, 7692]
    cluster.run("scontrol", "update", "nodename=node1", "state=drain", "reason=test")
    assert flow.ask("[m.state for m in cluster.machines()]") == ["in state drain", ""]
    cluster.run("scontrol", "update", "nodename=node1", "state=resume")


def test_what_is_cancelled_ends_with_its_processes(cluster: Slurm, begin: Begin) -> None:
    flow = begin()
    flow.submit("gone", "/bin/sh", "-c", "sleep 98767 & trap '' TERM; wait; sleep 98767")
    wait_until(lambda: running(cluster, "98767"), "its process")
    flow.ask("tasks['gone'].cancel()")
    wait_until(lambda: not running(cluster, "98767"), "the end of its process")


def running(cluster: Slurm, what: str) -> list[str]:
    """The nodes with a process of which `what` is an argument."""
    nodes = [cluster.bed[name] for name in cluster.nodes if cluster.bed[name].pid]
    return [node.name for node in nodes if what in node.run(["ps", "-eo", "args"]).stdout]


@pytest.mark.parametrize(
    ("settings", "needs", "message"),
    [
        ({"partition": "gpu"}, {}, "launcher.slurm.partition"),
        ({"constraint": "h100"}, {}, "launcher.slurm.constraint"),
        ({}, {"cpus": 9}, "launcher.resources"),
        ({}, {"memory_mb": 9000}, "launcher.resources"),
    ],
)
def test_what_can_never_run_is_refused_with_the_remedy(
    begin: Begin, settings: dict[str, str], needs: dict[str, int], message: str
) -> None:
    refused = begin(**settings).ask(f"submit('never', 'true', **{needs!r})")
    assert refused.startswith("UserError: Slurm refuses never (")
    assert message in refused


def test_two_flows_share_the_cluster(begin: Begin) -> None:
    first, second = begin(), begin()
    first.submit("first", "sleep", "1000")
    second.submit("second", "sleep", "1000")
    wait_until(lambda: not first.waiting("first") and not second.waiting("second"), "both")
    first.ask("cluster.close()")
    assert first.ended("first") == 143
    second.submit("later", "true")
    assert second.ended("later") == 0
    assert second.ask("tasks['second'].exit_code()") is None


@pytest.mark.slow("Slurm takes half a minute to miss a node")
def test_a_node_that_vanishes_ends_its_tasks(cluster: Slurm, begin: Begin) -> None:
    flow = begin(options=["--nodelist=node2"])
    flow.submit("lost", "sleep", "98768")
    wait_until(lambda: running(cluster, "98768"), "its process")
    cluster.bed["node2"].kill()
    assert flow.ended("lost") != 0


@pytest.mark.slow("Slurm takes half a minute to miss a node")
def test_a_task_that_slurm_requeues_begins_again(cluster: Slurm, begin: Begin) -> None:
    flow = begin(options=["--requeue"])
    flow.submit("again", "/bin/sh", "-c", 'echo "start ${SLURM_RESTART_COUNT:-0}"; sleep 98769')
    (node,) = wait_until(lambda: running(cluster, "98769"), "its process")
    cluster.bed[node].kill()
    (other,) = wait_until(lambda: running(cluster, "98769"), "its process on the other node")
    assert other != node
    wait_until(lambda: printed(cluster, "again") == "start 1\n", "the line of its second start")
    assert flow.ask("tasks['again'].exit_code()") is None


@pytest.mark.slow("a controller that has just started waits for its nodes")
def test_while_the_controller_is_down_tasks_go_on(cluster: Slurm, begin: Begin) -> None:
    flow = begin()
    flow.submit("stays", "sleep", "1000")
    wait_until(lambda: not flow.waiting("stays"), "its start")
    cluster.daemons[0].terminate()
    cluster.daemons[0].wait()
    assert flow.ask("submit('more', 'true')").startswith("ClusterUnreachable: ")
    assert flow.ask("tasks['stays'].exit_code()") is None
    cluster.begin(cluster.head, "slurmctld")
    wait_until(cluster.answers, "the controller")
    flow.submit("more", "true")
    assert flow.ended("more") == 0
    assert flow.ask("tasks['stays'].exit_code()") is None


def test_in_an_allocation_tasks_are_steps(cluster: Slurm, begin: Begin) -> None:
    flow = begin("salloc", "--quiet", "--nodes=2", "--cpus-per-task=8", "--mem=8000")
    flow.submit("env", "/bin/sh", "-c", "env; exit 4", AREAL_SPEC="x")
    assert flow.ended("env") == 4
    found = flow.ask("open('/run/flow/env.out').read()")
    assert "AREAL_SPEC=x\n" in found
    assert SECRET not in found
    assert "has more than 8 CPUs" in flow.ask("submit('never', 'true', cpus=9)")
    for name in ("one", "two", "three"):
        flow.submit(name, "sleep", "98770", cpus=8)
    wait_until(lambda: len(running(cluster, "98770")) == 2, "a task on each node")
    names = ("one", "two", "three")
    wait_until(lambda: sum(bool(flow.waiting(name)) for name in names) == 1, "the word of both that they have begun")
    late = [name for name in names if flow.waiting(name)]
    assert free(flow) == [["node1", 0, 7744], ["node2", 0, 7744]]
    assert flow.waiting(*late) == "Resources"
    (first, *_) = {"one", "two", "three"} - set(late)
    flow.ask(f"tasks[{first!r}].cancel()")
    assert flow.ended(first) != 0
    wait_until(lambda: not flow.waiting(*late), "the one that waited")
    flow.ask("cluster.close()")
    wait_until(lambda: not running(cluster, "98770"), "the end of all")


def test_jobs_are_looked_at_again_after_an_answer_that_nobody_understands(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["7|RUNNING\n", "7|COMPLETED|None|0|node1|\n"])
    monkeypatch.setattr(slurm, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(slurm, "_require", lambda *commands: None)
    monkeypatch.setattr(slurm, "_run", lambda *command: next(answers))
    jobs = slurm.Jobs(Launcher(type="slurm").slurm)
    jobs._jobs.append(job := slurm.Job("7", Task("a", (), {}, Resources(), Path(__file__)), jobs))
    wait_until(lambda: job.exit_code() == 0, "its end")
    jobs.close()


def test_a_job_for_which_another_had_to_make_room_was_taken_back(tmp_path: Path) -> None:
    job = slurm.Job("7", Task("a", (), {}, Resources(), tmp_path / "a.out"), jobs=None)  # type: ignore[arg-type]
    job.update(slurm.Status("PREEMPTED", code=143))
    assert job.exit_code() == PREEMPTED


def test_a_machine_without_slurm_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for job in ("", "7"):
        monkeypatch.setenv("SLURM_JOB_ID", job) if job else monkeypatch.delenv("SLURM_JOB_ID", raising=False)
        with pytest.raises(UserError, match=r"needs the command s\w+, which this machine does not have"):
            slurm.slurm(Launcher(type="slurm"))
