"""A stand-in for SGLang behind node agents: it speaks TLS at its machine's address and gets weights from the store."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from checkpoints import publish
from remote_sglang import memory_of, opened, supervised
from waiting import LIMIT, alive, wait_until

from areal_tasks.launchers.supervisor import Supervisor
from areal_tasks.store.backend import Store
from schemas.manifest import WeightsRef

NAMES = ["inference-0", "inference-1"]


@pytest.fixture
def refs(s3_store: Store, tmp_path: Path) -> list[WeightsRef]:
    return [publish(s3_store, tmp_path, version) for version in range(2)]


@pytest.fixture
def supervisor(s3_store: Store, refs: list[WeightsRef], tmp_path: Path) -> Iterator[Supervisor]:
    with supervised(s3_store, refs[0], tmp_path, [(name, 0, "") for name in NAMES]) as made:
        yield made


def post(supervisor: Supervisor, url: str, order: dict[str, Any]) -> Any:
    access = supervisor.access
    where = f"{url}/update_weights_from_disk"
    answer = httpx.post(where, json=order, headers=access.headers, verify=access.trust, timeout=LIMIT)
    return answer.raise_for_status().json()


def test_servers_of_a_machine_speak_tls_and_share_what_they_fetch(
    supervisor: Supervisor, s3_store: Store, refs: list[WeightsRef]
) -> None:
    urls = supervisor.wait(NAMES)
    assert all(url.startswith("https://127.0.0.1:") for url in urls)
    with pytest.raises(httpx.ConnectError, match="certificate"):
        httpx.get(f"{urls[0]}/model_info", timeout=LIMIT)
    assert httpx.get(f"{urls[0]}/model_info", verify=supervisor.access.trust, timeout=LIMIT).status_code == 401
    wait_until(lambda: not memory_of(s3_store, refs[0]).exists(), "both have started on it")
    order = {"model_path": s3_store.uri(refs[1].path), "weight_version": "1"}
    answers = [post(supervisor, url, order) for url in urls]
    assert {answer["folder"] for answer in answers} == {str(memory_of(s3_store, refs[1]))}
    assert all("config.json" in answer["files"] for answer in answers)
    assert memory_of(s3_store, refs[1]).is_dir()
    for service in supervisor.services.values():
        service.handle.stop(LIMIT)
    wait_until(lambda: not memory_of(s3_store, refs[1]).exists())


def test_a_server_that_is_killed_leaves_nothing_in_memory(
    supervisor: Supervisor, s3_store: Store, refs: list[WeightsRef]
) -> None:
    [url, _] = supervisor.wait(NAMES)
    post(supervisor, url, {"model_path": s3_store.uri(refs[1].path), "weight_version": "1"})
    [server] = [p for p in psutil.process_iter() if memory_of(s3_store, refs[1]) in opened(p)]
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: not alive(server.pid))
    wait_until(lambda: not memory_of(s3_store, refs[1]).exists())
