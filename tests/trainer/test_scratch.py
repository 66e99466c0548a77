"""What a trainer fetches from a store elsewhere is gone from its disk when the command has ended."""

from __future__ import annotations

import asyncio
import tempfile
import uuid
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from trainer_builders import World, advantage, rlhf_recipe, rollout

from areal_tasks.engines.trainer.commands import (
    Checkpoint,
    Compare,
    Finish,
    Finished,
    Load,
    Logprobs,
    Publish,
    Written,
)
from areal_tasks.engines.trainer.process import make_app
from areal_tasks.store.backend import Store
from areal_tasks.store.objects.s3 import S3Backend
from areal_tasks.temporary import LOCK
from schemas.manifest import WeightsRef
from schemas.record import Record


async def _post(app: Starlette, path: str, body: Record) -> httpx.Response:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://trainer") as client:
        return await client.post(path, content=body.model_dump_json())


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def world(s3_store: Store, tiny: Path) -> World:
    return World(s3_store, tiny, rlhf_recipe(), run=f"scratch-{uuid.uuid4().hex[:8]}")


def _tables(scratch: Path) -> list[Path]:
    return sorted(scratch.glob("arealflow-trainer-*/tables/*"))


@pytest.fixture
def fetches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tables that are fetched, in order."""
    found: list[str] = []
    original = S3Backend.fetch_file

    def fetch_file(store: S3Backend, path: str, target: Path) -> str:
        found.append(Path(path).name)
        return original(store, path, target)

    monkeypatch.setattr(S3Backend, "fetch_file", fetch_file)
    return found


def test_a_rollout_that_was_scored_is_there_to_train_and_gone_afterwards(
    world: World, scratch: Path, fetches: list[str]
) -> None:
    trainer, table = world.trainer(), rollout([9, 4, 13, 6])
    command = world.train_command(0, {"rollout": table, "advantage": advantage(table)})
    trainer.logprobs(
        Logprobs(owner=1, version=0, which="policy", table=command.tables["rollout"], prefix=world.prefix())
    )
    trainer.clear()
    assert [file.stem for file in _tables(scratch)] == [command.tables["rollout"].shards[0].sha256]
    fetches.clear()
    trainer.train(command)
    trainer.clear()
    assert fetches == ["advantage-00000.parquet"]
    assert not _tables(scratch)


def test_copies_from_s3_do_not_pile_up(world: World, scratch: Path) -> None:
    """After each command nothing is left but a rollout that was scored, until training has read it."""
    app = make_app(world.spec())

    def done(path: str, body: Record, kept: int = 0) -> str:
        answer = asyncio.run(_post(app, path, body))
        assert answer.status_code == 200, answer.text
        left = [file for file in scratch.glob("arealflow-*/**/*") if file.is_file() and file.name != LOCK]
        assert left == _tables(scratch) and len(left) == kept
        return answer.text

    def named(kind: str) -> dict[str, Any]:
        return {"owner": 1, "version": 1, "prefix": world.folder(kind, 1, "a")}

    def put_weights() -> WeightsRef:
        written = Written.model_validate_json(done("/publish", Publish(**named("weights"))))
        return world.commit("weights", 1, "a", written.files)

    def put_state() -> WeightsRef:
        asyncio.run(_post(app, "/checkpoint", Checkpoint(**named("checkpoint"))))
        found = Finished.model_validate_json(done("/finish", Finish(**named("checkpoint"), wait=True)))
        return world.commit("checkpoint", 1, "a", found.files or ())

    table = rollout([9, 4, 13, 6])
    done("/load", Load(owner=1, version=0, weights=world.initial))
    ask = Logprobs(owner=1, version=0, which="reference", table=world.write("rollout", table), prefix=world.prefix())
    done("/logprobs", ask, kept=1)
    done("/train", world.train_command(0, {"rollout": table, "advantage": advantage(table)}))
    weights, state = put_weights(), put_state()
    assert '"difference":0.0' in done("/compare", Compare(owner=1, version=1, weights=weights))
    done("/load", Load(owner=1, version=1, weights=weights, checkpoint=state))
    assert '"difference":0.0' in done("/compare", Compare(owner=1, version=1, weights=weights))
