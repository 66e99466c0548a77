"""Owns the services of a run: starts them, finds their addresses, restarts those that failed, stops all."""

from __future__ import annotations

import logging
import secrets
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial, partialmethod
from pathlib import Path

from areal_tasks.engines.access import Access
from areal_tasks.engines.service import UNAVAILABLE, ServiceSpec, registered
from areal_tasks.launchers.advice import advice
from areal_tasks.launchers.choice import make_launcher
from areal_tasks.launchers.cluster import ANY, PREEMPTED, Resources
from areal_tasks.launchers.protocol import Handle, Job, Starting
from areal_tasks.store.backend import Store, Unavailable
from areal_tasks.store.parallel import in_background, parallel
from areal_tasks.store.service_logs import KEPT_BYTES, LogName
from schemas.errors import UserError
from schemas.manifest import WeightsRef
from schemas.recipe.launcher import Launcher as LauncherSettings

log = logging.getLogger(__name__)

#: Gives the starts of services whose end does not count as a failure: (address, number of the start).
Explained = Callable[[], Collection[tuple[str, int]]]
POLL_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 30.0
EXCUSED = (UNAVAILABLE, PREEMPTED)  # exit codes that do not count as a failure
CLOSED = "the run has ended: its services are stopped"
LOG_LINES = 20
SEARCHED_LINES = 2000


@dataclass(frozen=True)
class Ready:
    """A service that runs: its address, the number of its start, and the weights it was started on."""

    url: str
    restart: int = 0
    weights: WeightsRef | None = None


@dataclass
class Service:
    """A supervised service: its job, its process, and its address once it is ready."""

    job: Job
    handle: Handle
    submitted: float = field(default_factory=time.monotonic)
    started: float = field(default_factory=time.monotonic)  # or seen to wait for a machine
    url: str = ""
    failures: int = 0  # since the run last progressed; excused ends do not count
    reason: str = ""  # why it was ended, or could not be started
    logged: bool = False  # the log says that it is not restarted any more
    restart_at: float | None = None  # when it is restarted, after it has ended
    excused: bool = False  # its end does not count as a failure
    group: str = ""  # the services of a group are ended and restarted at the same time
    ended_with_group: bool = False  # it was ended because another of its group had ended
    stopped: Future[None] | None = None  # done once nothing of it is left; None: it is not to be stopped
    joins: bool = False  # it joined a running run: a failure of its first start counts as one of any later start

    @property
    def needed(self) -> bool:
        """Whether this is its first start, without which the run cannot begin."""
        return not (self.spec.restart or self.joins)

    @property
    def spec(self) -> ServiceSpec:
        """The specification of its last start."""
        return self.job.spec

    @property
    def ready(self) -> Ready | None:
        if self.handle.exit_code() is not None or self.stopped is not None or not self.url:
            return None
        return Ready(self.url, self.spec.restart, self.spec.weights)


class ServiceFailed(UserError):
    """A service ended or did not become ready; the message shows the last lines of its log."""


class Supervisor:
    """Starts services through the recipe's launcher. Use as a context: leaving it stops everything it started."""

    def __init__(self, store: Store, settings: LauncherSettings, logs: Path) -> None:
        self.store = store
        self.settings = settings
        self.logs = logs
        self.token = secrets.token_urlsafe(32)
        self.launcher = make_launcher(settings, store)
        self.services: dict[str, Service] = {}
        self._unused = 0  # the lowest number that is higher than those of all starts of retired services
        self._lock = threading.Lock()  # stages that run concurrently supervise the same services
        self._closed = False  # nothing is started any more: a thread of the run may still ask for it

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *error: object) -> None:
        with ExitStack() as stack:
            stack.callback(self.launcher.close)  # ends services that could not be stopped
            with self._lock:
                self._closed, services = True, list(self.services.values())
            parallel(lambda service: service.handle.stop(), services, len(services))  # each may take LONGEST_START

    @property
    def access(self) -> Access:
        return Access(self.token, self.launcher.authority)

    def start(
        self,
        module: str,
        spec: ServiceSpec,
        threads: int = 0,
        resources: Resources = ANY,
        group: str = "",
        joins: bool = False,
    ) -> None:
        """Start a service, without waiting until it is ready: see `wait`. If one service of a `group` ends, all end.

        `joins`: others run already. A failure of its first start then counts as one of any later start.
        """
        if joins:
            with self._lock:  # those of a group meet under one number, though another service may be retired meanwhile
                numbers = [one.spec.restart for one in self.services.values() if group and one.group == group]
                spec = spec.model_copy(update={"restart": numbers[0] if numbers else self._unused})
        job = Job(module, spec, self.token, self._log(spec), threads, resources)
        handle = self._begun(job) if joins else self.launcher.start(job)
        with self._lock:
            self.services[spec.name] = Service(job, handle, group=group, joins=joins)
            late = self._closed
        if late:
            handle.stop()
            raise ServiceFailed(CLOSED)

    join = partialmethod(start, joins=True)

    def retire(self, name: str) -> None:
        """Stop a service, and its group, for good. Others of these names may join later."""
        with self._lock:
            members = self.members(name)
            for one in members:
                del self.services[one.spec.name]
                self._unused = max(self._unused, one.spec.restart + 1)
        parallel(lambda one: one.handle.stop(), members, len(members))

    def began_on(self, name: str, weights: WeightsRef | None) -> None:
        """Record the weights, now in the store, that a service and its group began on before they were there."""
        for service in self.members(name):
            service.job = replace(service.job, spec=service.spec.model_copy(update={"weights": weights}))

    def wait(self, names: Sequence[str], weights: WeightsRef | None = None) -> list[str]:
        """The addresses of the ready services, once each is ready or given up. Otherwise as `poll`."""
        while True:
            ready = self.poll(names, weights)
            if len(ready) == sum(not self._given_up(self.services[name]) for name in names):
                return [found.url for found in ready]
            time.sleep(POLL_SECONDS)

    def poll(
        self, names: Collection[str], weights: WeightsRef | None = None, explained: Explained = lambda: ()
    ) -> list[Ready]:
        """The services that are ready. One of their groups that has ended is restarted after a pause. Does not wait.

        Servers are restarted on `weights`, if given. A service that has failed too often is given up, which is logged;
        an end that is `explained` does not count as a failure.

        Raises:
            ServiceFailed: one was not ready after its first start, or all of them are given up, with its log's end; or
                this has been left.
            Unavailable: store or cluster do not answer, so one could not start at first, or none of them can now.
        """
        with self._lock:
            if self._closed:
                raise ServiceFailed(CLOSED)
            for service in self.services.values():
                if isinstance(starting := service.handle, Starting):
                    service.handle = starting.started()
                    service.reason = service.reason or starting.why
            self._end_groups()
            wanted, groups = {*names}, {self.services[name].group for name in names} - {""}
            asked = {n: one for n, one in self.services.items() if n in wanted or one.group in groups}
            polled = {name: self._poll_one(one, weights, explained) for name, one in asked.items()}
            found = [polled[name] for name in names]
        failures = [one for one in found if isinstance(one, UserError)]
        if failures and len(failures) == len(names):
            raise failures[0]
        return [one for one in found if isinstance(one, Ready)]

    def members(self, name: str) -> list[Service]:
        """The services of this service's group, itself included."""
        return self._members(self.services[name])

    def ended(self, names: Collection[str]) -> frozenset[tuple[str, int]]:
        """(name, number of the start) of the services that have ended and that `poll` will restart."""
        services = [self.services[name] for name in names]
        over = [s.spec for s in services if s.handle.exit_code() is not None and not self._given_up(s)]
        return frozenset((spec.name, spec.restart) for spec in over)

    def name_at(self, url: str) -> str:
        """The name of the service that listens at `url`; the address itself if there is none."""
        return next((name for name, service in list(self.services.items()) if service.url == url), url)

    def progressed(self) -> None:
        """Reset the failure counts of running services, because the run has progressed."""
        for service in list(self.services.values()):
            if service.handle.exit_code() is None:
                service.failures = 0

    def end(self, urls: Collection[str], why: str = "does not answer", grace_seconds: float = 5.0) -> None:
        """Stop the services that listen at `urls`, since they do not work. `poll` restarts them. Does not wait."""
        with self._lock:
            for service in self.services.values():
                if service.url in urls and service.stopped is None:
                    self._stop(service, why, grace_seconds)

    def end_hung(self, name: str, why: str) -> None:
        """Kill a service that hangs, unless it is starting: its caller sees the connection break, and restarts it."""
        service = self.services.get(name)
        if service is not None and service.url and service.handle.exit_code() is None:
            self.end([service.url], why, grace_seconds=0.0)

    def _end_groups(self) -> None:
        """End the other services of a group if one has ended since the last poll: all restart at the same time."""
        ended = {
            s.group: s for s in self.services.values() if s.restart_at is None and s.handle.exit_code() is not None
        }
        for service in self.services.values():
            runs = service.handle.exit_code() is None and service.stopped is None
            if service.group and service.group in ended and runs:
                service.ended_with_group = True
                self._stop(service, f"{ended[service.group].spec.name} has ended", grace_seconds=0.0)

    def _poll_one(self, service: Service, weights: WeightsRef | None, explained: Explained) -> Ready | UserError | None:
        """The service if it is ready, an error if it failed; None: it is starting."""
        try:
            if service.handle.exit_code() is None and not service.url and service.stopped is None:
                self._find(service)
        except Unavailable as away:
            return away
        runs = service.handle.exit_code() is None
        if runs and service.stopped is None:
            return service.ready
        service.excused = service.excused or (service.url, service.spec.restart) in explained()
        if runs:
            return None
        first = self._first_ended(service)
        if not all(map(_is_over, self._members(service))):
            return None  # how the others end may excuse this end: see `_excused`
        if not service.url and service.needed and not self._preempted(service) and not _is_killed(first):
            raise self._failure(first, f"ended with {first.handle.exit_code()} while starting.")
        if self._given_up(service):
            failure = self._failure(first, f"failed {first.failures + 1} times; launcher.restarts allows no more.")
            if not first.logged:  # once, since other services may continue without it
                log.error("giving up: %s", failure)
                first.logged = True
            return failure
        self._start_again(service, weights)
        return self._failure(service) if service.handle.exit_code() == UNAVAILABLE else None

    def _find(self, service: Service) -> None:
        """Set the address of a service that is ready. One that takes too long is ended; a first start then fails."""
        now, late = time.monotonic(), ""
        if (url := registered(self.store, service.spec)) is not None:
            service.url = url
        elif any(one.handle.waiting() for one in self._members(service)):  # it waits for those of its group
            service.started = now
            if now > service.submitted + self.settings.queue_seconds:
                late = f"was given no machine within launcher.queue_seconds = {self.settings.queue_seconds:g}."
        elif now > service.started + self.settings.startup_seconds:
            late = f"was not ready within launcher.startup_seconds = {self.settings.startup_seconds:g}."
        if late:
            if service.needed:
                raise self._failure(service, late)
            self._stop(service, late, grace_seconds=0.0)

    def _start_again(self, service: Service, weights: WeightsRef | None) -> None:
        """Restart a service that has ended, once its pause and those of its group are over.

        All of a group restart at once, with the same number of the start, by which they find each other.
        """
        if service.restart_at is None:
            code = service.handle.exit_code()
            log.warning("service %s ended with %s; restarting it", service.spec.name, code)
            self._end(service)
            pause = LONGEST_PAUSE_SECONDS if code == UNAVAILABLE else 0.5 * (2**service.failures - 1)
            service.restart_at = time.monotonic() + min(LONGEST_PAUSE_SECONDS, pause)
        members, now = self._members(service), time.monotonic()
        if all(one.restart_at is not None and one.restart_at <= now and _is_stopped(one) for one in members):
            failed = not self._excused(service)
            for one in members:
                one.failures += failed
                self._restart(one, weights)

    def _restart(self, service: Service, weights: WeightsRef | None) -> None:
        spec = service.spec
        renewed = spec.model_copy(update={"restart": spec.restart + 1, "weights": weights or spec.weights})
        service.job = replace(service.job, spec=renewed, log=self._log(renewed))
        service.url, service.reason, service.restart_at, service.excused = "", "", None, False
        service.submitted = service.started = time.monotonic()
        service.ended_with_group, service.stopped = False, None
        service.handle = self._begun(service.job)

    def _begun(self, job: Job) -> Handle:
        """Start a service in the background: others are polled, ended and started meanwhile."""
        return Starting(partial(self.launcher.start, job), job.spec.name)

    def _members(self, service: Service) -> list[Service]:
        """The services of its group, or the service alone."""
        return [one for one in self.services.values() if one is service or (one.group and one.group == service.group)]

    def _given_up(self, service: Service) -> bool:
        """Whether it, or one of its group, has failed too often."""
        return any(
            one.handle.exit_code() is not None and one.failures >= self.settings.restarts and not self._excused(one)
            for one in self._members(service)
        )

    def _excused(self, service: Service) -> bool:
        """Whether the end of a service, or of the one with which its group's end began, is excused."""
        first = self._first_ended(service)
        return first.excused or first.handle.exit_code() in EXCUSED or self._preempted(service)

    def _preempted(self, service: Service) -> bool:
        """Whether one of its group was preempted. Others may fail for it before the cluster system says so."""
        return any(one.handle.exit_code() == PREEMPTED for one in self._members(service))

    def _first_ended(self, service: Service) -> Service:
        """The service of its group that ended first and had the others ended; the service itself without a group."""
        members = self._members(service)
        return next(
            (one for one in members if one.handle.exit_code() is not None and not one.ended_with_group), service
        )

    def _failure(self, service: Service, what: str = "") -> UserError:
        """The error that ends the run: what happened, why the service was ended if it was, and the end of its log."""
        name = service.spec.name
        if service.handle.exit_code() == UNAVAILABLE:
            return Unavailable(
                f"service {name!r} could not start: {service.reason or 'the store did not answer.'}".strip()
            )
        return ServiceFailed(f"service {name!r} {what}\n{service.reason}{self._tail(service)}")

    def _stop(self, service: Service, why: str, grace_seconds: float) -> None:
        log.warning("service %s at %s: %s; ending it", service.spec.name, service.url or "its start", why)
        service.reason = f"{why}\n"
        self._end(service, grace_seconds)

    def _end(self, service: Service, grace_seconds: float = 5.0) -> None:
        """End what is left of a service, in the background: a machine that does not answer takes long."""
        if service.stopped is None:
            stop = partial(service.handle.stop, grace_seconds)
            service.stopped = in_background(stop, f"stop-{service.spec.name}")

    def _log(self, spec: ServiceSpec) -> Path:
        return self.logs / spec.run / LogName(spec.name, spec.owner, spec.restart).file

    def _tail(self, service: Service) -> str:
        """The log's last lines, followed by advice if the log shows the kind of failure."""
        path, lines = service.job.log, list[str]()
        if path.exists():
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - KEPT_BYTES))  # `rotate` leaves so much on this machine
                lines = file.read().decode(errors="replace").splitlines()
        shown = [f"Last lines of {path}:", *(f"  {line}" for line in lines[-LOG_LINES:] or ["(nothing was written)"])]
        remedy = advice(service.spec.name, "\n".join(lines[-SEARCHED_LINES:]))
        return "\n".join([*shown, remedy] if remedy else shown)


def _is_over(service: Service) -> bool:
    """Whether the service has ended, or all was done that ends it."""
    return service.handle.exit_code() is not None or (service.stopped is not None and service.stopped.done())


def _is_killed(service: Service) -> bool:
    """Whether a signal ended it, by its own status or that of a program for which it stands: it can say nothing."""
    code = service.handle.exit_code()
    return code is not None and (code < 0 or 128 < code < 128 + signal.NSIG)


def _is_stopped(service: Service) -> bool:
    """Whether the service has been stopped completely. Raises what stopping it raised."""
    return service.stopped is not None and service.stopped.done() and service.stopped.result() is None
