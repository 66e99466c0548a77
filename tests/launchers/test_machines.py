"""The test bed itself: its machines share nothing, links can be cut, and a machine can vanish."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from machines.bed import ROOT, Machine, Machines, Process, first_line, obstacle
from waiting import LIMIT, alive, wait_until

PYTHON = (sys.executable, "-IS", "-c")
#: Answers each line with the same line, on a port of all addresses, on loopback, and at an abstract name.
SERVER = """
import socket, threading
def serve(listener):
    while True:
        connection = listener.accept()[0]
        threading.Thread(target=echo, args=[connection]).start()
def echo(connection):
    while line := connection.recv(1 << 16):
        connection.sendall(line)
abstract = socket.socket(socket.AF_UNIX)
abstract.bind(b"\\0arealflow-bed")
abstract.listen()
listeners = [socket.create_server(("", 7000)), socket.create_server(("127.0.0.1", 7001)), abstract]
for listener in listeners:
    threading.Thread(target=serve, args=[listener]).start()
print("ready", flush=True)
"""
#: `ADDRESS [BYTES]`: prints what came back, or the error. A LAN answers in a thousandth of the timeout.
CLIENT = """
import socket, sys, time
where = sys.argv[1]
peer = socket.socket(socket.AF_UNIX if where == "abstract" else socket.AF_INET)
peer.settimeout(0.5 if len(sys.argv) == 2 else 100)
try:
    peer.connect(b"\\0arealflow-bed" if where == "abstract" else (where.split(":")[0], int(where.split(":")[1])))
    began = time.monotonic()
    sent = b"x" * int((sys.argv[2:] or ["1"])[0])
    peer.sendall(sent)
    got = 0
    while got < len(sent):
        got += len(peer.recv(1 << 16))
    print(time.monotonic() - began)
except OSError as error:
    print(type(error).__name__)
"""


@pytest.fixture(scope="module")
def bed() -> Iterator[Machines]:
    with Machines("head", "node1", "node2", s3=True) as bed:
        yield bed


@pytest.fixture
def server(bed: Machines) -> Iterator[Process]:
    """It listens on node1."""
    with serving(bed["node1"]) as process:
        yield process
        process.kill()


def serving(machine: Machine) -> Process:
    process = machine.popen([*PYTHON, SERVER], stdout=subprocess.PIPE, text=True)
    first_line(process)
    return process


def ask(machine: Machine, where: str, *size: str) -> str:
    return machine.run([*PYTHON, CLIENT, where, *size]).stdout.strip()


def answers(asked: str) -> bool:
    return asked.replace(".", "").replace("e-", "").isdigit()


@pytest.mark.parametrize("folder", ["/tmp", "/var/tmp", "/dev/shm", "/run", "/root"])
def test_no_folder_is_shared(bed: Machines, folder: str) -> None:
    bed["node1"].run(["touch", f"{folder}/arealflow-mine"])
    assert bed["node1"].path(f"{folder}/arealflow-mine").exists()
    for other in (bed["head"], bed["node2"]):
        assert not other.path(f"{folder}/arealflow-mine").exists()
    assert not Path(f"{folder}/arealflow-mine").exists()


@pytest.mark.parametrize("folder", [str(ROOT), sys.prefix, "/usr"])
def test_code_and_packages_are_read_only(bed: Machines, folder: str) -> None:
    tried = bed["head"].run(["touch", f"{folder}/arealflow-mine"], check=False)
    assert "Read-only file system" in tried.stderr
    found = bed["head"].run([sys.executable, "-c", "import schemas; print(schemas.__file__)"]).stdout
    assert found.startswith(str(ROOT))


def test_names_and_processes_are_its_own(bed: Machines) -> None:
    with bed["node1"].popen(["sleep", "98765"]) as process:
        assert "98765" in bed["node1"].run(["ps", "-ef"]).stdout
        assert "98765" not in bed["head"].run(["ps", "-ef"]).stdout
        process.kill()
    assert bed["node1"].run(["hostname"]).stdout == "node1\n"
    assert bed["head"].run(["getent", "hosts", "node1"]).stdout.split() == [bed["node1"].address, "node1"]


@pytest.mark.usefixtures("server")
def test_loopback_and_abstract_sockets_are_its_own(bed: Machines) -> None:
    node1 = bed["node1"]
    assert all(answers(ask(node1, where)) for where in ("127.0.0.1:7000", "127.0.0.1:7001", "abstract"))
    assert answers(ask(bed["head"], f"{node1.address}:7000"))
    for where in ("127.0.0.1:7000", f"{node1.address}:7001", "abstract"):
        assert ask(bed["head"], where) == "ConnectionRefusedError"


def test_nothing_leads_outside(bed: Machines) -> None:
    assert ask(bed["head"], "192.0.2.1:80") == "OSError"  # no route
    assert bed["head"].address not in str(psutil.net_if_addrs())


def test_a_program_has_its_own_signals_and_exit_code(bed: Machines) -> None:
    script = "trap 'echo interrupted; exit 7' USR1; echo ready; while :; do sleep 0.1; done"
    with bed["head"].popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True) as process:
        first_line(process)
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.read() == "interrupted\n"
    assert process.returncode == 7


@pytest.mark.usefixtures("server")
def test_a_cut_link_loses_everything_until_it_is_restored(bed: Machines) -> None:
    where = f"{bed['node1'].address}:7000"
    bed.cut("node1")
    assert ask(bed["head"], where) in ("TimeoutError", "OSError")  # the latter: no Ethernet address was found
    assert answers(ask(bed["node1"], where))
    bed.restore("node1")
    wait_until(lambda: answers(ask(bed["head"], where)), "an answer")


@pytest.mark.usefixtures("server")
def test_a_link_is_cut_between_two(bed: Machines) -> None:
    where = f"{bed['node1'].address}:7000"
    bed.cut("node1", "head")
    assert ask(bed["head"], where) == "TimeoutError"
    assert answers(ask(bed["node2"], where))
    bed.restore("node1")
    wait_until(lambda: answers(ask(bed["head"], where)), "an answer")


@pytest.mark.usefixtures("server")
@pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="a slow link needs /dev/net/tun")
def test_a_slow_link_delays_packets_and_lets_few_pass(bed: Machines) -> None:
    where = f"{bed['node1'].address}:7000"
    bed.slow("node1", delay_ms=50)
    assert float(ask(bed["head"], where, "1")) >= 0.1  # there and back
    bed.slow("node1", megabits=10)
    assert float(ask(bed["head"], where, "200000")) >= 0.15  # 1.6 megabits, less what the line takes before it is full
    bed.restore("node1")
    wait_until(lambda: answers(ask(bed["head"], where)), "an answer")


def test_a_machine_vanishes_without_a_word_and_comes_back_with_its_home() -> None:
    with Machines("head", "node1") as bed, serving(bed["node1"]):
        node1 = bed["node1"]
        node1.run(["sh", "-c", "touch /tmp/lost ~/kept"])
        inside = psutil.Process(node1.pid).children(recursive=True)
        with connected(bed["head"], f"{node1.address}:7000") as peer:
            node1.kill()
            assert not any(map(alive, inside))
            assert peer.communicate()[0] == "TimeoutError\n"  # not the end of the stream
        node1.start()
        assert node1.path("/root/kept").exists()
        assert not node1.path("/tmp/lost").exists()
        assert ask(bed["head"], f"{node1.address}:7000") == "ConnectionRefusedError"


def connected(machine: Machine, where: str) -> Process:
    """A program that has an answer of the server at `where`, and prints what it receives next."""
    script = """
import socket, sys
host, port = sys.argv[1].split(":")
peer = socket.create_connection((host, int(port)))
peer.sendall(b"x")
peer.recv(1)
print("ready", flush=True)
peer.settimeout(0.5)
try:
    print(peer.recv(1))
except OSError as error:
    print(type(error).__name__)
"""
    process = machine.popen([*PYTHON, script, where], stdout=subprocess.PIPE, text=True)
    first_line(process)
    return process


@pytest.mark.skipif(bool(obstacle()), reason=obstacle())
def test_everything_ends_with_the_test_however_it_ends() -> None:
    script = """
import sys
sys.path.insert(0, "tests")
from machines.bed import Machines
with Machines("head", "node1") as bed, bed["node1"].popen(["setsid", "sleep", "98766"]):
    print(bed.switch.pid, bed["head"].pid, bed["node1"].pid, flush=True)
    sys.stdin.read()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, **pipes) as process:
        first = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        inside = [one for each in first for one in (each, *each.children(recursive=True))]
        assert len(inside) > len(first)
        process.kill()
        process.wait(LIMIT)
        wait_until(lambda: not any(map(alive, inside)), "the end of all processes")


def test_every_machine_reaches_the_object_store(bed: Machines) -> None:
    script = "import sys; from areal_tasks.store.backend import open_store; store = open_store('s3://arealflow/bed'); "
    bed["head"].run([sys.executable, "-c", script + "store.create('written', b'by head')"], bed.s3)
    read = bed["node1"].run([sys.executable, "-c", script + "print(store.read('written'))"], bed.s3)
    assert "by head" in read.stdout
