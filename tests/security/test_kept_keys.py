"""A flow run without S3 keys takes those that Prefect keeps; neither they nor tokens stand anywhere in the clear."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import psutil
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect_api import ask
from s3_server import BUCKET, S3Server
from stage_driver import tiny
from store_listing import listed

from areal_tasks.engines import session
from areal_tasks.launchers.supervisor import Supervisor
from areal_tasks.store.backend import Store, open_store, s3_endpoint, s3_region
from flows import credentials
from flows.cli.main import main
from flows.cli.processes import why
from flows.credentials import BLOCK, NEEDED, PLACES, SECRETS, keys_in_environment, load_s3_keys, read_prefect_keys
from flows.home import home
from flows.rlhf import rlhf
from schemas.errors import UserError
from schemas.manifest import WeightsRef


@dataclass
class Watched:
    """A flow run on S3 that had no keys: its store, its services' tokens, and command lines while they ran."""

    store: Store
    tokens: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)


def arealflow(*words: str) -> int | str | None:
    """Run the command in this process; its exit code."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", ["arealflow", *words])
        main()
    return ended.value.code


def forget_keys(patch: pytest.MonkeyPatch) -> None:
    for name in (*SECRETS, *PLACES, "AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION"):
        patch.setenv(name, "to be restored")  # so that what a test sets goes again
        patch.delenv(name)


@pytest.fixture(scope="module")
def watched(api: str, s3: S3Server) -> Iterator[Watched]:
    found = Watched(open_store(f"s3://{BUCKET}/{uuid.uuid4().hex[:8]}"))

    class Recorded(Supervisor):
        def wait(self, names: Sequence[str], weights: WeightsRef | None = None) -> list[str]:
            urls = super().wait(names, weights)
            found.tokens.append(self.token)
            found.commands += [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
            return urls

    assert arealflow("s3-keys") == 0
    recipe = tiny(launcher={"type": "local"}, schedule={"iterations": 1}, store={"url": found.store.url})
    with pytest.MonkeyPatch.context() as patch:
        forget_keys(patch)
        patch.setattr(session, "Supervisor", Recorded)
        assert rlhf(recipe, run="kept")["iterations"] == 1
    yield found
    assert arealflow("s3-keys", "--remove") == 0


def test_a_flow_run_without_keys_takes_those_that_prefect_keeps(watched: Watched, s3: S3Server) -> None:
    kinds = {path.rpartition(".")[2] for path in listed(watched.store, "kept")}
    assert (
        kinds >= {"json", "parquet", "safetensors"} and sum("areal_tasks.engines" in c for c in watched.commands) >= 2
    )


def test_neither_keys_nor_tokens_are_in_prefects_database(watched: Watched, s3: S3Server) -> None:
    database = contents(home() / "prefect")
    assert b"areal-s3-keys" in database and b"kept-rollout-page" in database, "it has been written down"
    for secret in (s3.secret_key, s3.access_key, *watched.tokens):
        assert len(secret) >= 16 and secret.encode() not in database


def test_neither_keys_nor_tokens_are_in_logs_command_lines_or_the_store(watched: Watched, s3: S3Server) -> None:
    logs = contents(home() / "logs" / "kept")
    stored = b"".join(watched.store.read(path) for path in listed(watched.store, "kept"))
    assert logs and b"PAR1" in stored
    for secret in (s3.secret_key, s3.access_key, *watched.tokens):
        assert not [text for text in (logs, stored) if secret.encode() in text]
        assert not [command for command in watched.commands if secret in command]


def contents(folder: Path) -> bytes:
    """All bytes of all files below: a database's own, and what SQLite keeps next to it."""
    found = b""
    for path in sorted(folder.rglob("*")):
        with suppress(FileNotFoundError):  # a running server's files come and go
            found += path.read_bytes() if path.is_file() else b""
    return found


def test_keys_of_the_environment_are_used_as_they_are(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_keys(monkeypatch)
    assert not load_s3_keys("file:///anywhere") and not os.environ.get(NEEDED[0])
    monkeypatch.setenv(NEEDED[0], "mine")
    assert not load_s3_keys(watched.store.url)
    assert os.environ[NEEDED[0]] == "mine" and not os.environ.get(NEEDED[1])
    with pytest.raises(UserError, match="AWS_SECRET_ACCESS_KEY is not set: export it, have Prefect keep it"):
        open_store(watched.store.url)


def test_the_doctor_says_where_the_keys_come_from(
    watched: Watched, s3: S3Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert arealflow("doctor", "--store", watched.store.url) == 0
    told = said(capsys)
    assert "from this environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY" in told
    assert f"running at {os.environ['PREFECT_API_URL'].removesuffix('/api')}" in told
    forget_keys(monkeypatch)
    assert arealflow("doctor", "--store", watched.store.url) == 0  # the store is usable with them
    told = said(capsys)
    assert "from Prefect's Secret block, for flow runs" in told
    assert s3.secret_key not in told and s3.access_key not in told


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_keys_that_are_kept_no_longer_and_half_of_them(
    watched: Watched, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.blocks.system import Secret

    assert arealflow("s3-keys", "--remove") == 0
    forget_keys(monkeypatch)
    assert read_prefect_keys() == {}
    with pytest.raises(UserError, match="AWS_ACCESS_KEY_ID is not set"):
        rlhf(tiny(store={"url": watched.store.url}), run="none")
    Secret(value=json.dumps({NEEDED[0]: "12345"})).save(BLOCK)
    with pytest.raises(UserError, match=f"Secret block {BLOCK} has no AWS_SECRET_ACCESS_KEY: make it again"):
        load_s3_keys(watched.store.url)
    Secret(value="12345").save(BLOCK, overwrite=True)
    with pytest.raises(UserError, match=f"Secret block {BLOCK} is no JSON object"):
        load_s3_keys(watched.store.url)
    whole = {NEEDED[0]: "12345", NEEDED[1]: s3.secret_key}
    Secret(value=whole).save(BLOCK, overwrite=True)  # as a person may write it
    assert read_prefect_keys() == whole


# ── what belongs to a pair of keys ──────────────────────────────────────────────────────────────────────────────────


def test_endpoint_and_region_are_kept_as_a_store_reads_them(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_keys(monkeypatch)
    wanted = {NEEDED[0]: "id", NEEDED[1]: "secret", "AWS_ENDPOINT_URL": "http://there:1", "AWS_REGION": "there"}
    given = {**wanted, "AWS_ENDPOINT_URL_S3": "http://there:1", "AWS_ENDPOINT_URL": "http://elsewhere:1"}
    for name, value in {**given, "AWS_REGION": "", "AWS_DEFAULT_REGION": "there"}.items():
        monkeypatch.setenv(name, value)
    assert arealflow("s3-keys") == 0 and read_prefect_keys() == wanted
    forget_keys(monkeypatch)
    assert load_s3_keys("s3://bucket/x") and keys_in_environment() == wanted
    assert (s3_endpoint(), s3_region()) == ("http://there:1", "there")


def test_a_session_token_of_other_keys_does_not_stay_beside_kept_ones(
    api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_keys(monkeypatch)
    with monkeypatch.context() as keys:
        for name in NEEDED:
            keys.setenv(name, "kept")
        assert arealflow("s3-keys") == 0
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of other keys")
    assert load_s3_keys("s3://bucket/x") and keys_in_environment() == dict.fromkeys(NEEDED, "kept")


# ── a server that is away or refuses ────────────────────────────────────────────────────────────────────────────────


def test_a_server_that_is_away_as_a_flow_run_begins_is_asked_again(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_keys(monkeypatch)
    with monkeypatch.context() as keys:
        for name in NEEDED:
            keys.setenv(name, "kept")
        assert arealflow("s3-keys") == 0
    with forwarding(api) as port, temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{port}"}):
        assert load_s3_keys("s3://bucket/x")


@contextmanager
def forwarding(api: str) -> Iterator[int]:
    """The port of a server that asks the one that knows. It listens after more than a client waits."""

    class Forward(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = ask("GET", f"{api}{self.path}")
            self.send_response(answer.status_code)
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

    def serve() -> None:
        server.server_activate()
        server.serve_forever()

    with ThreadingHTTPServer(("127.0.0.1", 0), Forward, bind_and_activate=False) as server:
        server.server_bind()
        threading.Timer(3.0, serve).start()  # a client gives up after two
        try:
            yield server.server_port
        finally:
            server.shutdown()


def test_a_server_that_stays_away_is_a_mistake_with_a_remedy(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_keys(monkeypatch)
    monkeypatch.setattr(credentials, "RETRY_SECONDS", 0.0)
    with socket.socket() as mute:  # no process listens there, or can
        mute.bind(("127.0.0.1", 0))
        nowhere = temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{mute.getsockname()[1]}"})
        with nowhere, pytest.raises(UserError, match=r"does not answer \(.*check that it runs, or export S3 keys"):
            load_s3_keys("s3://bucket/x")


def test_what_is_wrong_with_the_server_is_told_apart() -> None:
    request = httpx.Request("GET", "http://there/api")
    refused = httpx.HTTPStatusError("no", request=request, response=httpx.Response(401, request=request))
    unreached = RuntimeError("Failed to reach API")
    unreached.__cause__ = httpx.ConnectError("refused")
    assert why("U", refused) == (
        "the Prefect server at U answers 401: check PREFECT_API_KEY or PREFECT_API_AUTH_STRING"
    )
    assert why("U", unreached) == "no Prefect server answers at U (refused): check that it runs"
    assert why("U", RuntimeError("Found incompatible versions")).endswith(": Found incompatible versions")
