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
from processes import NETWORK
from waiting import LIMIT, alive, wait_until

from areal_tasks.engines.fetching import PREFIX, memory
from areal_tasks.engines.service import ServiceSpec
from areal_tasks.launchers.supervisor import Supervisor
from areal_tasks.store.backend import Store
from areal_tasks.store.objects.files import digest_of, read_weights
from schemas.manifest import WeightsRef
from schemas.recipe.launcher import Launcher

FAKE = Path(__file__).parents[1] / "sglang" / "fake"
NAMES = ["inference-0", "inference-1"]


def memory_of(store: Store, ref: WeightsRef) -> Path:
    return memory() / f"{PREFIX}{os.getuid()}-{digest_of(read_weights(store, ref).files)}"


@pytest.fixture
def refs(s3_store: Store, tmp_path: Path) -> list[WeightsRef]:
    return [publish(s3_store, tmp_path, version) for version in range(2)]


@pytest.fixture
def supervisor(
    s3_store: Store, refs: list[WeightsRef], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Supervisor]:
    monkeypatch.syspath_prepend(FAKE)
    settings = Launcher(type="processes:Processes", network=NETWORK, startup_seconds=600.0)
    with Supervisor(s3_store, settings, tmp_path / "logs") as made:
        for name in NAMES:
            recipe = {"seed": 0, "model": {"path": "m"}, "inference": {"engine": "sglang"}}
            spec = ServiceSpec(
                name=name, restart=0, store_url=s3_store.url, run=tmp_path.name, owner=1, recipe=recipe,
                weights=refs[0],
            )  # fmt: skip
            made.start("areal_tasks.engines.sglang", spec)
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


def opened(process: psutil.Process) -> list[Path]:
    """The folders that a process has open."""
    try:
        return [Path(os.readlink(link)) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
    except OSError:
        return []
