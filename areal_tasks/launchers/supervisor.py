"""Owns the services of a run: starts them, finds where they listen, restarts what failed, stops everything."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from areal_tasks.engines.service import STORE_AWAY, ServiceSpec
from areal_tasks.launchers.advice import advice
from areal_tasks.launchers.inline import InlineLauncher
from areal_tasks.launchers.local import LocalLauncher
from areal_tasks.launchers.protocol import Handle, Job, Launcher
from areal_tasks.store.backend import Missing, Store, Unavailable
from areal_tasks.store.commit import read_record
from areal_tasks.store.parallel import parallel
from areal_tasks.store.paths import service as service_path
from schemas.errors import UserError
from schemas.manifest import ServiceRecord, WeightsRef
from schemas.recipe.sections import Launcher as LauncherSettings

log = logging.getLogger(__name__)

LAUNCHERS: dict[str, type[LocalLauncher] | type[InlineLauncher]] = {"local": LocalLauncher, "inline": InlineLauncher}
POLL_SECONDS = 0.05
LOG_LINES = 20
SEARCHED_LINES = 2000


@dataclass
class Service:
    """A service under supervision: what was asked for, what runs now, and where it listens once it is ready."""

    job: Job
    handle: Handle
    url: str = ""
    failures: int = 0  # since something came of its work
    reason: str = ""  # why it was ended


class ServiceFailed(UserError):
    """A service ended or did not become ready; the message shows the last lines of its log."""


class Supervisor:
    """Starts services through the recipe's launcher. Use as a context: leaving it stops everything it started."""

    def __init__(self, store: Store, settings: LauncherSettings, logs: Path) -> None:
        self.store = store
        self.settings = settings
        self.logs = logs
        self.token = secrets.token_urlsafe(32)
        self.launcher: Launcher = LAUNCHERS[settings.type]()
        self.services: dict[str, Service] = {}
        self._healing = threading.Lock()  # stages that run side by side both look after the services

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *error: object) -> None:
        with ExitStack() as stack:
            stack.callback(self.launcher.close)  # ends, by itself, what could not be stopped
            parallel(lambda service: service.handle.stop(), list(self.services.values()))

    def start(self, module: str, spec: ServiceSpec, threads: int = 0) -> None:
        """Start a service; `wait` tells when it is ready."""
        job = Job(module, spec, self.token, self._log(spec), threads)
        self.services[spec.name] = Service(job, self.launcher.start(job))

    def wait(self, names: Sequence[str]) -> list[str]:
        """The addresses of the services, once all are registered. Raises ServiceFailed with the log's last lines."""
        deadline = time.monotonic() + self.settings.startup_seconds
        return [self._address(self.services[name], deadline) for name in names]

    def starting(self, names: Sequence[str]) -> dict[str, Path]:
        """Those of these services that are not ready yet, and their logs."""
        services = [self.services[name] for name in names]
        return {service.job.spec.name: service.job.log for service in services if not service.url}

    def name_at(self, url: str) -> str:
        """The name of the service that listens at `url`; the address itself where it is nobody's."""
        return next((name for name, service in self.services.items() if service.url == url), url)

    def restarts(self, url: str) -> int:
        """How often the service that listens at `url` was started again; 0 where it is nobody's."""
        return next((service.job.spec.restart for service in self.services.values() if service.url == url), 0)

    def heal(self, weights: WeightsRef | None = None) -> None:
        """Restart every service that has ended, on `weights` if given. Their addresses change: see `wait`."""
        with self._healing:
            for service in self.services.values():
                if service.handle.exit_code() is not None:
                    self._restart(service, weights)

    def progressed(self) -> None:
        """Something has come of the work of the services that run: their failures before do not count any more."""
        for service in self.services.values():
            if service.handle.exit_code() is None:
                service.failures = 0

    def end(self, urls: Collection[str], why: str = "does not answer", grace_seconds: float = 5.0) -> None:
        """Stop the services that listen at `urls`: they run but are of no use. `heal` starts them again."""
        with self._healing:
            for service in self.services.values():
                if service.url in urls:
                    log.warning("service %s at %s: %s; ending it", service.job.spec.name, service.url, why)
                    service.reason = f"{why}\n"
                    service.handle.stop(grace_seconds)

    def end_hung(self, name: str, why: str) -> None:
        """Kill a service that hangs: whoever waits for it sees its connection break, and has it started again.

        One that has ended already, or is starting, is left to whoever does so.
        """
        service = self.services.get(name)
        if service is not None and service.url and service.handle.exit_code() is None:
            self.end([service.url], why, grace_seconds=0.0)

    def _restart(self, service: Service, weights: WeightsRef | None) -> None:
        spec = service.job.spec
        if service.failures >= self.settings.restarts:
            raise ServiceFailed(
                f"service {spec.name!r} failed {service.failures + 1} times; launcher.restarts allows no more.\n"
                f"{service.reason}{self._tail(service)}"
            )
        log.warning("service %s ended with %s; starting it again", spec.name, service.handle.exit_code())
        service.handle.stop()
        time.sleep(min(30.0, 0.5 * 2**service.failures))
        service.failures += 1
        renewed = spec.model_copy(update={"restart": spec.restart + 1, "weights": weights or spec.weights})
        service.job = replace(service.job, spec=renewed, log=self._log(renewed))
        service.handle, service.url, service.reason = self.launcher.start(service.job), "", ""

    def _address(self, service: Service, deadline: float) -> str:
        spec = service.job.spec
        path = service_path(spec.run, spec.owner, spec.name, spec.restart)
        while not service.url:
            try:
                service.url = read_record(self.store, path, ServiceRecord).url
            except Missing:
                self._check_starting(service, deadline)
                time.sleep(POLL_SECONDS)
        return service.url

    def _check_starting(self, service: Service, deadline: float) -> None:
        code, name = service.handle.exit_code(), service.job.spec.name
        if code == STORE_AWAY:
            raise Unavailable(f"service {name!r} could not start: the store was away.")
        if code is not None:
            raise ServiceFailed(f"service {name!r} ended with {code} while starting.\n{self._tail(service)}")
        if time.monotonic() > deadline:
            limit = f"launcher.startup_seconds = {self.settings.startup_seconds:g}"
            raise ServiceFailed(f"service {name!r} was not ready within {limit}.\n{self._tail(service)}")

    def _log(self, spec: ServiceSpec) -> Path:
        return self.logs / spec.run / f"{spec.name}-{spec.owner}-{spec.restart}.log"

    def _tail(self, service: Service) -> str:
        """The log's last lines, then what can be done about the failure where the log tells its kind."""
        path = service.job.log
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        shown = [f"Last lines of {path}:", *(f"  {line}" for line in lines[-LOG_LINES:] or ["(nothing was written)"])]
        remedy = advice(service.job.spec.name, "\n".join(lines[-SEARCHED_LINES:]))
        return "\n".join([*shown, remedy] if remedy else shown)
