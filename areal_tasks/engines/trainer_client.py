"""Talks to the trainer service: small JSON commands that name manifests; tensors never pass here."""

from __future__ import annotations

from typing import Any, TypeVar

import httpx
from pydantic import BaseModel

from schemas.errors import UserError

Reply = TypeVar("Reply", bound=BaseModel)


class TrainerDown(Exception):
    """The trainer did not answer: it died or hangs. The command may be repeated; the trainer never steps twice."""


class TrainerClient:
    """A connection to one trainer group's rank 0."""

    def __init__(self, url: str, token: str, timeout_seconds: float = 3600.0) -> None:
        headers = {"Authorization": f"Bearer {token}"}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(timeout_seconds, connect=10.0))

    def command(self, name: str, body: BaseModel, reply: type[Reply]) -> Reply:
        """POST `body` to `/name`. Raises TrainerDown when nobody answers, UserError with the trainer's reason on refusal."""
        return reply.model_validate(self._checked("POST", f"/{name}", content=body.model_dump_json()))

    def health(self) -> dict[str, Any]:
        """`{version, step, owner, busy}`."""
        return self._checked("GET", "/health")

    def close(self) -> None:
        self.http.close()

    def _checked(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        try:
            answer = self.http.request(method, path, **options)
        except httpx.TransportError as error:
            raise TrainerDown(f"trainer: {path}: {type(error).__name__}: {error}") from error
        if answer.is_error:
            raise UserError(f"trainer refused {path}: {answer.json().get('error', answer.text)}")
        result: dict[str, Any] = answer.json()
        return result
