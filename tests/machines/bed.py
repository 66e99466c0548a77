"""Machines that share nothing but a network, made of Linux namespaces. Tests without root are skipped.

    with Machines("head", "node1", s3=True) as bed:
        bed["head"].run(["arealflow", "run", "recipe.yaml"], env=bed.s3)
        bed.cut("node1")

Each machine has processes, host name, network, loopback, `/tmp`, `/dev/shm`, `/run` and home of its own. It sees the
rest of this machine's files, the repository and the packages among them, and can write none of them. All machines and
the switch between them are in one outer namespace, which ends with the thread that made it, even if that is killed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import psutil
import pytest
from waiting import LIMIT

ROOT: Final = Path(__file__).parents[2]
RELAY: Final = Path(__file__).with_name("relay.py")
TOOLS: Final = ("ip", "nsenter", "unshare", "setpriv", "mount", "pivot_root")
S3: Final = "s3"
NETWORK: Final = "10.77.0"
NOWHERE: Final = "02:00:00:00:00:00"  # an Ethernet address that no machine has
OUTPUT: Final[dict[str, Any]] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}

#: The outer namespace. Its `/dev/shm` holds the machines' disks.
SWITCH: Final = """
set -e
mount -t tmpfs tmpfs /dev/shm
ip link add lan type bridge
ip link set lan up
echo ready
exec sleep infinity >&- 2>&-
"""
#: A machine. Its first process ends all others when it ends, and reaps those that no other process does.
BOOT: Final = """
set -e
name=$1 home=$2
shift 2
read -r pid rest </proc/self/stat
disk=/dev/shm/$name root=/dev/shm/$name/root
mkdir -p "$root" "$disk/home"
mount --rbind / "$root"
mount -o remount,bind,ro "$root"
for folder in /tmp /var/tmp /run /dev/shm; do mount -t tmpfs -o mode=1777 tmpfs "$root$folder"; done
mount --bind "$disk/home" "$root$home"
for kept; do
  mkdir -p "$root$kept"
  mount --rbind "$kept" "$root$kept"
  mount -o remount,bind,ro "$root$kept"
done
cat >"$root/run/hosts"
mount --bind "$root/run/hosts" "$root/etc/hosts"
mount -t proc proc "$root/proc"
cd "$root"
pivot_root . .
umount -l .
cd "$home"
hostname "$name"
echo "$pid"
exec >&- 2>&-
sleep infinity &
wait
"""


@functools.cache
def obstacle() -> str:
    """Why there can be no machines here; empty if there can."""
    if os.geteuid() != 0:
        return "machines of namespaces need root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"machines need {', '.join(missing)} (Debian: apt install iproute2 util-linux)"
    tried = subprocess.run(
        ["unshare", *_new("net", "mount", "uts", "ipc"), "ip", "link", "add", "lan", "type", "bridge"],
        capture_output=True,
        text=True,
        check=False,
    )
    return tried.stderr.strip() and f"machines need namespaces and bridges: {tried.stderr.strip()}"


class Process(subprocess.Popen[Any]):
    """A program on a machine. What runs here is `nsenter`, whose only child is the program: signals are for that."""

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            for program in psutil.Process(self.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    program.send_signal(sig)


class Machine:
    """One of the machines: runs programs, and can vanish."""

    def __init__(self, switch: Switch, name: str, address: str) -> None:
        self.switch = switch
        self.name = name
        self.address = address
        self.pid = 0  # of its first process, as seen from here; 0: it is off

    @property
    def environment(self) -> dict[str, str]:
        """What its programs find in their environment: nothing of this process's but how libraries use the CPU."""
        path = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        kept = {name: os.environ[name] for name in ("OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA") if name in os.environ}
        return {"PATH": path, "HOME": _home(), "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1", **kept}

    def popen(self, command: Sequence[str], env: Mapping[str, str] = {}, **options: Any) -> Process:
        """Start a program, in its home folder; `env` is added to its environment. It ends with this thread."""
        assert self.pid, f"{self.name} is off"
        inside = ["nsenter", f"--target={self.pid}", "--all", f"--wdns={_home()}", "setpriv", "--pdeathsig=KILL"]
        return Process([*inside, *command], env=self.environment | dict(env), **options)

    def run(
        self, command: Sequence[str], env: Mapping[str, str] = {}, check: bool = True, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end. RuntimeError with what it wrote if it fails, unless `check` is false."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, "text": True}
        process = self.popen(command, env, **pipes | options)
        output, errors = process.communicate()
        if check and process.returncode:
            raise RuntimeError(f"{self.name}: {command} ended with {process.returncode}:\n{output}{errors}")
        return subprocess.CompletedProcess(command, process.returncode, output, errors)

    def path(self, inside: str | Path) -> Path:
        """Where this process finds a file of the machine."""
        return Path(f"/proc/{self.pid}/root") / str(inside).lstrip("/")

    def start(self) -> None:
        """Switch it on. Its home folder is a disk that has survived; everything else is empty."""
        kept = [str(path) for path in (ROOT, sys.prefix, sys.base_prefix)]
        boot = ["unshare", *_new("net", "mount", "pid", "uts", "ipc"), "sh", "-c", BOOT, "boot", self.name, _home()]
        self.power = self.switch.popen([*boot, *kept], stdin=subprocess.PIPE)
        self.pid = int(first_line(self.power, self.switch.hosts))
        ethernet = f"02:4d:00:00:00:{self.address.rpartition('.')[2]}"  # others remember it while the machine is off
        self.switch.ip(f"link add {self.name} type veth peer name eth0 address {ethernet} netns {self.pid}")
        self.switch.ip(f"link set {self.name} master lan", f"link set {self.name} up")
        self.ip("link set lo up", f"addr add {self.address}/24 dev eth0", "link set eth0 up")

    def kill(self) -> None:
        """It vanishes: all its processes end, and no connection is closed, since its link is gone before."""
        self.switch.ip(f"link del {self.name}")
        psutil.Process(self.pid).kill()
        self.power.wait(LIMIT)
        self.pid = 0

    def ip(self, *lines: str) -> None:
        """Commands of `ip` on the machine."""
        _ip(self.pid, lines)


class Switch:
    """The outer namespace: the bridge that joins the machines, and everything else that must end with the test."""

    def __init__(self, hosts: str) -> None:
        self.hosts = hosts  # every machine's /etc/hosts
        inside = ["unshare", *_new("net", "mount", "pid", "ipc"), "--kill-child=KILL", "sh", "-c", SWITCH]
        command = ["setpriv", "--pdeathsig=KILL", *inside]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, **OUTPUT)
        first_line(self.process)
        self.pid = psutil.Process(self.process.pid).children()[0].pid

    def popen(self, command: Sequence[str], **options: Any) -> Process:
        """Start a program in the outer namespace."""
        inside = ["nsenter", f"--target={self.pid}", "--net", "--mount", "--pid", "--ipc", "--wdns=/"]
        return Process([*inside, *command], **{"stdin": subprocess.DEVNULL} | OUTPUT | options)

    def ip(self, *lines: str) -> None:
        """Commands of `ip` at the bridge."""
        _ip(self.pid, lines)

    def close(self) -> None:
        """Everything ends."""
        self.process.kill()
        self.process.wait()


class Machines:
    """Machines of the given names, and their network. With `s3`, one more of that name, which serves S3."""

    def __init__(self, *names: str, s3: bool = False) -> None:
        self.names = (*names, S3) if s3 else names
        self.s3: dict[str, str] = {}  # what a program needs in its environment to use the S3 server and its store
        self.relays: dict[str, Process] = {}

    def __enter__(self) -> Self:
        if obstacle():
            pytest.skip(obstacle())
        addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate(self.names, 10)}
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
        self.switch = Switch("".join(f"{line}\n" for line in lines))
        self.machines = {name: Machine(self.switch, name, address) for name, address in addresses.items()}
        try:
            for machine in self.machines.values():
                machine.start()
            if S3 in self.machines:
                self._serve_s3(self[S3])
        except BaseException:
            self.switch.close()
            raise
        return self

    def _serve_s3(self, machine: Machine) -> None:
        """Start an S3 server on the machine, and find its address and keys in what it prints."""
        script = str(ROOT / "tests" / "s3_server.py")
        self.server = machine.popen(
            [sys.executable, script, "data", machine.address], stdin=subprocess.DEVNULL, **OUTPUT
        )
        lines = [first_line(self.server), *(self.server.stdout.readline().strip() for _ in range(4))]
        self.s3 = dict(line.removeprefix("export ").split("=", 1) for line in lines)

    def __exit__(self, *error: object) -> None:
        self.switch.close()

    def __getitem__(self, name: str) -> Machine:
        return self.machines[name]

    def __iter__(self) -> Iterator[Machine]:
        return iter(self.machines.values())

    def cut(self, name: str, *others: str) -> None:
        """What the machine sends, and what is sent to it, is lost; with `others`, only between it and them.

        Neither side is notified, as where a switch fails, or a firewall drops.
        """
        if not others:
            self.switch.ip(f"link set {name} nomaster")
        for here, there in [pair for other in others for pair in ((name, other), (other, name))]:
            self[here].ip(f"neigh replace {self[there].address} lladdr {NOWHERE} dev eth0")

    def restore(self, name: str) -> None:
        """The machine's link is whole and fast again, to all machines."""
        if name in self.relays:
            relay = self.relays.pop(name)
            relay.kill()
            relay.wait(LIMIT)
            self.switch.ip(f"link del slow-{name}")
        self.switch.ip(f"link set {name} master lan")
        for other in [one for one in self if one.pid and one.name != name]:
            self[name].ip(f"neigh flush to {other.address} nud all")
            other.ip(f"neigh flush to {self[name].address} nud all")

    def slow(self, name: str, delay_ms: float = 0.0, megabits: float = 0.0) -> None:
        """Each packet from and to the machine is delayed; `megabits` per second pass in each direction (0: any number).

        A program delays them, since kernels lack `tc netem`.
        """
        self.restore(name)
        self.relays[name] = self.switch.popen([sys.executable, "-IS", str(RELAY), name, str(delay_ms), str(megabits)])
        first_line(self.relays[name])
        self.switch.ip(f"link add slow-{name} type bridge", f"link set slow-{name} up")
        for port, bridge in ((f"{name}-in", f"slow-{name}"), (f"{name}-out", "lan"), (name, f"slow-{name}")):
            self.switch.ip(f"link set {port} master {bridge}", f"link set {port} up")


def first_line(process: subprocess.Popen[Any], given: str = "") -> str:
    """The first line that a program prints, which says that it is ready. RuntimeError if it ends before that."""
    if given:
        process.stdin.write(given)
        process.stdin.close()
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args} ended with {process.wait(LIMIT)}")
    return line.strip()


def _ip(pid: int, lines: Sequence[str]) -> None:
    command = ["nsenter", f"--target={pid}", "--net", "ip", "-batch", "-"]
    done = subprocess.run(command, input="\n".join(lines), text=True, capture_output=True, check=False)
    assert done.returncode == 0, f"ip: {lines}: {done.stderr}"


def _new(*kinds: str) -> list[str]:
    """Options of `unshare` for namespaces of these kinds."""
    return [f"--{kind}" for kind in kinds] + ["--fork"]


def _home() -> str:
    return pwd.getpwuid(0).pw_dir
