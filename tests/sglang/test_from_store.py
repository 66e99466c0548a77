"""Orders to load weights that name them by their URL in the store, in front of an application that reads folders."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from checkpoints import publish
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from areal_tasks.engines import fetching
from areal_tasks.engines.external import FETCH, STORE_OF
from areal_tasks.engines.sglang.from_store import LOAD, FromStore
from areal_tasks.store.backend import Store, Unavailable
from areal_tasks.store.objects.files import read_weights


async def load(request: Request) -> JSONResponse:
    order = await request.json()
    folder = Path(order["model_path"])
    return JSONResponse({"success": True, "order": order, "read": (folder / "config.json").read_text()})


@pytest.fixture
def app(s3_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FromStore]:
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(fetching, "MEMORY", tmp_path / "memory")
    made = FromStore(Starlette(routes=[Route(LOAD, load, methods=["POST"])]), s3_store)
    yield made
    made._fetched.close()
    assert list((tmp_path / "memory").iterdir()) == []


def ask(app: FromStore, path: str, order: Any = None) -> httpx.Response:
    async def once() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await (client.get(path) if order is None else client.post(path, json=order))

    return asyncio.run(once())


def test_weights_of_the_store_are_loaded_from_a_folder(app: FromStore, s3_store: Store, tmp_path: Path) -> None:
    refs = [publish(s3_store, tmp_path, version) for version in range(3)]
    for ref in refs:
        order = {"model_path": s3_store.uri(ref.path), "weight_version": str(ref.version), "flush_cache": True}
        assert ask(app, FETCH, order).json() == {"success": True}
        for _ in range(2):  # as for the proof that weights arrive
            answer = ask(app, LOAD, order).json()
            assert answer["read"] == f"{tmp_path.name} {ref.version}"
            assert answer["order"] == order | {"model_path": answer["order"]["model_path"]}
    assert len(list((tmp_path / "memory").iterdir())) == 2, "the last, and those before"


def test_parts_on_other_machines_fetch_too_and_find_the_folder_themselves(
    app: FromStore, s3_store: Store, tmp_path: Path
) -> None:
    away = [Unavailable("the store is away there")]

    class Others:
        @contextmanager
        def fetching(self, source: str) -> Iterator[None]:
            yield
            if away:
                raise away.pop()

    app.parts = Others()  # type: ignore[assignment]
    ref = publish(s3_store, tmp_path, 0)
    order = {"model_path": s3_store.uri(ref.path)}
    assert ask(app, FETCH, order).status_code == 503, "the flow tries again"
    assert ask(app, FETCH, order).json() == {"success": True}
    assert app._folder(order["model_path"]) == order["model_path"], "the order to load names what all of them have"
    assert app._folder(str(tmp_path)) == str(tmp_path)


def test_folders_are_passed_on(app: FromStore, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("own")
    order = {"model_path": str(tmp_path)}
    assert ask(app, LOAD, order).json() == {"success": True, "order": order, "read": "own"}


def test_it_names_its_store(app: FromStore, s3_store: Store) -> None:
    assert ask(app, STORE_OF).json() == {"url": s3_store.url}


def test_what_cannot_be_fetched_is_refused_before_it_is_loaded(
    app: FromStore, s3_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = publish(s3_store, tmp_path, 0)
    [file] = read_weights(s3_store, ref).files
    s3_store.put(file.path, b"x" * file.bytes)
    for path in (FETCH, LOAD):
        answer = ask(app, path, {"model_path": s3_store.uri(ref.path)})
        assert answer.status_code == 400 and "config.json is damaged" in answer.json()["message"]
    for order in ({"model_path": "s3://elsewhere/w.json"}, {}, []):
        assert ask(app, LOAD, order).status_code == 400

    def away(*_: object) -> None:
        raise Unavailable("the store is away")

    monkeypatch.setattr(fetching, "read_record", away)
    assert ask(app, LOAD, {"model_path": s3_store.uri(ref.path)}).status_code == 503
