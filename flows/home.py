"""Local folders of this machine: logs, Prefect's database, and the default store."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from arealflow.packages import INSTALLED


def home() -> Path:
    return Path(os.environ.get("AREALFLOW_HOME", ".arealflow")).resolve()


def prefect_home() -> Path:
    """Folder of Prefect's database and of the login of our server, which no other user can read. Creates it."""
    folder = home() / "prefect"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder


def last_lines(log: Path) -> str:
    """The end of a log, for the message that reports a failure."""
    return f"last lines of {log}:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-15:])


def logs_folder() -> Path:
    """Folder of the services' logs: `<logs>/<run>/<service>-<owner>-<restart>.log`."""
    return home() / "logs"


def add_import_folder(folder: Path) -> None:
    """Append a folder to `sys.path`, for the rewards and workflows that a recipe names; child processes inherit it.

    arealflow's own packages take precedence over the folder's, even if they are installed by an import finder, which
    Python asks last (pip install --editable).
    """
    for place in (INSTALLED, folder.resolve()):
        if str(place) not in sys.path:
            sys.path.append(str(place))
