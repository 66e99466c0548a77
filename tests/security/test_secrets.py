"""Tokens and credentials: who needs them has them, and they stand nowhere else."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import httpx
import psutil
import pytest
from listeners import beyond_loopback, listening
from stage_driver import drive, store_in, tiny
from store_listing import listed
from waiting import LIMIT, wait_until

from areal_tasks.secret import HIDDEN
from areal_tasks.stages.build import Built
from areal_tasks.stages.jobs import Job, run_directly
from areal_tasks.store.backend import open_store
from areal_tasks.store.query import run_sql
from areal_tasks.store.runs import load_run
from flows.execute import with_overrides
from schemas.errors import UserError
from schemas.manifest import ServiceRecord
from schemas.recipe.load import parse_recipe

KEY = "a-key-that-nobody-shows"


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, list[str]]:
    """A run with services of its own: its folder, their token, and every command line there was during its rollout."""
    folder, tokens, commands = tmp_path_factory.mktemp("watched"), [], []

    def execute(jobs: Sequence[Job]) -> list[Built]:
        if jobs[0].label == "rollout 0":
            tokens.append(jobs[0].context.engines.supervisor.token)
            answers(folder)
            show_no_secret(folder, before, tokens[0], KEY)
        done = run_directly(jobs)
        if jobs[0].label == "rollout 0":
            commands.extend(" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
        return done

    before = set(psutil.Process().children(recursive=True))  # such as an S3 server of other tests
    with pytest.MonkeyPatch.context() as patch:
        for name in HIDDEN:
            patch.setenv(name, KEY)
        drive(folder, "r", tiny(launcher={"type": "local"}, schedule={"iterations": 1}), execute)
    return folder, tokens[0], commands


def show_no_secret(folder: Path, before: set[psutil.Process], *secrets: str) -> None:
    """Nothing that runs code of a user's, and no service, has a secret in the environment that /proc shows."""
    store = store_in(folder)
    services = [psutil.Process(ServiceRecord.parse(store.read(path)).pid) for path in listed(store, "r/services")]
    verifiers = wait_until(lambda: set(psutil.Process().children(recursive=True)) - before, "the verifiers' process")
    shown = {
        one.pid: Path(f"/proc/{one.pid}/environ").read_text()
        for started in [*services, *verifiers]
        for one in [started, *started.children(recursive=True)]
    }
    assert len(shown) >= 4 and all("PYTHONPATH=" in environment for environment in shown.values())
    assert [pid for pid, environment in shown.items() if any(secret in environment for secret in secrets)] == []


def answers(folder: Path) -> None:
    """Every service listens on loopback alone, and answers no request without the token."""
    store = store_in(folder)
    records = [ServiceRecord.parse(store.read(path)) for path in listed(store, "r/services")]
    for record in records:
        host, port = httpx.URL(record.url).host, httpx.URL(record.url).port
        assert host == "127.0.0.1"
        for method, path in (("GET", "/health"), ("POST", "/train"), ("POST", "/generate"), ("GET", "/nosuch")):
            assert httpx.request(method, f"{record.url}{path}", timeout=LIMIT).status_code == 401, (record.name, path)
        service = psutil.Process(record.pid)
        assert any(f"{host} port {port}" in found for found in listening([service]).values())
        assert beyond_loopback([service]) == {}
        assert socket.gethostname() == record.host
    assert beyond_loopback([psutil.Process()]) == {}, "verifiers, and the flow itself"


def test_services_ran_and_none_of_their_command_lines_shows_the_token(watched: tuple[Path, str, list[str]]) -> None:
    _, token, commands = watched
    assert len(token) >= 32
    assert sum("areal_tasks.engines" in command for command in commands) >= 2, "the services were there to be seen"
    assert not [command for command in commands if token in command]


def test_no_log_and_no_file_of_the_store_holds_the_token(watched: tuple[Path, str, list[str]]) -> None:
    folder, token, _ = watched
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} >= {".json", ".parquet", ".safetensors", ".log"}
    assert not [path for path in files if token.encode() in path.read_bytes()]
    servers = run_sql(store_in(folder), "r", "SELECT DISTINCT server FROM rollout").to_pylist()
    assert servers and token not in str(servers)


def test_what_prefect_is_given_holds_no_token(watched: tuple[Path, str, list[str]]) -> None:
    folder, token, _ = watched
    [segment] = load_run(store_in(folder), "r").segments  # the recipe as a flow run's parameter has it
    assert token not in str(segment.recipe)
    assert not [name for name in _names(segment.recipe) if "token" in name and not name.endswith("_tokens")]


def _names(value: object) -> list[str]:
    if not isinstance(value, dict):
        return []
    return [*value, *(name for inner in value.values() for name in _names(inner))]


# ── credentials of the store ────────────────────────────────────────────────────────────────────────────────────────

WITH_CREDENTIALS = (
    "s3://AKIDEXAMPLE:wJalrXUtn@bucket/prefix",
    "s3://bucket/prefix?access_key=AKIDEXAMPLE&secret_key=wJalrXUtn",
    "https://storage/x.jsonl?X-Amz-Signature=wJalrXUtn",
)


@pytest.mark.parametrize("url", WITH_CREDENTIALS)
def test_a_recipe_that_holds_credentials_is_refused_without_repeating_them(url: str) -> None:
    values = tiny().model_dump(mode="json")
    for section, field in (("store", "url"), ("data", "source")):
        with pytest.raises(UserError, match=rf"{section}\.{field}: holds credentials") as refused:
            parse_recipe(values | {section: {**values[section], field: url}})
        assert "wJalrXUtn" not in str(refused.value)
    with pytest.raises(UserError, match=r"store\.url: holds credentials"):
        with_overrides(tiny(), f"store.url='{url}'")


@pytest.mark.parametrize("url", WITH_CREDENTIALS)
def test_a_store_is_not_opened_by_a_url_that_holds_credentials(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREALFLOW_STORE", url)
    for asked in (url, ""):
        with pytest.raises(UserError, match="holds credentials") as refused:
            open_store(asked)
        assert "wJalrXUtn" not in str(refused.value)


def test_a_store_on_s3_is_not_opened_without_keys_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="AWS_ACCESS_KEY_ID is not set"):
        open_store("s3://bucket/prefix")
