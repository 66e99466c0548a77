"""`python -m flows.server FD`: the Prefect server of one `arealflow run`, behind the listening socket FD.

It serves only the API: no UI, no schedules, no work pools, and no registration of Prefect's block types. It ends with
the process that started it (`lifeline`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import warnings
from pathlib import Path

from areal_tasks.engines.lifeline import watch_lifeline
from areal_tasks.importing import importing


def main() -> None:
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
