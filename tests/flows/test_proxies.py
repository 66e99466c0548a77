"""Loopback is never reached through a proxy, whatever the environment names for other hosts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from urllib.request import proxy_bypass

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import LIMIT

from areal_tasks.engines.service import as_service
from areal_tasks.processes import keep_loopback_direct
from flows import execute
from flows.cli import main

hosts = st.sampled_from(["", "internal.example", ".corp", "10.0.0.0/8", "localhost", "*", " a , b "])


@settings(max_examples=25)  # each client reads the certificates
@given(st.none() | hosts, st.none() | hosts)
def test_entries_of_the_user_stay(lower: str | None, upper: str | None) -> None:
    given = {name: value for name, value in (("no_proxy", lower), ("NO_PROXY", upper)) if value is not None}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("no_proxy", "NO_PROXY"):
            patch.delenv(name, raising=False)
        for name, value in {**given, "http_proxy": "http://127.0.0.1:9", "ALL_PROXY": "http://127.0.0.1:9"}.items():
            patch.setenv(name, value)
        keep_loopback_direct()
        keep_loopback_direct()
        entries = os.environ["no_proxy"].split(",")
        assert os.environ["NO_PROXY"] == os.environ["no_proxy"] and len(set(entries)) == len(entries)
        named = {part.strip() for value in given.values() for part in value.split(",")} - {""}
        assert entries == ["*"] if "*" in named else named <= set(entries)
        with httpx.Client(timeout=LIMIT) as client:
            for host in ("127.0.0.1", "localhost", "[::1]"):
                transport = client._transport_for_url(httpx.URL(f"http://{host}:4200/api"))
                assert transport is client._transport and proxy_bypass(host.strip("[]"))


def test_each_entry_of_a_process_sees_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def command() -> None:
        monkeypatch.setattr(sys, "argv", ["arealflow", "plan", "nosuch"])
        with pytest.raises(SystemExit):
            main.main()

    def service() -> None:
        with as_service():
            pass

    for enter in (command, service, execute.begin_flow):
        monkeypatch.setenv("no_proxy", "internal.example")
        enter()
        assert "127.0.0.1" in os.environ["no_proxy"] and "internal.example" in os.environ["NO_PROXY"]


@pytest.mark.slow("a whole run with its services, each a process")
def test_a_run_with_a_temporary_server_asks_no_proxy(tmp_path: Path) -> None:
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as proxy:

        def serve() -> None:
            while True:
                try:
                    with proxy.accept()[0] as connection:
                        asked.append(connection.recv(1000))
                except OSError:  # closed
                    return

        threading.Thread(target=serve, daemon=True).start()
        url = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        proxies = {f"{kind}_proxy": url for kind in ("http", "https", "all")}
        kept = {name: value for name, value in os.environ.items() if name.lower() != "no_proxy"}
        own = {"AREALFLOW_HOME": str(tmp_path), **proxies}
        words = ["run", "quickstart-sft", "schedule.iterations=1", "launcher.type=local"]
        command = [sys.executable, "-m", "arealflow.command", *words]
        kept.pop("PREFECT_API_URL", None)
        ended = subprocess.run(command, env=kept | own, capture_output=True, timeout=LIMIT, text=True)
        assert not ended.returncode, ended.stderr[-3000:]
        proxy.shutdown(socket.SHUT_RDWR)
    assert not asked
