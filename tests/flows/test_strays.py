"""An `up` or a keeper that is killed between starting a process and writing it down leaves nothing behind for good."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from flows.cli import machine
from flows.cli.strays import parts

SLEEPER = [sys.executable, "-c", "import time; time.sleep(3600)"]
URL = "http://127.0.0.1:1/api"


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("AREALFLOW_HOME", str(tmp_path))
    yield
    machine._stop_all()


@pytest.fixture
def sleeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Server, worker and keeper are processes that only sleep, and nothing is deployed."""
    monkeypatch.setattr(machine, "start_server", lambda url: machine._spawn("server", SLEEPER, url))
    monkeypatch.setattr(machine, "start_worker", lambda url, server: machine._spawn("worker", SLEEPER, url))
    monkeypatch.setattr(machine, "KEEPER", "this")  # whose start prints a poem and ends
    monkeypatch.setattr(machine, "wait_for_api", lambda url: True)
    monkeypatch.setattr(machine, "prefect", lambda arguments, url: None)


def test_down_ends_the_server_of_an_up_that_was_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = "import time; from flows.cli import machine; machine.start_worker = lambda *_: time.sleep(3600)"
    command = [sys.executable, "-c", f"{held}; from flows.cli.main import main; main()", "up", "--port", "47200"]
    up = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        wait_until(lambda: "server" in parts().values())
    finally:
        up.kill()
        up.wait()
    [server] = parts()
    assert machine.read() is None and "prefect" in psutil.Process(server).cmdline()
    machine.down()
    assert parts() == {} and not psutil.pid_exists(server) and capsys.readouterr().out == "stopped\n"
    machine.down()
    assert capsys.readouterr().out == "nothing is running\n"


def test_up_ends_what_an_up_that_was_killed_has_left(sleeping: None) -> None:
    left = machine._spawn("server", SLEEPER, URL), machine._spawn("worker", SLEEPER, URL)
    wait_until(lambda: sorted(parts().values()) == ["server", "worker"])  # not before their environments are there
    begun = machine._start(47300)
    assert not any(machine.alive(one) for one in left)
    assert machine.alive(begun.server) and machine.alive(begun.worker)


def test_a_keeper_that_nobody_has_written_down_is_replaced(sleeping: None, monkeypatch: pytest.MonkeyPatch) -> None:
    server, worker = machine._spawn("server", SLEEPER, URL), machine._spawn("worker", SLEEPER, URL)
    machine.write(machine.Machine(URL, server, worker))
    left = machine._spawn("keeper", SLEEPER, URL)
    wait_until(lambda: "keeper" in parts().values())
    machine._start(47300)
    assert not machine.alive(left) and machine.alive(server) and machine.alive(worker)


def test_what_a_part_has_started_and_what_is_another_homes_is_none(tmp_path: Path) -> None:
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)']).wait()"
    parent = machine._spawn("worker", [sys.executable, "-c", child], URL)
    wait_until(lambda: psutil.Process(parent.pid).children())
    assert parts() == {parent.pid: "worker"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AREALFLOW_HOME", str(tmp_path / "elsewhere"))
        assert parts() == {}
    for process in (*psutil.Process(parent.pid).children(), psutil.Process(parent.pid)):
        process.kill()
