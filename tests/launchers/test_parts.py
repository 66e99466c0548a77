"""A server over several machines: its parts meet, fetch weights together, and end together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
from checkpoints import publish
from listeners import beyond_loopback
from remote_sglang import memory_of, opened, processes_of, supervised
from torch.distributed import HashStore
from waiting import LIMIT, wait_until

from areal_tasks.engines.external import FETCH
from areal_tasks.engines.service import part_name, server_of
from areal_tasks.engines.sglang import parts as of_parts
from areal_tasks.engines.sglang.from_store import LOAD
from areal_tasks.engines.sglang.parts import Parts
from areal_tasks.launchers.supervisor import Supervisor
from areal_tasks.store.backend import Store, Unavailable
from schemas.errors import UserError
from schemas.manifest import WeightsRef

NAME = "inference-0"
NAMES = [part_name(NAME, node) for node in range(2)]


@pytest.fixture
def refs(s3_store: Store, tmp_path: Path) -> list[WeightsRef]:
    return [publish(s3_store, tmp_path, version) for version in range(2)]


@pytest.fixture
def supervisor(s3_store: Store, refs: list[WeightsRef], tmp_path: Path) -> Iterator[Supervisor]:
    """A stand-in for SGLang on two machines, behind node agents; only its first part has been named to the caller."""
    parts = [(name, node, NAME) for node, name in enumerate(NAMES)]
    with supervised(s3_store, refs[0], tmp_path, parts, tensor_parallel=2, nodes=2) as made:
        yield made


def ask(supervisor: Supervisor, url: str, order: Any = None) -> Any:
    access = supervisor.access
    with httpx.Client(headers=access.headers, verify=access.trust, timeout=LIMIT) as client:
        answer = client.get(url) if order is None else client.post(url, json=order)
    return answer.raise_for_status().json()


def of_sglang(store: Store) -> dict[int, psutil.Process]:
    """The processes of the two parts' children, by the number of their machine."""
    found = {}
    for process in processes_of(store):
        with suppress(psutil.Error):
            if "areal_tasks.engines.sglang.child" in (line := process.cmdline()):
                found[int(line[line.index("--node-rank") + 1])] = process
    return found


def test_the_parts_meet_fetch_and_restart_together(
    supervisor: Supervisor, s3_store: Store, refs: list[WeightsRef]
) -> None:
    [url] = supervisor.wait([NAME])
    about = ask(supervisor, f"{url}/about")
    assert (about["settings"]["nnodes"], about["settings"]["tp_size"]) == (2, 2) and url.startswith("https://")
    wait_until(lambda: supervisor.poll(NAMES)[1:], "the other part says so, too")
    assert supervisor.services[NAMES[1]].url.startswith("http://127.0.0.1:"), "which only says that it is healthy"
    children = of_sglang(s3_store)
    assert beyond_loopback(children.values()) == {}
    order = {"model_path": s3_store.uri(refs[1].path), "weight_version": "1"}
    assert ask(supervisor, f"{url}{FETCH}", order) == {"success": True}
    folder = memory_of(s3_store, refs[1])
    assert all(folder in opened(process) for process in children.values()), "each machine has them"
    assert ask(supervisor, f"{url}{LOAD}", order)["folder"] == order["model_path"], "each scheduler finds them itself"
    children[1].kill()
    wait_until(lambda: not supervisor.poll([NAME]), "the first part ends, too")
    assert supervisor.wait([NAME]) and {supervisor.services[name].spec.restart for name in NAMES} == {1}
    supervisor.retire(NAME)
    assert not supervisor.services
    wait_until(lambda: not of_sglang(s3_store), "the end of both")


# ── weights ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def following(*fetches: Callable[[str], object]) -> Iterator[Parts]:
    """The first part of a server whose other parts fetch by these functions."""
    store = HashStore()
    for node, fetch in enumerate(fetches, start=1):
        other = Parts(store, len(fetches) + 1)
        threading.Thread(target=other.follow, args=(node, fetch), daemon=True).start()
    yield Parts(store, len(fetches) + 1)


def test_all_parts_fetch_at_the_same_time() -> None:
    seen, both = dict[str, list[str]](), threading.Barrier(3)

    def part(name: str) -> Callable[[str], object]:
        return lambda source: (both.wait(LIMIT), seen.setdefault(source, []).append(name))

    with following(part("second"), part("third")) as parts:
        for source in ("s3://a", "s3://b"):
            with parts.fetching(source):
                both.wait(LIMIT)
            assert sorted(seen[source]) == ["second", "third"]


@pytest.mark.parametrize(
    "error",
    [UserError("x is damaged"), OSError("the disk is full"), Unavailable("it is away"), RuntimeError("no new thread")],
)
def test_one_that_cannot_fetch_says_why_and_tries_the_next(error: Exception) -> None:
    def fetch(source: str) -> None:
        if source == "s3://a":
            raise error

    with following(lambda source: None, fetch) as parts:
        with pytest.raises(UserError, match=str(error)) as refused, parts.fetching("s3://a"):
            pass
        assert isinstance(refused.value, Unavailable) == isinstance(error, Unavailable), "503 is tried again"
        with pytest.raises(ZeroDivisionError), parts.fetching("s3://b"):
            raise ZeroDivisionError  # the first part's own error is not hidden, nor waits for the others
        with parts.fetching("s3://c"):
            pass


def updater(success: bool) -> Any:
    class Updater:
        def update_weights_from_disk(self, order: Any) -> Any:
            read = (Path(order.model_path) / "config.json").read_text()
            return SimpleNamespace(success=success, message=read)

    return Updater


def test_a_scheduler_loads_from_a_folder_of_its_machine(
    s3_store: Store, refs: list[WeightsRef], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_parts, "open_store", lambda: s3_store)
    kind = updater(success=True)
    of_parts.load_from_store(kind, first_machine=False)
    for source, read in ((s3_store.uri(refs[1].path), 1), (str(tmp_path / "model-0"), 0)):
        order = SimpleNamespace(model_path=source)
        assert kind().update_weights_from_disk(order).message == f"{tmp_path.name} {read}"


@pytest.mark.parametrize("first", [True, False])
def test_a_load_that_fails_on_another_machine_ends_the_server(
    s3_store: Store, refs: list[WeightsRef], monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """The answer comes from the first machine, and would say that all is well."""
    monkeypatch.setattr(of_parts, "open_store", lambda: s3_store)
    kind = updater(success=False)
    of_parts.load_from_store(kind, first_machine=first)
    order = SimpleNamespace(model_path=s3_store.uri(refs[1].path))
    if first:
        assert not kind().update_weights_from_disk(order).success
    else:
        with pytest.raises(RuntimeError):
            kind().update_weights_from_disk(order)


def test_names_of_parts() -> None:
    assert NAMES == ["inference-0", "inference-0.1"]
    assert {server_of(name) for name in NAMES} == {NAME} and server_of("trainer-1") == "trainer-1"
