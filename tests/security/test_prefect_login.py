"""Our Prefect servers answer those who have the login: no web page has it, and none may read what they answer."""

from __future__ import annotations

import json
import os
import re
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import prefect
import pytest
from waiting import LIMIT
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from flows.cli.processes import LOGIN
from flows.server import TemporaryServer

#: What a page of another origin sends, and one whose name has come to mean this machine (DNS rebinding).
FOREIGN: Final = {"Origin": "http://attacker.test", "Host": "attacker.test"}
CORS: Final = "access-control-allow-origin"
#: Answer everyone, with the word `true`.
OPEN: Final = {"/health", "/ready"}


@dataclass(frozen=True)
class Server:
    api_url: str
    login: str

    @property
    def origin(self) -> str:
        return self.api_url.removesuffix("/api")

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Basic {b64encode(self.login.encode()).decode()}"}


@pytest.fixture(scope="module", params=["up", "temporary"])
def server(request: pytest.FixtureRequest, api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server that `arealflow up` starts, and that of an `arealflow run` without one."""
    if request.param == "up":
        yield Server(api, os.environ[LOGIN])
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AREALFLOW_HOME", str(tmp_path_factory.mktemp("temporary")))
        found = TemporaryServer()
        found.wait(LIMIT)
    yield Server(found.api_url, found.login)
    found.stop()


def test_no_address_of_the_api_answers_without_the_login(server: Server) -> None:
    with httpx.Client(base_url=server.api_url, timeout=LIMIT) as client:
        document = client.get("/openapi.json", headers=server.headers).raise_for_status().json()
        found = {
            (method, path): client.request(method, path, headers=FOREIGN)
            for path, methods in document["paths"].items()
            for method in methods
        }
        for number, wrong in enumerate(("Basic YTpi", "Basic", "Bearer a", server.headers["Authorization"][:-1])):
            found["wrong", str(number)] = client.get("/flows/", headers={**FOREIGN, "Authorization": wrong})
    assert len(found) > 150 and {("post", "/block_documents/filter"), ("post", "/variables/filter")} <= found.keys()
    assert {path for (_, path), answer in found.items() if answer.status_code != httpx.codes.UNAUTHORIZED} == OPEN
    assert not [where for where, answer in found.items() if CORS in answer.headers]
    assert not [where for where, answer in found.items() if "www-authenticate" in answer.headers], (
        "browsers keep logins"
    )


def test_pages_of_other_origins_may_neither_read_nor_ask(server: Server) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    port = server.origin.rpartition(":")[2]
    own = [server.origin, f"http://localhost:{port}"]
    others = ["http://attacker.test", "null", "http://localhost", f"http://localhost.attacker.test:{port}"]
    for origin in [*own, *others, f"https://127.0.0.1:{port}"]:
        allowed = origin if origin in own else None
        for path in ("/api/flows/filter", "/api/health", "/ui-settings"):
            answer = httpx.get(f"{server.origin}{path}", headers={"Origin": origin}, timeout=LIMIT)
            assert answer.headers.get(CORS) == allowed, (origin, path)
        preflight = httpx.options(f"{server.api_url}/flows/", headers={"Origin": origin, **asked}, timeout=LIMIT)
        assert (preflight.is_success, preflight.headers.get(CORS)) == (origin in own, allowed), origin


SOCKETS: Final = (
    "events/in",
    "events/out",
    "logs/out",
    "task_runs/subscriptions/scheduled",
    "work_pools/p/workers/connect",
)


def socket_answers(server: Server, path: str, protocols: Sequence[str], token: str | None) -> bool:
    """Whether a websocket's first message, which says who asks, is taken as that of a user."""
    url = f"{server.api_url.replace('http', 'ws', 1)}/{path}"
    try:
        with connect(
            url, origin="http://attacker.test", subprotocols=[Subprotocol(p) for p in protocols] or None
        ) as socket:  # type: ignore[arg-type]
            socket.send(json.dumps({"type": "auth", "token": token}))
            return bool(json.loads(socket.recv(LIMIT))["type"] == "auth_success")
    except (ConnectionClosed, InvalidStatus):
        return False


@pytest.mark.parametrize("path", SOCKETS)
def test_websockets_want_the_login_too(server: Server, path: str) -> None:
    assert socket_answers(server, path, ["prefect"], server.login)
    for protocols in (["prefect"], []):
        for token in (None, "", "a:b"):
            assert not socket_answers(server, path, protocols, token)


def test_these_are_all_websockets() -> None:
    found = []
    for file in Path(prefect.__file__).parent.glob("server/api/*.py"):
        prefix = re.search(r'Router\(\s*prefix="/([^"]*)"', text := file.read_text())
        found += [f"{prefix and prefix[1]}{path}" for path in re.findall(r'@router\.websocket\(\s*"([^"]*)"', text)]
    assert sorted(path.replace("{work_pool_name}", "p") for path in found) == sorted(SOCKETS)
