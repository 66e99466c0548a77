"""`python -m areal_tasks.launchers.spare MODULE`: has imported a service's modules, and becomes the service on demand.

So a rollout worker that was lost is replaced without the time that its imports take. One line on the standard input,
JSON, has its environment, secrets, folder and log; at end-of-file the spare ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Final

from areal_tasks.garbage import importing
from areal_tasks.secret import TOKEN, keep, keys, without_secrets
from areal_tasks.temporary import LOCK

LATER_SECONDS: Final = 10.0  # after the start of a service its spare imports: the run's own start needs the CPUs more


class Spares:
    """At most one spare of each of these modules, once a service of it has started. `read_end`: of the lifeline."""

    def __init__(self, modules: tuple[str, ...], read_end: int) -> None:
        self.modules, self.read_end = modules, read_end
        self._ready: dict[str, subprocess.Popen[bytes]] = {}
        self._timers: dict[str, threading.Timer] = {}
        self._lock = threading.Lock()

    def started(self, module: str, environment: Mapping[str, str]) -> None:
        """Prepare the next spare of this module soon, with the part of this environment that imports depend on."""
        if module in self.modules:
            timer = threading.Timer(LATER_SECONDS, self.prepare, (module, environment))
            timer.daemon = True
            with self._lock:
                self._timers[module] = timer
            timer.start()

    def prepare(self, module: str, environment: Mapping[str, str]) -> None:
        """Start a spare unless there is one, or this was closed."""
        with self._lock:
            if module in self._timers and module not in self._ready:
                self._ready[module] = subprocess.Popen(
                    [sys.executable, *AS_SPARE, module],
                    env=without_secrets(os.environ) | {n: value for n, value in environment.items() if n in INHERITED},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[self.read_end],
                    start_new_session=True,
                )

    def take(
        self, module: str, environment: Mapping[str, str], token: str, folder: str, log: Path
    ) -> subprocess.Popen[bytes] | None:
        """The process of the spare, which becomes the service now; None if there is none that runs."""
        with self._lock:
            process = self._ready.pop(module, None)
        if process is None or process.poll() is not None or process.stdin is None:
            return None
        secrets = keys() | {TOKEN: token}
        order = {"environment": dict(environment), "secrets": secrets, "folder": folder, "log": str(log.absolute())}
        try:
            with process.stdin as stdin:
                stdin.write(json.dumps(order).encode() + b"\n")
        except OSError:  # it has just ended
            return None
        return process

    def close(self) -> None:
        """End the spares, and start no more."""
        with self._lock:
            timers, self._timers = self._timers, {}
            for timer in timers.values():
                timer.cancel()
            for process in self._ready.values():
                process.kill()
                process.wait()


#: Options of Python for a spare: with -P it imports nothing from the current folder, as the service would not.
AS_SPARE: Final = ("-P", "-m", "areal_tasks.launchers.spare")
#: What a process reads from its environment while it imports.
INHERITED: Final = ("PYTHONPATH", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "TOKENIZERS_PARALLELISM")


def main(module: str) -> None:
    """Import, wait, and become the service."""
    with importing():
        import_module(f"{module}.process")
    if not (line := sys.stdin.readline()):
        return
    order = json.loads(line)
    os.environ.clear()
    os.environ.update(order["environment"])
    keep(order["secrets"])
    os.chdir(order["folder"])
    threading.Thread(target=_own, args=(Path(order["folder"], LOCK),), daemon=True).start()
    log, nothing = os.open(order["log"], os.O_WRONLY | os.O_APPEND), os.open(os.devnull, os.O_RDONLY)
    for descriptor, of in ((0, nothing), (1, log), (2, log)):
        os.dup2(of, descriptor)
    sys.argv = [module]
    runpy.run_module(module, run_name="__main__")


def _own(lock: Path) -> None:
    """Hold the lock of the service's folder as soon as the launcher has ended, which has it till then."""
    with suppress(OSError):
        fcntl.flock(os.open(lock, os.O_RDWR), fcntl.LOCK_EX)


if __name__ == "__main__":
    main(sys.argv[1])
