"""The service around SGLang, with a stand-in for SGLang that behaves worse than it does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from store_listing import listed
from waiting import LIMIT, alive, wait_until

from areal_tasks.engines.models import file_states
from areal_tasks.engines.ports import HOST, probe_port
from areal_tasks.engines.service import ModelFolder, ServiceSpec
from areal_tasks.engines.sglang.__main__ import choose_port, first_weights
from areal_tasks.launchers.local import LocalHandle
from areal_tasks.launchers.supervisor import ServiceFailed, Supervisor
from areal_tasks.store.backend import Store, Unavailable, open_store
from areal_tasks.store.commit import new_attempt
from areal_tasks.store.objects.files import commit_weights, upload
from areal_tasks.store.paths import weights_attempt
from areal_tasks.store.provenance import make_provenance, now
from schemas.errors import UserError
from schemas.manifest import WeightsRef
from schemas.recipe.launcher import Launcher

FAKE = Path(__file__).parent / "fake"
NAME = "inference-0"
Begin = Callable[..., Supervisor]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store((tmp_path / "store").as_uri())


def put_weights(store: Store, folder: Path) -> WeightsRef:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    attempt = new_attempt()
    files = upload(store, weights_attempt("r", 4, attempt), folder)
    return commit_weights(store, "r", 4, attempt, "weights", files, make_provenance(1, now()))


@pytest.fixture
def begin(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Starts a supervisor with one server; its recipe's inference section as keywords."""
    monkeypatch.syspath_prepend(FAKE)
    begun: list[Supervisor] = []
    weights = put_weights(store, tmp_path / "model")

    def start(
        gpus: tuple[str, ...] = (),
        restarts: int = 3,
        store_url: str = store.url,
        folder: ModelFolder | None = None,
        **inference: Any,
    ) -> Supervisor:
        recipe = {"seed": 0, "model": {"path": "m"}, "inference": {"engine": "sglang", **inference}}
        spec = ServiceSpec(
            name=NAME, restart=0, store_url=store_url, run="r", owner=1, recipe=recipe, gpus=gpus,
            weights=None if folder else weights, folder=folder,
        )  # fmt: skip
        begun.append(Supervisor(store, Launcher(startup_seconds=600.0, restarts=restarts), tmp_path / "logs"))
        begun[-1].start("areal_tasks.engines.sglang", spec)
        return begun[-1]

    yield start
    for supervisor in begun:
        supervisor.__exit__()


def handle(supervisor: Supervisor) -> LocalHandle:
    found = supervisor.services[NAME].handle
    assert isinstance(found, LocalHandle)
    return found


def ask(supervisor: Supervisor, url: str) -> Any:
    answer = httpx.get(url, headers={"Authorization": f"Bearer {supervisor.token}"}, timeout=LIMIT)
    return answer.raise_for_status().json()


def family(supervisor: Supervisor) -> list[psutil.Process]:
    guard = psutil.Process(handle(supervisor).process.pid)
    return [guard, *guard.children(recursive=True)]


def assert_gone(processes: list[psutil.Process]) -> None:
    _, left = psutil.wait_procs(processes, LIMIT)
    assert not any(map(alive, left))


def test_it_serves_behind_the_token_with_the_recipes_flags(begin: Begin, tmp_path: Path) -> None:
    supervisor = begin(gpus=("5",), flags={"attention-backend": "triton", "cuda-graph-bs": [1, 2]})
    [url] = supervisor.wait([NAME])
    assert ask(supervisor, f"{url}/model_info") == {"weight_version": "4"}
    for path in ("health_generate", "about"):
        assert httpx.get(f"{url}/{path}", timeout=LIMIT).status_code == 401
    about = ask(supervisor, f"{url}/about")
    assert about["settings"]["attention_backend"] == "triton" and about["settings"]["cuda_graph_bs"] == [1, 2]
    assert Path(about["settings"]["model_path"]).is_relative_to(tmp_path / "store"), "a store on this disk: no copy"
    assert about["environment"]["CUDA_VISIBLE_DEVICES"] == "5"
    everywhere = [" ".join(p.cmdline()) for p in family(supervisor)] + [repr(about)]
    everywhere.append(supervisor.services[NAME].job.log.read_text())
    assert not [text for text in everywhere if supervisor.token in text]


def test_prompts_that_would_end_the_server_are_refused(begin: Begin) -> None:
    supervisor = begin()
    [url] = supervisor.wait([NAME])

    def generate(prompt: list[int]) -> httpx.Response:
        headers = {"Authorization": f"Bearer {supervisor.token}"}
        return httpx.post(f"{url}/generate", json={"input_ids": [[0, 9], prompt]}, headers=headers, timeout=LIMIT)

    assert generate([1, 2]).status_code == 200
    for prompt, reason in (([3, 10], "token id 10; the vocabulary ends at 9"), ([-1], "id -1;"), ([1] * 5, "longer")):
        answer = generate(prompt)
        assert answer.status_code == 400 and reason in answer.json()["error"]["message"]


def test_stopping_ends_even_those_that_left_the_session_and_their_parent(begin: Begin) -> None:
    supervisor = begin()
    supervisor.wait([NAME])
    processes = family(supervisor)
    assert len(processes) == 4 and len({os.getsid(p.pid) for p in processes}) == 2
    handle(supervisor).stop(LIMIT)
    assert_gone(processes)
    assert handle(supervisor).exit_code() == 128 + signal.SIGTERM, "it ends in an orderly way, and need not be killed"


def test_they_end_with_the_supervisor(begin: Begin) -> None:
    supervisor = begin()
    supervisor.wait([NAME])
    processes = family(supervisor)
    os.close(supervisor.launcher.write_end)  # type: ignore[attr-defined]
    supervisor.launcher.write_end = os.open(os.devnull, os.O_RDONLY)  # type: ignore[attr-defined]
    handle(supervisor).process.wait(LIMIT)
    assert_gone(processes)


def test_a_killed_guard_takes_sglang_with_it(begin: Begin) -> None:
    supervisor = begin()
    supervisor.wait([NAME])
    number = int((Path(handle(supervisor).scratch.name) / "server.pid").read_text())
    server = psutil.Process(number)
    others = [p for p in family(supervisor)[1:] if p != server]
    handle(supervisor).process.kill()
    assert_gone([server])
    for process in others:  # SGLang's own workers end with it; the stand-in's do not
        process.kill()


def test_a_server_that_dies_is_started_again(begin: Begin) -> None:
    supervisor = begin()
    [url] = supervisor.wait([NAME])
    processes = family(supervisor)
    with pytest.raises(httpx.HTTPError):
        ask(supervisor, f"{url}/die")
    assert handle(supervisor).process.wait(LIMIT) == 3
    assert_gone(processes)
    [again] = supervisor.wait([NAME])
    assert ask(supervisor, f"{again}/model_info") == {"weight_version": "4"}


def test_a_server_that_does_not_answer_can_be_ended(begin: Begin) -> None:
    supervisor = begin()
    [url] = supervisor.wait([NAME])
    supervisor.end([])
    assert supervisor.wait([NAME]) == [url]
    supervisor.end([url])
    assert ask(supervisor, f"{supervisor.wait([NAME])[0]}/model_info") == {"weight_version": "4"}
    assert supervisor.services[NAME].spec.restart == 1


def test_a_store_that_is_away_while_it_starts_may_come_back(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens at port 9: the flow waits for the store, and this is no failure of the server."""
    keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_REGION": "us-east-1"}
    for name, value in {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", **keys}.items():
        monkeypatch.setenv(name, value)
    supervisor = begin(store_url="s3://arealflow/away")
    with pytest.raises(Unavailable, match=f"'{NAME}' could not start: the store did not answer"):
        supervisor.wait([NAME])


def test_want_of_memory_names_the_knobs(begin: Begin) -> None:
    supervisor = begin(restarts=0, flags={"attention-backend": "no-memory"})
    with pytest.raises(
        ServiceFailed, match=r"(?s)ended with 1 while starting.*Raise inference\.memory_fraction, split"
    ):
        supervisor.wait([NAME])


# ── before the weights are in the store ─────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def folder(tmp_path: Path) -> ModelFolder:
    """A model's own folder, with a file that no engine reads."""
    own = tmp_path / "own"
    own.mkdir()
    for name in ("config.json", "model.safetensors", "pytorch_model.bin"):
        (own / name).write_text("{}")
    return ModelFolder(path=str(own), files=file_states(own))


def test_it_starts_on_the_models_own_folder_as_version_0(begin: Begin, store: Store, folder: ModelFolder) -> None:
    supervisor = begin(folder=folder)
    [url] = supervisor.wait([NAME])
    assert ask(supervisor, f"{url}/model_info") == {"weight_version": "0"}
    read = Path(ask(supervisor, f"{url}/about")["settings"]["model_path"])
    assert sorted(file.name for file in read.iterdir()) == ["config.json", "model.safetensors"]
    assert (read / "config.json").resolve() == Path(folder.path) / "config.json"


def test_started_again_it_reads_the_store(begin: Begin, store: Store, folder: ModelFolder, tmp_path: Path) -> None:
    supervisor = begin(folder=folder)
    [url] = supervisor.wait([NAME])
    (Path(folder.path) / "config.json").write_text("changed since")
    supervisor.end([url])
    [again] = supervisor.wait([NAME], put_weights(store, tmp_path / "later"))
    assert ask(supervisor, f"{again}/model_info") == {"weight_version": "4"}


@pytest.mark.parametrize("change", ["written", "removed", "added"])
def test_a_folder_that_changes_meanwhile_is_refused(begin: Begin, folder: ModelFolder, change: str) -> None:
    file = Path(folder.path) / ("generation_config.json" if change == "added" else "model.safetensors")
    file.unlink(missing_ok=True)
    if change != "removed":
        file.write_text("others")
    with pytest.raises(ServiceFailed, match=rf"model\.path: {file.name} in {folder.path} was changed while"):
        begin(folder=folder).wait([NAME])


def test_there_is_nothing_to_start_on(store: Store) -> None:
    nothing = ServiceSpec(name=NAME, restart=0, store_url=store.url, run="r", owner=1, recipe={})
    with pytest.raises(UserError, match="was given no weights; publish version 0 first"):
        first_weights(nothing).__enter__()


def test_weights_that_are_damaged_are_named_though_sglang_reads_them(begin: Begin, store: Store) -> None:
    [file] = [name for name in listed(store, "r/weights") if name.endswith("config.json")]
    Path(store.uri(file)).write_text("[]")
    with pytest.raises(ServiceFailed, match=r"config\.json is damaged: its bytes do not have the SHA-256"):
        begin().wait([NAME])


# ── a GPU that others use ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """An `nvidia-smi` that reports so many MiB in use at first, and so many later."""

    def make(first: int, later: int) -> None:
        tool, asked = tmp_path / "nvidia-smi", tmp_path / "asked"
        tool.write_text(f"#!/bin/sh\n[ -e {asked} ] && echo 0, {later} || echo 0, {first}\ntouch {asked}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    return make


def test_a_start_that_others_took_the_memory_of_is_repeated(begin: Begin, smi: Callable[[int, int], None]) -> None:
    smi(1000, 22000)
    supervisor = begin(gpus=("0",), restarts=0, flags={"attention-backend": "no-memory-at-first"})
    [url] = supervisor.wait([NAME])
    assert ask(supervisor, f"{url}/model_info") == {"weight_version": "4"}
    assert "other processes took 22.0 GB; restarting it" in supervisor.services[NAME].job.log.read_text()


def test_a_start_that_fails_by_itself_is_not(begin: Begin, smi: Callable[[int, int], None]) -> None:
    smi(1000, 1200)
    supervisor = begin(gpus=("0",), restarts=0, flags={"attention-backend": "no-memory-at-first"})
    with pytest.raises(
        ServiceFailed, match=r"(?s)ended with 1 while starting.*Raise inference\.memory_fraction, split"
    ):
        supervisor.wait([NAME])


def test_no_other_program_gets_its_port_before_it_listens(begin: Begin) -> None:
    [url] = begin(restarts=0, flags={"attention-backend": "port-wanted"}).wait([NAME])
    assert httpx.get(f"{url}/model_info", timeout=LIMIT).status_code == 401


def test_ports_are_free_or_the_ones_asked_for() -> None:
    with choose_port(0, NAME, HOST) as held:
        port = held.getsockname()[1]
        with choose_port(port - 3, "inference-3", HOST) as same, socket.create_server((HOST, port)):
            assert same.getsockname()[1] == port > 0
            with pytest.raises(UserError, match=rf"inference-3 cannot listen on port {port} \(.*in use\)"):
                choose_port(port - 3, "inference-3", HOST)
    with pytest.raises(UserError, match=r"inference\.first_port: inference-9 cannot listen on port 65540"):
        choose_port(65531, "inference-9", HOST)


# ── started by a user ───────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def by_hand(store: Store, port: int = 0, **more: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "areal_tasks.engines.sglang.child", "--host", "127.0.0.1", "--port", str(port)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(FAKE), *sys.path]), "AREALFLOW_STORE": store.url}
    with subprocess.Popen(
        [*command, "--weight-version", "0"], env=environment | more, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            for one in psutil.process_iter():
                with suppress(psutil.Error):
                    if one.environ().get("AREALFLOW_STORE") == store.url:
                        one.kill()


def test_a_server_that_a_user_starts_has_the_token_and_reads_the_store(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ref, port = put_weights(store, tmp_path / "model"), probe_port()
    with by_hand(store, port, AREAL_LLM_SERVER_TOKEN="secret"), httpx.Client(timeout=LIMIT) as client:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: answers(client, url))
        assert client.get(f"{url}/weights_store").status_code == 401
        client.headers["Authorization"] = "Bearer secret"
        assert client.get(f"{url}/weights_store").json() == {"url": store.url}
        order = {"model_path": store.uri(ref.path), "weight_version": "4"}
        assert client.post(f"{url}/update_weights_from_disk", json=order).json()["files"] == ["config.json"]


def answers(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/health_generate").status_code == 401
    except httpx.TransportError:
        return False


def test_a_user_has_to_choose_a_token(store: Store) -> None:
    with by_hand(store) as process:
        assert "AREAL_LLM_SERVER_TOKEN is not set" in process.communicate()[1]
