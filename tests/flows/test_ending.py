"""A process whose flow is over ends although its Prefect server is gone, and says what that was not told."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect.context import FlowRunContext
from waiting import LIMIT
from websockets.sync.server import ServerConnection, serve
from websockets.typing import Subprotocol

from flows import ending
from flows.ending import REFUSED_SECONDS, SILENT_SECONDS, Silence

PROGRAM = Path(__file__).with_name("ending_flow.py")
REFUSED, SILENT = httpx.ConnectError("refused"), httpx.ReadTimeout("")


@contextmanager
def events_server() -> Iterator[tuple[str, threading.Event]]:
    """The URL of an API that takes one event, and what says that it has. It is gone when the context ends."""
    got = threading.Event()

    def handle(connection: ServerConnection) -> None:
        connection.recv()
        connection.send(json.dumps({"type": "auth_success"}))
        connection.recv()
        got.set()

    with serve(handle, "127.0.0.1", 0, subprotocols=[Subprotocol("prefect")]) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}/api", got


@pytest.mark.parametrize(
    ("ends", "code", "out", "err"),
    [("well", 0, "made r\nat last\n", ""), ("refused", 1, "at last\n", "error: no such model\n")],
)
def test_a_process_whose_server_dies_before_it_is_told_all_ends(ends: str, code: int, out: str, err: str) -> None:
    """Prefect would try for an hour: 7 s for each event."""
    with events_server() as (url, got):
        process = subprocess.Popen(
            [sys.executable, PROGRAM, ends],
            env=os.environ | {"PREFECT_API_URL": url, "PREFECT_LOGGING_LEVEL": "CRITICAL"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert got.wait(LIMIT)
    found = process.communicate("\n", LIMIT)
    assert (process.returncode, found[0]) == (code, out), found[1]
    lines = [line for line in found[1].splitlines(keepends=True) if line.startswith(("the Prefect", "error:"))]
    told, *rest = lines
    assert told.startswith("the Prefect server does not answer, and is not told the end of this flow run, ")
    assert " 499 events and 0 log messages" in told and "".join(rest) == err


@pytest.mark.parametrize("parent", [None, "task-run"])
def test_the_end_of_a_part_is_not_that_of_its_flow(parent: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of the fine-tuning that a recipe begins with. No server is asked: it may be gone."""
    ended: list[Any] = []
    context = SimpleNamespace(flow_run=SimpleNamespace(parent_task_run_id=parent))
    monkeypatch.setattr(FlowRunContext, "get", lambda: context)
    monkeypatch.setattr(ending, "over", lambda *how: ended.append(how))
    with ending.Reporting() as report:
        assert report({"run": "r"}) == {"run": "r"}
    assert ended == ([({"run": "r"}, None)] if parent is None else [])


@given(answers=st.lists(st.tuples(st.sampled_from([None, REFUSED, SILENT]), st.sampled_from([0.5, 3.0, 40.0]))))
def test_a_server_is_gone_only_if_it_has_not_answered_all_the_while(
    answers: list[tuple[httpx.TransportError | None, float]],
) -> None:
    now, asked = [100.0], iter(answers)
    silence = Silence(lambda: next(asked)[0], clock=lambda: now[0])
    for number, (error, pause) in enumerate(answers):
        silent = list(itertools.takewhile(lambda one: one[0] is not None, reversed(answers[:number])))
        since = sum(seconds for _, seconds in silent)
        limit = REFUSED_SECONDS if error is REFUSED else SILENT_SECONDS
        assert silence.is_long == (error is not None and since >= limit)
        now[0] += pause


def test_a_process_ends_whose_output_is_closed() -> None:
    """Otherwise the thread that ends it would fail, and Prefect's own time limits would follow."""
    program = "import time; from flows.ending import end; end(None, None); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for output in (process.stdout, process.stderr):
        assert output is not None
        output.close()
    assert process.wait(LIMIT) == 0


def test_a_retry_in_the_same_process_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "exits", True)
    monkeypatch.setattr(ending, "silence", SimpleNamespace(is_long=False, since=None))
    ending.over(None, None)
    [watching] = [thread for thread in threading.enumerate() if thread.name == ending.WATCHING]
    ending.Reporting().__enter__()
    watching.join(LIMIT)
    assert not watching.is_alive()
