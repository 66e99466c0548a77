"""The Prefect server of one `arealflow run` without any other: it starts while that process imports Prefect.

Prefect would start a server itself, but only after its import, and would leave it running if this process is killed.
Here the listening socket exists before the server process (`python -m flows.server FD`) starts, so that requests wait
until the server is ready. It serves only the API: no UI, no schedules, no work pools, and no registration of Prefect's
block types. It ends with the process that started it (`lifeline`), which alone has its login.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Final

import httpx

from areal_tasks.engines.lifeline import LIFELINE, watch_lifeline
from areal_tasks.engines.ports import listen
from areal_tasks.garbage import importing
from flows import ending
from flows.home import last_lines, logs_folder, prefect_home
from schemas.errors import UserError

STOP_SECONDS: Final = 5.0
#: Of all our Prefect servers. States of task runs are written together, up to 20 and after a second at the latest: by
#: default each is written by itself, which takes as long as all else that the server does for a stage.
SERVER_SETTINGS: Final = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "20",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
}
#: No list of block types: flows use none, and registering them takes a second.
TEMPORARY_SETTINGS: Final = {
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
    "PREFECT_SERVER_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",  # it would record them as registered
}


def new_login() -> str:
    """A login for a Prefect server, `user:password`, that nobody can guess."""
    return f"arealflow:{secrets.token_urlsafe(24)}"


def server_settings(api_url: str, login: str) -> dict[str, str]:
    """The environment of a Prefect server at this address, whose API and websockets ask for the login.

    Prefect takes it from a header that no browser sends by itself (and from a message in a websocket), so that a page
    of another origin, or one whose host name has come to mean this machine, can do nothing. Nor can it read what needs
    no login: only the server's own UI, which asks 127.0.0.1 if it was opened as localhost, is allowed to.
    """
    ui = api_url.removesuffix("/api")
    return {
        **SERVER_SETTINGS,
        "PREFECT_SERVER_API_AUTH_STRING": login,
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": f"{ui},{ui.replace('127.0.0.1', 'localhost')}",
    }


class TemporaryServer:
    """A Prefect server on the database of `<home>/prefect`, so that `arealflow up` shows its flow runs later."""

    def __init__(self) -> None:
        self.log = logs_folder() / "temporary-server.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        read_end, self._write_end = os.pipe()  # the server ends when this process closes the write end or ends
        self.login = new_login()
        own = {
            "PREFECT_HOME": str(prefect_home()),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            LIFELINE: str(read_end),
        }
        inherited = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
        with listen() as listener, self.log.open("ab") as sink:
            self.api_url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "flows.server", str(listener.fileno())],
                env=inherited | server_settings(self.api_url, self.login) | TEMPORARY_SETTINGS | own,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                pass_fds=[listener.fileno(), read_end],
                start_new_session=True,  # Ctrl-C must not reach the server: the flow still has states to report
            )
        os.close(read_end)
        atexit.register(self.stop)  # runs after Prefect's own handlers, which send its last logs
        ending.at_last.append(self._process.kill)

    def wait(self, seconds: float) -> None:
        """Wait until the server answers. UserError with the end of its log if it does not."""
        try:
            httpx.get(f"{self.api_url}/health", timeout=seconds).raise_for_status()
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


def main() -> None:
    """Serve Prefect's API on the inherited socket `argv[1]` until the parent process ends."""
    watch_lifeline()
    listener = socket.socket(fileno=int(sys.argv[1]))
    with importing():
        import uvicorn
        from prefect.server.api.server import create_app
        from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL
    make_database(PREFECT_API_DATABASE_CONNECTION_URL.value())
    app = create_app(ephemeral=True, final=True)
    config = uvicorn.Config(app, log_config=None, log_level="error", lifespan="on", timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[listener])


def make_database(url: str) -> None:
    """Create the file of Prefect's SQLite database, if `url` names one that does not exist.

    Applies Prefect's own migrations, as the server would at its start, but over a synchronous connection: Prefect's is
    asynchronous and switches threads 34,000 times, which takes twice as long (4.3 instead of 2.3 CPU seconds with
    Prefect 3.8). Another process sees the whole file or none.
    """
    from sqlalchemy import make_url

    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite" or parsed.query or parsed.database in (None, "", ":memory:"):
        return
    path = Path(str(parsed.database))
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        _migrate(partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # another server created it meanwhile
            os.link(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _migrate(path: Path) -> None:
    """Apply all of Prefect's migrations to a new SQLite file. Written for Prefect 3.8.8."""
    from alembic.runtime.environment import EnvironmentContext
    from alembic.script import ScriptDirectory
    from prefect.server.database import provide_database_interface
    from prefect.server.database.alembic_commands import alembic_config
    from sqlalchemy import create_engine

    config = alembic_config()
    script = ScriptDirectory.from_config(config)
    database = provide_database_interface()
    script.version_locations = [str(database.orm.versions_dir)]
    environment = EnvironmentContext(config, script, fn=lambda revision, _: script._upgrade_revs("head", revision))
    engine = create_engine(f"sqlite:///{path}")
    with warnings.catch_warnings(), engine.connect() as connection, environment as context:
        warnings.simplefilter("ignore")  # as Prefect does: SQLAlchemy cannot reflect all of its indices
        connection.exec_driver_sql("PRAGMA synchronous=OFF")  # no process reads the file before it is complete
        connection.commit()
        metadata = database.Base.metadata
        context.configure(connection, target_metadata=metadata, render_as_batch=True, transaction_per_migration=True)
        with context.begin_transaction():
            context.run_migrations()
        connection.commit()
    engine.dispose()


if __name__ == "__main__":
    main()
