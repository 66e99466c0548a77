"""Where this machine's own files lie: logs, Prefect's database, and the default store."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from arealflow.packages import INSTALLED


def home() -> Path:
    """`AREALFLOW_HOME`, else `.arealflow` in the current folder."""
    return Path(os.environ.get("AREALFLOW_HOME", ".arealflow")).resolve()


def last_lines(log: Path, lines: int = 15) -> str:
    """The end of a log, for the message that reports a failure."""
    return f"last lines of {log}:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def logs_folder() -> Path:
    """Services log to `<this>/<run>/<service>-<owner>-<restart>.log`."""
    return home() / "logs"


def look_in(folder: Path) -> None:
    """Have modules found in a folder, after everything that is installed: rewards and workflows that a recipe names.

    Also in the processes that this one starts. arealflow's own packages come before those of the folder, also where
    they are installed by a finder, which Python asks last (pip install --editable).
    """
    for place in (INSTALLED, folder.resolve()):
        if str(place) not in sys.path:
            sys.path.append(str(place))
