"""Talks to the trainer service: small JSON commands that name manifests; tensors never pass here."""

from __future__ import annotations

from typing import TypeVar

import httpx

from areal_tasks.engines.trainer.commands import (
    Health,
    Load,
    Loaded,
    Logprobs,
    Message,
    Send,
    Sent,
    Tables,
    Train,
    Trained,
    Write,
    Written,
)
from schemas.errors import UserError

Reply = TypeVar("Reply", bound=Message)


class TrainerDown(Exception):
    """The trainer did not answer: it died or hangs. The command may be repeated; the trainer never steps twice."""


class TrainerClient:
    """A connection to a trainer group's rank 0. Methods raise TrainerDown or, with the trainer's reason, UserError."""

    def __init__(self, url: str, token: str, timeout_seconds: float = 3600.0) -> None:
        headers = {"Authorization": f"Bearer {token}"}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(timeout_seconds, connect=10.0))

    def load(self, command: Load) -> Loaded:
        return self._ask("POST", "/load", Loaded, command)

    def train(self, command: Train) -> Trained:
        return self._ask("POST", "/train", Trained, command)

    def logprobs(self, command: Logprobs) -> Tables:
        return self._ask("POST", "/logprobs", Tables, command)

    def publish(self, command: Write) -> Written:
        return self._ask("POST", "/publish", Written, command)

    def send(self, command: Send) -> Sent:
        return self._ask("POST", "/send", Sent, command)

    def checkpoint(self, command: Write) -> Written:
        return self._ask("POST", "/checkpoint", Written, command)

    def health(self) -> Health:
        return self._ask("GET", "/health", Health)

    def work(self) -> tuple[int, int]:
        """Samples done of those that the command under way is about; (0, 0) when it is not known. Raises nothing."""
        try:
            health = self.health()
        except (TrainerDown, UserError):
            return 0, 0  # whoever waits for the command is told
        return (health.done, health.of) if health.busy else (0, 0)

    def close(self) -> None:
        self.http.close()

    def _ask(self, method: str, path: str, reply: type[Reply], command: Message | None = None) -> Reply:
        try:
            answer = self.http.request(method, path, content=command.model_dump_json() if command else None)
        except httpx.TransportError as error:
            raise TrainerDown(f"the trainer did not answer {path}: {type(error).__name__}: {error}") from error
        if answer.is_error:
            raise UserError(f"the trainer refused {path}: {_reason(answer)}")
        return reply.model_validate_json(answer.content)


def _reason(answer: httpx.Response) -> str:
    """The trainer's own words; the whole body where it is not the trainer that answered."""
    try:
        return str(answer.json()["error"])
    except (ValueError, LookupError, TypeError):
        return f"{answer.status_code} {answer.text}"
