"""A Prefect server for one `arealflow run`, if there is no other: it starts while this process imports Prefect.

Prefect would start a server itself, but only after its import, and would leave it running if this process is killed.
Here the listening socket exists before the server process starts, so that requests wait until the server is ready.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
from typing import Final

import httpx

from areal_tasks.engines.lifeline import LIFELINE
from areal_tasks.engines.ports import listen
from flows.cli.processes import START_SECONDS
from flows.home import home, last_lines
from schemas.errors import UserError

STOP_SECONDS: Final = 5.0
#: No list of block types: flows use none, and registering them takes a second.
SETTINGS: Final = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
    "PREFECT_SERVER_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",  # it would record them as registered
}


class TemporaryServer:
    """A Prefect server on the database of `<home>/prefect`, so that `arealflow up` shows its flow runs later."""

    def __init__(self) -> None:
        self.log = home() / "logs" / "temporary-server.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._read_end, self._write_end = os.pipe()  # the server ends when this process closes the write end or ends
        with listen() as listener:
            self.api_url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
            self._process = self._spawn(listener)
        os.close(self._read_end)
        atexit.register(self.stop)  # runs after Prefect's own handlers, which send its last logs

    def _spawn(self, listener: socket.socket) -> subprocess.Popen[bytes]:
        own = {
            "PREFECT_HOME": str(home() / "prefect"),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            LIFELINE: str(self._read_end),
        }
        inherited = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
        with self.log.open("ab") as sink:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "flows.server", str(listener.fileno())],
                env=inherited | SETTINGS | own,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                pass_fds=[listener.fileno(), self._read_end],
                start_new_session=True,  # Ctrl-C must not reach the server: the flow still has states to report
            )

    def wait(self) -> None:
        """Wait until the server answers. UserError with the end of its log if it does not."""
        try:
            httpx.get(f"{self.api_url}/health", timeout=START_SECONDS).raise_for_status()
        except httpx.HTTPError as error:
            raise UserError(f"the temporary Prefect server did not start; {last_lines(self.log)}") from error

    def stop(self) -> None:
        """End the server and wait for its exit."""
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
