"""An `up` or a keeper that is killed leaves nothing behind for good: what it has started is used or ended later."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from waiting import alive, wait_until

from flows.cli import automations, keeper, machine, processes
from flows.cli.processes import end, flow_processes, parts, spawn
from schemas.errors import UserError

SLEEPER = [sys.executable, "-c", "import time; time.sleep(3600)"]
URL = "http://127.0.0.1:1/api"


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("AREALFLOW_HOME", str(tmp_path))
    yield
    machine._end_all()


@pytest.fixture
def sleeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Server and keeper are processes that only sleep, and nothing is deployed."""

    def start_server(port: int) -> str:
        spawn("server", SLEEPER, URL)
        return URL

    monkeypatch.setattr(machine, "start_server", start_server)
    monkeypatch.setattr(machine, "python", lambda module: SLEEPER)
    monkeypatch.setattr(machine, "answers", lambda url: True)
    monkeypatch.setattr(automations, "install", lambda url: None)
    monkeypatch.setattr(machine, "deploy_all", lambda recipes, url: None)


def started(name: str) -> psutil.Process:
    """A part that sleeps, once its environment can be read."""
    process = spawn(name, SLEEPER, URL)
    wait_until(lambda: process in parts(name), name)
    return process


def test_down_ends_the_server_of_an_up_that_was_killed(capsys: pytest.CaptureFixture[str]) -> None:
    held = "import time; from flows.cli import machine; machine.answers = lambda *_: time.sleep(3600)"
    command = [sys.executable, "-c", f"{held}; from flows.cli.main import main; main()", "up", "--port", "47200"]
    up = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        wait_until(lambda: parts("server"))
    finally:
        up.kill()
        up.wait()
    [server] = parts("server")
    assert "prefect" in server.cmdline() and not parts("keeper", "worker")
    machine.down()
    assert not parts("server") and not alive(server) and capsys.readouterr().out.endswith("stopped\n")
    machine.down()
    assert capsys.readouterr().out == "nothing is running\n"


def test_commands_log_in_to_the_server_of_up_and_use_others_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    processes.log_in("arealflow:its own")
    started("server")
    for named, login in (("", "arealflow:its own"), (URL, "arealflow:its own"), ("http://other:4200/api", "me:mine")):
        monkeypatch.setenv("PREFECT_API_URL", named)
        monkeypatch.setenv(processes.LOGIN, "me:mine")
        assert (processes.named_server(), os.environ[processes.LOGIN]) == (named or URL, login)


def test_up_ends_a_worker_whose_server_and_keeper_are_gone(sleeping: None) -> None:
    left = started("worker")
    assert machine.start() == URL
    assert not alive(left) and len(parts("server")) == len(parts("keeper")) == 1


def test_up_keeps_what_has_outlived_the_keeper(sleeping: None) -> None:
    left = started("server"), started("worker")
    assert machine.start() == machine.start() == URL
    assert all(map(alive, left)) and len(parts("keeper")) == 1
    adopted = keeper.Keeper(URL, keeper.threading.Event())
    assert adopted.server.runs() and adopted.worker.runs()


def test_up_names_the_variables_of_which_what_runs_keeps_others(
    sleeping: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"AWS_SECRET_ACCESS_KEY": "a secret", "RAY_ADDRESS": "10.0.0.1:6379", "OF_A_SHELL": "1"}.items():
        monkeypatch.setenv(name, value)
    machine.start()
    started("worker")
    machine.start()
    assert not capsys.readouterr().err
    for name, value in {"AWS_SECRET_ACCESS_KEY": "another", "AREALFLOW_STORE": "s3://there", "OF_A_SHELL": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_ADDRESS")
    machine.start()
    told = capsys.readouterr().err
    assert " of AREALFLOW_STORE, AWS_SECRET_ACCESS_KEY, RAY_ADDRESS. To use them: `arealflow down`" in told
    assert not any(value in told for value in ("secret", "another", "s3://", "10.0.0.1"))
    end(parts("keeper", "server"))
    machine.start()  # it ends the worker, and starts the others with what is set now
    assert not capsys.readouterr().err


def test_down_ends_flow_processes_whose_worker_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    flow = psutil.Popen(SLEEPER, env=os.environ | {processes.FLOW_RUN: "an id"})
    wait_until(lambda: flow in flow_processes())
    machine.down()
    assert flow.poll() is not None and capsys.readouterr().out == "stopped\n"


def test_what_a_part_has_started_and_what_is_another_homes_is_none(tmp_path: Path) -> None:
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)']).wait()"
    parent = spawn("worker", [sys.executable, "-c", child], URL)
    wait_until(lambda: parent.children())
    assert parts("server", "worker", "keeper") == [parent]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AREALFLOW_HOME", str(tmp_path / "elsewhere"))
        assert parts("worker") == []
    end([*parent.children(), parent])


def test_what_does_not_end_in_time_is_killed_with_its_children() -> None:
    code = "import signal, subprocess, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); subprocess.Popen(['sleep', "
    process = psutil.Popen([sys.executable, "-c", f"{code}'3600']); time.sleep(3600)"])
    wait_until(process.children, "its child")
    family = [process, *process.children()]
    end(family, grace_seconds=0.5)
    assert not any(map(alive, family))


def test_a_child_is_left_to_its_parent() -> None:
    code = "import signal, subprocess, sys; child = subprocess.Popen(['sleep', '3600']); "
    code += "signal.signal(signal.SIGTERM, lambda *_: (child.kill(), sys.exit(child.wait() + 9))); signal.pause()"
    process = psutil.Popen([sys.executable, "-c", code])
    wait_until(process.children, "its child")
    end([process, *process.children()])
    assert process.wait() == 0


def test_up_does_not_deploy_to_a_foreign_server_at_its_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper's own server has died, and could not take its port again."""
    monkeypatch.setattr(processes, "START_SECONDS", 1.0)
    monkeypatch.setattr(machine.httpx, "get", lambda url, timeout: httpx.Response(200))
    monkeypatch.setattr(automations, "install", lambda url: pytest.fail("this is not our server"))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "server.log").write_text("address already in use")
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        url = f"http://127.0.0.1:{foreign.getsockname()[1]}/api"
        left = spawn("keeper", SLEEPER, url), spawn("server", SLEEPER, url)
        wait_until(lambda: processes.running() == url, "the keeper")
        with pytest.raises(UserError, match="did not start"):
            machine.start()
    end(left)


def test_the_answer_of_anothers_server_is_not_taken_for_ours() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, psutil.Popen(["sleep", "3600"]) as sleeper:
        port = taken.getsockname()[1]
        assert machine.listens(psutil.Process(), port)
        assert not machine.listens(sleeper, port)
        sleeper.kill()
