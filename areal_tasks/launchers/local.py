"""Services on this machine: processes, each with a session, a scratch folder and a log file of its own; or threads."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import uvicorn

from areal_tasks.engines.lifeline import LIFELINE, SCRATCH
from areal_tasks.engines.service import SPEC, make_server
from areal_tasks.launchers.protocol import Handle, Job, Launcher
from areal_tasks.launchers.spare import Spares
from areal_tasks.launchers.usage import Usage, machine, measure
from areal_tasks.secret import TOKEN, handed_over, without_secrets
from areal_tasks.temporary import OwnedFolder

#: Where torch keeps compiled code. By default that is below TMPDIR, which is removed with the service.
INDUCTOR_CACHE: Final = "TORCHINDUCTOR_CACHE_DIR"


class InlineHandle(Handle):
    """A service in a thread."""

    def __init__(self, server: uvicorn.Server, thread: threading.Thread) -> None:
        self.server = server
        self.thread = thread

    def exit_code(self) -> int | None:
        return None if self.thread.is_alive() else 1

    def usage(self) -> Usage | None:
        return machine()

    def stop(self, grace_seconds: float = 5.0) -> None:
        self.server.should_exit = True
        self.thread.join(grace_seconds)


class InlineLauncher(Launcher):
    """Starts each service's app in a thread with an event loop of its own."""

    def start(self, job: Job) -> InlineHandle:
        """Start the service in a thread of this process."""
        app = importlib.import_module(f"{job.module}.process").make_app(job.spec)
        server, listener = make_server(app, job.spec, job.token)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name=job.spec.name, daemon=True)
        thread.start()
        return InlineHandle(server, thread)


class LocalHandle(Handle):
    """A service process and its group."""

    def __init__(self, process: subprocess.Popen[bytes], scratch: OwnedFolder, gpus: Sequence[str] = ()) -> None:
        self.process = process
        self.scratch = scratch
        self.gpus = gpus

    def exit_code(self) -> int | None:
        return self.process.poll()

    def usage(self) -> Usage | None:
        return measure(self.process.pid, self.gpus) if self.exit_code() is None else None

    def stop(self, grace_seconds: float = 5.0) -> None:
        """SIGTERM, then SIGKILL after `grace_seconds`, to the process group; removes the scratch folder."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_seconds)
        self._signal(signal.SIGKILL)  # to processes that the service has left in its group
        self.process.wait()
        self.scratch.cleanup()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class LocalLauncher(Launcher):
    """Starts processes that hold the read end of a pipe whose write end only this process has (the lifeline)."""

    def __init__(self, *spares: str) -> None:
        """`spares`: modules of services of which a process waits that has imported them."""
        self.read_end, self.write_end = os.pipe()  # neither is inherited unless passed on
        self.spares = Spares(spares, self.read_end)

    def start(self, job: Job) -> LocalHandle:
        """Start the service's process. Raises OSError."""
        scratch = OwnedFolder(job.spec.name)
        job.log.parent.mkdir(parents=True, exist_ok=True)
        environment = self._environment(job, Path(scratch.name))
        job.log.touch()  # a spare opens it
        spare = self.spares.take(job.module, environment, job.token, scratch.name, job.log)
        with job.log.open("ab") as log, handed_over(**{TOKEN: job.token}) as (secrets, named):
            process = spare or subprocess.Popen(
                [sys.executable, "-m", job.module],
                cwd=scratch.name,
                env=environment | named,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[self.read_end, secrets, scratch.lock],
                start_new_session=True,
            )
        self.spares.started(job.module, environment)
        return LocalHandle(process, scratch, job.spec.gpus)

    def close(self) -> None:
        self.spares.close()
        os.close(self.write_end)
        os.close(self.read_end)

    def _environment(self, job: Job, scratch: Path) -> dict[str, str]:
        threads = str(job.threads or os.cpu_count() or 1)
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(job.spec.gpus)} if job.spec.gpus else {}
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return {
            INDUCTOR_CACHE: str(cache / "arealflow" / "torchinductor"),
            **without_secrets(os.environ),
            **gpus,
            SPEC: job.spec.model_dump_json(),
            LIFELINE: str(self.read_end),
            SCRATCH: str(scratch),
            "TMPDIR": str(scratch),
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads make processes on the same cores up to 10 times slower
            "TOKENIZERS_PARALLELISM": "false",
        }
