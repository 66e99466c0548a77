"""A trainer that fails by itself is replaced and asked again; what fails for ever ends the run with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import failing_trainer
import httpx
import pytest
from failing_trainer import FAILURE, WORDS
from pydantic import ValidationError
from stage_driver import digests, drive, tiny_sft
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from areal_tasks.engines import starting, trainer_client
from areal_tasks.engines.access import Access
from areal_tasks.engines.service import endpoint
from areal_tasks.engines.trainer import process
from areal_tasks.engines.trainer.commands import Load, Train, Trained
from areal_tasks.engines.trainer.fencing import StaleCommand, Superseded
from areal_tasks.engines.trainer.group import GroupBroken
from areal_tasks.engines.trainer.local import LocalBackend
from areal_tasks.engines.trainer_client import TrainerDown
from areal_tasks.engines.watchdog import Watchdog
from areal_tasks.launchers.supervisor import ServiceFailed
from areal_tasks.store.backend import Unavailable
from schemas.errors import UserError
from schemas.recipe.launcher import Launcher


def test_a_trainer_that_failed_once_is_replaced_and_no_bit_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real process, whose second iteration fails half-way: its memory is not trusted any more."""
    drive(tmp_path, "whole", tiny_sft(schedule={"iterations": 2}))
    fails = tmp_path / "fails"
    fails.touch()
    monkeypatch.setenv(FAILURE, str(fails))
    monkeypatch.setitem(starting.MODULES, starting.TRAINER, failing_trainer.__name__)
    drive(tmp_path, "r", tiny_sft(schedule={"iterations": 2}, launcher={"type": "local"}))
    assert not fails.exists() and digests(tmp_path, "r") == digests(tmp_path, "whole")
    assert {path.name for path in (tmp_path / "logs" / "r").iterdir()} == {"trainer-1-0.log", "trainer-1-1.log"}


def test_a_failure_that_repeats_itself_ends_the_run_with_what_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []

    def learn(*_: Any) -> None:
        steps.append(1)
        raise RuntimeError(f"{WORDS}\nCompile with `TORCH_USE_CUDA_DSA` …")

    monkeypatch.setattr(LocalBackend, "learn", learn)
    with pytest.raises(ServiceFailed) as ended:
        drive(tmp_path, "r", tiny_sft(launcher={"restarts": 2}))
    assert len(steps) == 3, "once, and after each of two restarts"
    assert "'trainer' failed 3 times; launcher.restarts allows no more." in str(ended.value)
    assert f"failed at /train: RuntimeError: {WORDS} (engines/trainer/" in str(ended.value)


def test_a_mistake_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []

    def learn(*_: Any) -> None:
        steps.append(1)
        raise MemoryError

    monkeypatch.setattr(LocalBackend, "learn", learn)
    with pytest.raises(UserError, match=r"the trainer ran out of memory: .* lower trainer\.micro_batch_tokens"):
        drive(tmp_path, "r", tiny_sft())
    assert len(steps) == 1


def malformed() -> Exception:
    with pytest.raises(ValidationError) as caught:
        Load.model_validate({})
    return caught.value


@pytest.mark.parametrize(
    ("error", "meant", "says"),
    [
        (StaleCommand("version 3 is held"), TrainerDown, "/train does not fit the trainer's state: version 3 is held"),
        (Superseded("a later start commands"), UserError, "refused /train: a later start commands"),
        (malformed(), UserError, "malformed command"),
        (Unavailable("the store is away"), Unavailable, "^the store is away$"),
        (UserError("out of memory"), UserError, "out of memory"),
        (UserError("a loss that is no number"), UserError, "no number"),
        (GroupBroken("rank 1: out of memory", by_user=True), UserError, "rank 1: out of memory"),
        (GroupBroken("rank 1: RuntimeError: NCCL"), TrainerDown, "failed at /train: rank 1: RuntimeError: NCCL"),
        (RuntimeError("NCCL"), TrainerDown, "failed at /train: RuntimeError: NCCL"),
        (ValueError("a mistake of ours"), TrainerDown, "failed at /train: ValueError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_the_caller_learns_what_kind_of_error_it_was(error: Exception, meant: type[Exception], says: str) -> None:
    async def fails(_request: Any) -> Any:
        raise error

    app = Starlette(routes=[Route("/train", endpoint(fails, process._status, process._text), methods=["POST"])])
    sent = TestClient(app).post("/train")
    broken: list[str] = []
    client = trainer_client.TrainerClient(
        "trainer", "http://trainer", Access(), Watchdog(Launcher(), lambda _name, _why: None), broken.append
    )
    answer = httpx.Response(sent.status_code, content=sent.content)
    client.http = httpx.Client(transport=httpx.MockTransport(lambda _: answer), base_url="http://trainer")
    with pytest.raises(meant, match=says) as caught:
        client.run(Train(owner=1, version=0, digest="", kind="sft", iteration=0, tables={}), Trained)
    assert type(caught.value) is meant
    assert bool(broken) == ("failed at" in says)
