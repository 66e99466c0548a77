"""Services on machines of a cluster, each behind a node agent: the flow's half of their leases.

The flow finds an agent by its record in the store, starts the service through it, and renews the lease with each
poll of the service. What the agent reports of the service's log is appended to the log here. A service whose
agent has not answered for `launcher.lease_seconds` counts as ended; by then the agent ends it, or has.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import aiohttp
from pydantic import BaseModel

from areal_tasks.engines.loop_thread import LoopThread
from areal_tasks.engines.tls import Identity, Trust, mutual_tls
from areal_tasks.launchers.cluster import LOST, PREEMPTED, Cluster, Submitted, Task
from areal_tasks.launchers.node import JOB, NodeJob, Poll, Start, State, Stop, difference, software
from areal_tasks.launchers.protocol import Job
from areal_tasks.launchers.usage import Usage
from areal_tasks.store.backend import Missing, Store, Unavailable
from areal_tasks.store.commit import read_record
from areal_tasks.store.paths import node as node_path
from areal_tasks.store.service_logs import LogName
from schemas.manifest import NodeRecord
from schemas.recipe.launcher import Launcher as Settings

log = logging.getLogger(__name__)

#: Without -P it would import modules of the folder that it is started in, such as /tmp, where every user may put some.
AGENT: Final = (sys.executable, "-P", "-m", "areal_tasks.launchers.node")
FIND_SECONDS: Final = 0.3  # between two checks for an agent's record
ANSWER_SECONDS: Final = 5.0  # an agent answers after so long if the service runs and logs nothing
RETRY_SECONDS: Final = 0.5
CONNECT_SECONDS: Final = 5.0
VERDICT_SECONDS: Final = 10.0  # for the cluster system to say why a task has ended, at which Slurm is asked twice


class RemoteHandle:
    """A service on another machine."""

    def __init__(self, job: Job, submitted: Submitted, launcher: RemoteLauncher) -> None:
        self._job = job
        self._submitted = submitted
        self._launcher = launcher
        self._code: int | None = None
        self._node: NodeRecord | None = None
        self._trust: Trust = True
        self._ran = False  # as the cluster system has reported
        self._read = 0  # bytes of the service's log that have been fetched
        self._usage: Usage | None = None  # as the agent last reported it
        self._leasing = launcher.loop.submit(self._hold_lease())

    def exit_code(self) -> int | None:
        return self._code

    def waiting(self) -> str:
        return "" if self._node is not None else self._submitted.waiting()

    def usage(self) -> Usage | None:
        return self._usage if self._code is None else None

    def stop(self, grace_seconds: float = 5.0) -> None:
        """End the service through its agent, then its task; a lost machine counts as stopped."""
        self._leasing.cancel()
        taken = False
        if self._node is not None and self._code is None:
            order = Stop(grace_seconds=grace_seconds)
            try:
                self._launcher.loop.run(self._ask("stop", order, grace_seconds + CONNECT_SECONDS))
            except TimeoutError:
                log.warning("the machine of service %s does not answer", self._job.spec.name)
            except (aiohttp.ClientError, OSError):
                taken = self._is_taken()
        self._submitted.cancel()
        if self._code is None:
            self._code = PREEMPTED if taken else LOST

    def _is_taken(self) -> bool:
        """Whether its agent is gone, or ends, since the cluster system has preempted the task; it may say so later."""
        until = time.monotonic() + VERDICT_SECONDS
        while (code := self._submitted.exit_code()) is None and not self._waits_again() and time.monotonic() < until:
            time.sleep(RETRY_SECONDS)
        return code == PREEMPTED or self._waits_again()

    async def _hold_lease(self) -> None:
        """Start the service through its agent, and keep its lease until it ends."""
        try:
            code = await self._start()
            self._code = await self._renew() if code is None else code
        except Exception as error:
            log.exception("the lease of service %s is no longer renewed", self._job.spec.name)
            self._code = os.EX_SOFTWARE  # set first: writing to the log may fail, too
            self._note(f"{type(error).__name__}: {error}")

    async def _start(self) -> int | None:
        """Start the service once its agent is found. Returns an exit code if that fails."""
        while (found := await asyncio.to_thread(self._find)) is None:
            if (code := self._submitted.exit_code()) is not None:
                output = self._launcher.output(self._job)
                self._append(output.read_bytes() if output.exists() else b"")
                self._note(f"its task ended with {code} before it was ready")
                return code or LOST
            await asyncio.sleep(FIND_SECONDS)
        own = await asyncio.to_thread(software)  # reads files, while other leases must be renewed
        if differs := difference(own, found.software):
            self._note(f"the machine {found.host} has other software than {socket.gethostname()}: {differs}")
            return os.EX_CONFIG
        self._node = found
        self._trust = mutual_tls(found.certificate, self._launcher.flow_identity, self._launcher.flow_certificate)
        address = found.url.removeprefix("https://").rpartition(":")[0].strip("[]")
        order = Start(token=self._job.token, certificate=self._launcher.identity.sign(found.certificate, address))
        log.info("service %s starts on %s", self._job.spec.name, found.host)
        return None if await self._ask_within_lease("start", order) is not None else self._silent()

    async def _renew(self) -> int:
        """The service's exit code, once it has ended or its agent has been silent for too long."""
        while True:
            answer = await self._ask_within_lease("poll", Poll(seconds=ANSWER_SECONDS, log_from=self._read))
            if answer is None:
                return self._silent()
            self._ran = self._ran or not self._submitted.waiting()
            state = State.model_validate_json(answer)
            self._append(state.log)
            self._read, self._usage = self._read + len(state.log), state.usage
            if state.exit_code is not None:
                return state.exit_code

    async def _ask_within_lease(self, what: str, order: BaseModel) -> bytes | None:
        """The agent's answer; None if there is none until the lease is over, or its task has ended or waits again."""
        until = time.monotonic() + self._launcher.settings.lease_seconds
        while time.monotonic() < until:
            with suppress(aiohttp.ClientError, TimeoutError, OSError):
                return await self._ask(what, order, CONNECT_SECONDS + ANSWER_SECONDS)
            if self._submitted.exit_code() is not None or self._waits_again():
                return None
            await asyncio.sleep(RETRY_SECONDS)
        return None

    def _waits_again(self) -> bool:
        """Whether the cluster system has preempted the task, and will run it again."""
        self._ran = self._ran or not self._submitted.waiting()
        return self._ran and bool(self._submitted.waiting())

    def _silent(self) -> int:
        """The exit code of a service whose agent no longer answers."""
        assert self._node is not None
        code, waits = self._submitted.exit_code(), self._waits_again()
        if code is not None:
            why = f"its task has ended with {code}"
        elif waits:
            why = f"its task waits again: {self._submitted.waiting()}"
        else:
            why = f"its lease of {self._launcher.settings.lease_seconds:g} s is over"
        self._note(f"the agent on {self._node.host} no longer answers; {why}")
        return PREEMPTED if waits or code == PREEMPTED else LOST

    async def _ask(self, what: str, order: BaseModel, seconds: float) -> bytes:
        assert self._node is not None
        timeout = aiohttp.ClientTimeout(seconds, sock_connect=CONNECT_SECONDS)
        where, data = f"{self._node.url}/{what}", order.model_dump_json()
        async with self._launcher.session.post(where, data=data, ssl=self._trust, timeout=timeout) as response:
            response.raise_for_status()
            return await response.read()

    def _find(self) -> NodeRecord | None:
        spec, store = self._job.spec, self._launcher.store
        with suppress(Missing, Unavailable):
            return read_record(store, node_path(spec.run, spec.owner, spec.name, spec.restart), NodeRecord)
        return None

    def _note(self, what: str) -> None:
        """Append to the service's log what the service itself cannot report."""
        self._append(f"{self._job.spec.name}: {what}\n".encode())

    def _append(self, part: bytes) -> None:
        if part:
            with self._job.log.open("ab") as file:
                file.write(part)


class RemoteLauncher:
    """Starts services through a cluster system. `settings`: the recipe's section `launcher`."""

    def __init__(self, cluster: Cluster, settings: Settings, store: Store) -> None:
        self.settings = settings
        self.store = store
        self.identity = Identity("arealflow", authority=True)
        self.flow_identity = Identity("flow")
        self.flow_certificate = self.identity.sign(self.flow_identity.certificate)
        self._cluster = cluster
        self.loop = LoopThread("leases")
        self.session = self.loop.run(self._session())

    @property
    def authority(self) -> str:
        return self.identity.certificate

    def start(self, job: Job) -> RemoteHandle:
        """Submit a task that runs the service's node agent. Errors as of `Cluster.submit`."""
        job.log.parent.mkdir(parents=True, exist_ok=True)
        job.log.touch()
        node_job = NodeJob(
            module=job.module,
            spec=job.spec,
            threads=job.threads,
            authority=self.authority,
            network=self.settings.network,
            lease_seconds=self.settings.lease_seconds,
        )
        path = os.pathsep.join(p for p in sys.path if p)
        task = Task(
            name=f"{job.spec.run}-{job.spec.name}-{job.spec.owner}-{job.spec.restart}",
            command=AGENT,
            environment={JOB: node_job.model_dump_json(), "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            resources=job.resources,
            output=self.output(job),
        )
        return RemoteHandle(job, self._cluster.submit(task), self)

    def output(self, job: Job) -> Path:
        """The file for the output of the agent itself, which has its own name among the logs."""
        spec = job.spec
        return job.log.with_name(LogName(f"{spec.name}.node", spec.owner, spec.restart).file)

    def close(self) -> None:
        self.loop.run(self.session.close())
        self.loop.stop()
        self._cluster.close()

    async def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
