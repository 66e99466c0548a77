"""The Prefect server of one `arealflow run`: it starts while everything else does, and ends with the run."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from waiting import LIMIT, alive, wait_until

from flows import server
from flows.home import home
from flows.server import TemporaryServer
from schemas.errors import UserError


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory, api: str) -> Iterator[TemporaryServer]:
    """A server in an empty home; the session's own keeps its environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AREALFLOW_HOME", str(tmp_path_factory.mktemp("fresh")))
        found = TemporaryServer()
        found.wait(LIMIT)
    yield found
    found.stop()


def database(found: TemporaryServer) -> Path:
    return found.log.parents[1] / "prefect" / "prefect.db"


def tables(file: Path) -> list[list[str]]:
    """The statements that make the tables; parts of each in alphabetical order, since Prefect's own is not fixed."""
    with sqlite3.connect(f"file:{file}?mode=ro", uri=True) as connection:
        statements = [sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")]
        (version,) = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    return [*sorted(sorted(part.strip(" ,") for part in sql.splitlines()) for sql in statements), [version]]


def test_its_tables_are_those_that_prefect_makes(fresh: TemporaryServer, api: str) -> None:
    assert tables(database(fresh)) == tables(home() / "prefect" / "prefect.db")


def test_it_has_not_noted_that_blocks_are_registered(fresh: TemporaryServer) -> None:
    assert {file.name.partition("-")[0] for file in database(fresh).parent.iterdir()} == {"prefect.db"}
    login = httpx.BasicAuth(*fresh.login.split(":"))
    found = httpx.post(f"{fresh.api_url}/block_types/filter", json={}, auth=login, timeout=LIMIT).raise_for_status()
    assert found.json() == []


def test_it_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import os, signal; from flows.server import TemporaryServer; server = TemporaryServer(); "
        "print(server._process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = os.environ | {"AREALFLOW_HOME": str(tmp_path)}
    killed = subprocess.run([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
    assert killed.returncode == -signal.SIGKILL
    wait_until(lambda: not alive(int(killed.stdout)), "its end")


def test_one_that_does_not_start_shows_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREALFLOW_HOME", str(tmp_path / "home"))
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no disk left\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(server.sys, "executable", str(broken))
    found = TemporaryServer()
    with pytest.raises(
        UserError, match=r"(?s)temporary Prefect server did not start; last lines of .*server.log:\nno disk left"
    ):
        found.wait(LIMIT)
    found.stop()


# ── its database ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+asyncpg://user@host/prefect",
        "sqlite+aiosqlite:///:memory:",
        "sqlite+aiosqlite:///file::memory:?cache=shared&uri=true",
        "sqlite+aiosqlite:///{there}",
    ],
)
def test_only_a_file_that_is_not_there_is_made(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tmp_path / "there.db"
    there.write_bytes(b"other data")
    monkeypatch.setattr(server, "_migrate", lambda path: pytest.fail(f"made {path}"))
    server.make_database(url.replace("{there}", str(there)))
    assert there.read_bytes() == b"other data"


def test_a_database_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "prefect" / "prefect.db"

    def half(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(server, "_migrate", half)
    with pytest.raises(OSError, match="No space left"):
        server.make_database(f"sqlite+aiosqlite:///{file}")
    assert list(file.parent.iterdir()) == []


def test_of_two_servers_that_make_it_the_first_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "prefect.db"

    def meanwhile(path: Path) -> None:
        path.write_bytes(b"second")
        file.write_bytes(b"first")

    monkeypatch.setattr(server, "_migrate", meanwhile)
    server.make_database(f"sqlite+aiosqlite:///{file}")
    assert (file.read_bytes(), list(tmp_path.iterdir())) == (b"first", [file])
