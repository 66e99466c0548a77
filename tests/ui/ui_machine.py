"""For tests of the Prefect UI: what `arealflow up` has started, a webhook that remembers, and patience."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from flows.cli.automations import ask

ROOT = Path(__file__).resolve().parents[2]
T = TypeVar("T")


@dataclass(frozen=True)
class Up:
    """A server and a worker that run, and the environment in which they do."""

    url: str
    environment: dict[str, str]

    @property
    def api(self) -> str:
        return f"{self.url}/api"

    def arealflow(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the command as a person does."""
        command = [sys.executable, "-c", "from flows.cli.main import main; main()", *arguments]
        environment = self.environment | variables
        return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240)

    def get(self, path: str) -> Any:
        return ask("GET", f"{self.api}/{path}").raise_for_status().json()

    def post(self, path: str, **body: Any) -> Any:
        return ask("POST", f"{self.api}/{path}", body).raise_for_status().json()

    @property
    def store(self) -> Path:
        return Path(self.environment["AREALFLOW_HOME"]) / "store"


@dataclass
class Webhook:
    """What was posted to it, oldest first."""

    url: str
    posted: list[dict[str, Any]] = field(default_factory=list)

    def of(self, alert: str) -> list[dict[str, Any]]:
        return [body for body in list(self.posted) if body["alert"] == alert]


def eventually(look: Callable[[], T], what: str, seconds: float = 200.0) -> T:
    """What `look` gives as soon as it is true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.3)
    raise AssertionError(f"{what}: not within {seconds:g} s")
