"""Where this machine's own files lie: logs, Prefect's database, and the default store."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """`AREALFLOW_HOME`, else `.arealflow` in the current folder."""
    return Path(os.environ.get("AREALFLOW_HOME", ".arealflow")).resolve()


def last_lines(log: Path, lines: int = 15) -> str:
    """The end of a log, for the message that reports a failure."""
    return f"last lines of {log}:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def logs_folder() -> Path:
    """Services log to `<this>/<run>/<service>-<owner>-<restart>.log`."""
    return home() / "logs"
