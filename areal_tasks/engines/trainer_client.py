"""The client of the trainer service: sends small JSON commands that name manifests, and never tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import httpx

from areal_tasks.engines.access import Access
from areal_tasks.engines.server import reason_of
from areal_tasks.engines.trainer.commands import Command, Health
from areal_tasks.engines.watchdog import Heartbeat, Watchdog
from areal_tasks.store.backend import Unavailable
from schemas.errors import UserError
from schemas.record import Record

Answer = TypeVar("Answer", bound=Record)
HEALTH_SECONDS: Final = 5.0  # /health is answered immediately, whatever the trainer is doing


class TrainerDown(Exception):
    """The command failed and may be retried; the trainer never steps twice.

    The trainer did not answer, since it ended or hangs; or it holds another version than the command names (409); or it
    failed internally (another 5xx), for example with a CUDA or NCCL error, and its process must be replaced.
    """


class TrainerClient:
    """A connection to rank 0 of a trainer group, which listens as the service `name`.

    Methods raise TrainerDown for what may be retried, Unavailable if the trainer cannot reach the store, and UserError,
    with the trainer's reason, for what only a person can change: recipe, data, memory, a run that was restarted.

    A command has no time limit while it makes progress: the `watchdog` warns of a trainer without progress and finally
    ends it. `on_broken` is called with the reason if the trainer's process must be replaced.
    """

    def __init__(
        self, name: str, url: str, access: Access, watchdog: Watchdog, on_broken: Callable[[str], object]
    ) -> None:
        timeout = httpx.Timeout(None, connect=10.0)
        self.http = httpx.Client(base_url=url, headers=access.headers, transport=access.transport(), timeout=timeout)
        self.name = name
        self.watchdog = watchdog
        self.on_broken = on_broken

    def run(self, command: Command | None, answer: type[Answer]) -> Answer:
        """The answer to a command (None: /health), during which the watchdog watches the trainer."""
        what = "/health" if command is None else f"/{command.name} of version {command.version}"
        with self.watchdog.waiting(what, lambda: {self.name: self.heartbeat()}, commands=self.name):
            return self._exchange(answer, command)

    def health(self) -> Health:
        return self.run(None, Health)

    def work(self) -> tuple[int, int]:
        """(samples done, samples in all) of the current command; (0, 0) if unknown. Raises nothing."""
        health, _ = self._poll()
        return (health.done, health.of) if health is not None and health.busy else (0, 0)

    def is_free(self, version: int) -> bool:
        """Whether the trainer holds that version and is idle. Raises nothing."""
        health, _ = self._poll()
        return health is not None and health.version == version and not health.busy

    def heartbeat(self) -> Heartbeat:
        """The trainer's progress, for a watchdog."""
        health, error = self._poll()
        if health is None:
            return Heartbeat(None, error)
        progress = health.version, health.step, health.done, health.of, health.stored
        asked = f"; its store has not answered: {health.storing}" if health.storing else ""
        return Heartbeat(progress, f"it answers: {health.done} of {health.of} samples done{asked}")

    def _poll(self) -> tuple[Health | None, str]:
        """The trainer's health, or None and why it is unknown after `HEALTH_SECONDS`."""
        try:
            return self._exchange(Health, timeout=HEALTH_SECONDS), ""
        except (TrainerDown, UserError) as error:
            return None, str(error)

    def close(self) -> None:
        self.http.close()

    def _exchange(self, kind: type[Answer], command: Command | None = None, timeout: float | None = None) -> Answer:
        method, path = ("POST", f"/{command.name}") if command else ("GET", "/health")
        content = command.model_dump_json() if command else None
        try:
            answer = self.http.request(method, path, content=content, timeout=timeout or self.http.timeout)
        except httpx.TransportError as error:
            raise TrainerDown(f"the trainer did not answer {path}: {type(error).__name__}: {error}") from error
        except RuntimeError as error:
            if not self.http.is_closed:
                raise
            raise TrainerDown(f"the trainer was not asked {path}: this connection to it is closed") from error
        if answer.is_error:
            raise self._error(path, answer)
        return kind.model_validate_json(answer.content)

    def _error(self, path: str, answer: httpx.Response) -> Exception:
        """The exception for a status of 400 or more (see `STATUSES` of the trainer's `process`)."""
        reason = reason_of(answer.content)
        if answer.status_code == 503:
            return Unavailable(reason)
        if answer.is_server_error:
            failure = f"the trainer failed at {path}: {reason}"
            self.on_broken(failure)
            return TrainerDown(failure)
        if answer.status_code == 409:
            return TrainerDown(f"{path} does not fit the trainer's state: {reason}")
        return UserError(f"the trainer refused {path}: {reason}")
