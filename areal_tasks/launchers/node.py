"""The node agent: the process that a cluster system starts on a machine, for one start of one service.

It makes a key, records its address in the store, and waits for the flow, which authenticates itself by a certificate of
its authority. The flow sends the token and a certificate, and from then on renews a lease: if it does not, the agent
ends the service (a rollout worker first writes its finished groups). The service has a lifeline to the agent, so that
it ends with it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
import ssl
import sys
import threading
import time
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from ipaddress import ip_address, ip_network
from pathlib import Path
from platform import python_version
from typing import Final

import uvicorn
from pydantic import ConfigDict, Field
from starlette.applications import Starlette

from areal_tasks.engines.ports import listen, url_host
from areal_tasks.engines.service import Handlers, ServiceSpec, as_service, exit_at_sigterm, routes_of, uvicorn_server
from areal_tasks.engines.tls import AUTHORITY, Identity
from areal_tasks.launchers.cluster import PREEMPTED
from areal_tasks.launchers.gpus import visible_gpus
from areal_tasks.launchers.local import LocalHandle, LocalLauncher
from areal_tasks.launchers.protocol import Job
from areal_tasks.launchers.usage import Usage
from areal_tasks.store.backend import Exists, open_store
from areal_tasks.store.paths import node as node_path
from areal_tasks.store.service_logs import rotate
from areal_tasks.temporary import OwnedFolder
from schemas.errors import UserError
from schemas.manifest import NodeRecord
from schemas.record import Record

log = logging.getLogger(__name__)

POLL_SECONDS: Final = 0.1
LOG_BYTES: Final = 1 << 18  # of a service's log in one answer
FLUSH_SECONDS: Final = 70.0  # for a rollout worker to write its finished groups; its own limit is shorter
JOB: Final = "AREAL_NODE_JOB"
#: Packages whose versions affect the results of a service or the format of its messages.
PACKAGES: Final = (
    *("torch", "transformers", "tokenizers", "numpy", "pyarrow", "pydantic", "sglang", "deepspeed"),
    *("math-verify", "latex2sympy2-extended", "sympy"),  # verdicts
)


class NodeJob(Record):
    """What the cluster system passes to an agent at its start. Contains no secret."""

    module: str
    spec: ServiceSpec
    threads: int
    authority: str = Field(description="the flow's certificate: the agent answers only holders of one that it signed")
    network: str = Field(description="see `launcher.network`")
    lease_seconds: float


class Start(Record):
    """/start: start the service, unless it has been started."""

    token: str = Field(repr=False)
    certificate: str = Field(description="for the agent's key, by the flow's authority")


class Poll(Record):
    """/poll: renew the lease. Answered when the service ends or logs something, else after `seconds`."""

    seconds: float
    log_from: int = Field(description="the position in the service's log from which it is returned")


class State(Record):
    """Answer to /poll: the next part of the log, and after the last part the exit code of a service that has ended."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    exit_code: int | None
    log: bytes
    usage: Usage | None = Field(description="the service's use of CPU, memory and GPUs, while it runs")


class Stop(Record):
    """/stop: end the service, and then the agent."""

    grace_seconds: float


@cache
def software() -> dict[str, str]:
    """The software that all machines of a run must share: digest of the code, versions of Python and packages."""
    return {"arealflow": _code_digest(), "python": python_version(), **{name: _version(name) for name in PACKAGES}}


def difference(mine: dict[str, str], theirs: dict[str, str]) -> str:
    """The differences of another machine's software from this one's, as text; empty if there are none."""
    names = [name for name in mine if mine[name] != theirs.get(name)]
    return ", ".join(f"{name} {theirs.get(name) or 'none'} instead of {mine[name] or 'none'}" for name in names)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _code_digest() -> str:
    """A digest of this program's files: a checkout may be changed without a change of version."""
    root = Path(__file__).resolve().parents[2]
    files = sorted(path for room in ("areal_tasks", "schemas") for path in (root / room).rglob("*.py"))
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


# ── the process ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Agent:
    """One service on this machine, and the lease on it."""

    def __init__(self, job: NodeJob, identity: Identity, address: str, folder: Path) -> None:
        self.job = job
        self.address = address
        self.stopped = False  # the flow has stopped the service, or knows that it has ended
        self.released = False  # this process has been asked to end, or its lease is over
        self.identity = identity
        self.folder = folder
        self._log = folder / "service.log"
        self._written = os.open(self._log, os.O_RDONLY | os.O_CREAT, 0o600)  # read while the folder is removed, too
        self._launcher = LocalLauncher()
        self._handle: LocalHandle | None = None
        self._lock = threading.Lock()
        self._renewed = time.monotonic()
        self._usage: Usage | None = None
        self._measuring: asyncio.Task[None] | None = None

    @property
    def lost(self) -> bool:
        return time.monotonic() > self._renewed + self.job.lease_seconds

    def start(self, order: Start) -> None:
        """Start the service, unless it has been started, or the lease is over."""
        with self._lock:
            if self._handle is None and not self.lost:
                self.identity.write(self.folder, order.certificate, self.job.authority)
                spec = self.job.spec.model_copy(update={"address": self.address, "tls": str(self.folder)})
                self._handle = self._launcher.start(
                    Job(self.job.module, spec, order.token, self._log, self.job.threads)
                )
                if "CUDA_VISIBLE_DEVICES" in os.environ:  # by the cluster system, to this process and its service
                    self._handle.gpus = visible_gpus()

    async def poll(self, order: Poll) -> State:
        """Renew the lease; wait for the service's end or log. The flow has the log up to the position that it names."""
        if not self.lost:  # the request may have waited while this process, or its machine, was stopped
            self._renewed = time.monotonic()
        if not self.released:
            rotate(self._log, order.log_from)
        if self._handle is not None and (self._measuring is None or self._measuring.done()):
            # in the background: the lease must not wait for an `nvidia-smi` that hangs
            self._measuring = asyncio.ensure_future(self._measure(self._handle))
        until = time.monotonic() + order.seconds
        while (state := self._state(order.log_from)).exit_code is None and not state.log and time.monotonic() < until:
            await asyncio.sleep(POLL_SECONDS)
        return state

    def _state(self, log_from: int) -> State:
        """The part of the log from this position on; with the last part the exit code.

        If the service has ended because this process was asked to end, no exit code is reported: the cluster system
        knows why, and whether that is a failure.
        """
        found = self._exit_code()  # read before the log, which is complete after the end
        code = None if self.released else found
        part = os.pread(self._written, LOG_BYTES, log_from)
        return State(exit_code=code if len(part) < LOG_BYTES else None, log=part, usage=self._usage)

    async def _measure(self, handle: LocalHandle) -> None:
        self._usage = await asyncio.to_thread(handle.usage)

    def stop(self, order: Stop) -> None:
        """End the service, and then the agent. An error if this process was asked to end: see `_state`."""
        with self._lock:
            if self._handle is not None:
                self._handle.stop(order.grace_seconds)
        self.stopped = True
        if self.released:
            raise InterruptedError("the cluster system, or the end of the lease, ends this service")

    def release(self) -> None:
        """End the service through its lifeline, as if the flow had ended."""
        self.released = True
        self._launcher.close()
        if self._handle is not None:
            until = time.monotonic() + FLUSH_SECONDS
            while self._handle.exit_code() is None and time.monotonic() < until:
                time.sleep(POLL_SECONDS)
            self._handle.stop(0.0)

    def _exit_code(self) -> int | None:
        return self._handle.exit_code() if self._handle is not None else None

    def app(self) -> Starlette:
        """The HTTP API: /start, /poll and /stop."""
        handlers: Handlers = {
            "start": (lambda order: asyncio.to_thread(self.start, order), Start),
            "poll": (self.poll, Poll),
            "stop": (lambda order: asyncio.to_thread(self.stop, order), Stop),
        }
        return Starlette(routes=routes_of(handlers, lambda error: 500))


def address_in(network: str) -> str:
    """This machine's address in a network (`10.0.0.0/24`, or the address itself). UserError if it has none."""
    wanted = ip_network(network, strict=False)
    family = socket.AF_INET if wanted.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((str(wanted.network_address + (1 if wanted.num_addresses > 1 else 0)), 9))  # sends nothing
            found = str(probe.getsockname()[0])
        except OSError:
            found = ""
    if not found or ip_address(found) not in wanted:
        where = f"; towards it, its address is {found}" if found else ""
        raise UserError(f"launcher.network: {socket.gethostname()} has no address in {network}{where}")
    return found


def serve(agent: Agent, listener: socket.socket) -> uvicorn.Server:
    """The agent's server, in a thread. It answers only clients with a certificate of the flow's authority."""
    (folder := agent.folder / "agent").mkdir()
    agent.identity.write(folder, agent.identity.certificate, agent.job.authority)
    only = {"ssl_ca_certs": str(folder / AUTHORITY), "ssl_cert_reqs": ssl.CERT_REQUIRED}
    server = uvicorn_server(agent.app(), str(folder), **only)
    threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="agent", daemon=True).start()
    return server


def run(folder: Path, job: NodeJob) -> int:
    """Serve until the service has ended and the flow knows, or the flow is lost; returns an exit code.

    `folder`: for keys and the service's log; only this user can read it.
    """
    spec, address = job.spec, address_in(job.network)
    identity = Identity(f"{socket.gethostname()} {spec.name}", address)
    agent, listener = Agent(job, identity, address, folder), listen(address)
    record = NodeRecord(
        url=f"https://{url_host(address)}:{listener.getsockname()[1]}",
        host=socket.gethostname(),
        pid=os.getpid(),
        certificate=identity.certificate,
        software=software(),
    )
    server, path = serve(agent, listener), node_path(spec.run, spec.owner, spec.name, spec.restart)
    try:
        open_store(spec.store_url).create(path, record.encode(path))
    except Exists:
        log.error("this start of %s has run already, and the cluster system has started it again: ending", spec.name)
        return PREEMPTED
    exit_at_sigterm()
    try:
        while not agent.stopped and not agent.lost:
            time.sleep(POLL_SECONDS)
        if agent.lost:
            log.error("the flow has not renewed its lease for %g s: ending", job.lease_seconds)
    finally:
        agent.release()
        server.should_exit = True
    return 0


def main() -> None:
    """Serve the job that the environment describes, in a folder of its own; exits with the code of `run`."""
    with as_service():
        job = NodeJob.model_validate_json(os.environ.pop(JOB))
        with OwnedFolder(f"node-{job.spec.name}") as folder:
            code = run(Path(folder), job)
    sys.exit(code)


if __name__ == "__main__":
    main()
