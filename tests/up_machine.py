"""What `arealflow up` has started, in a folder of its own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect_api import ask

ROOT = Path(__file__).resolve().parents[1]


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
        return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)

    def get(self, path: str) -> Any:
        return ask("GET", f"{self.api}/{path}").raise_for_status().json()

    def post(self, path: str, **body: Any) -> Any:
        return ask("POST", f"{self.api}/{path}", body).raise_for_status().json()

    @property
    def store(self) -> Path:
        return Path(self.environment["AREALFLOW_HOME"]) / "store"
