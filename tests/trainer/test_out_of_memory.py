"""Every command in which memory runs out says which knobs to turn; so does a service that it ended."""

from __future__ import annotations

import traceback
from typing import Any, NoReturn

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from trainer_builders import World, advantage, rlhf_recipe, rollout

from areal_tasks.engines.trainer.checkpoint import Saving
from areal_tasks.engines.trainer.commands import COMMANDS, Checkpoint, Finish, Load, Receiver, Send
from areal_tasks.engines.trainer.service import Trainer
from areal_tasks.launchers.advice import TRAINER_MEMORY, advice
from schemas.errors import UserError

OUT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def _runs_out(*_: Any, **__: Any) -> NoReturn:
    raise OUT


def _command(world: World, trainer: Trainer, name: str) -> Any:
    """A command of that name, after which the backend has no memory left."""
    if name == "load":
        return Load(owner=1, version=0, weights=world.initial, checkpoint=world.checkpoint(trainer, "a"))
    if name == "train":
        table = rollout([9, 4, 13, 6])
        return world.train_command(0, {"rollout": table, "advantage": advantage(table)})
    owned: dict[str, Any] = {"owner": 1, "version": 0}
    if name in ("publish", "checkpoint"):
        return COMMANDS[name].model_validate({**owned, "prefix": world.folder("checkpoint", 0, "b")})
    if name == "finish":
        prefix = world.folder("checkpoint", 0, "b")
        trainer.checkpoint(Checkpoint(**owned, prefix=prefix))
        return Finish(**owned, prefix=prefix, wait=True)
    if name == "send":
        return Send(**owned, transport="tensor", receivers=(Receiver(url="http://127.0.0.1:9", ranks=1),), token="t")
    if name == "keep":
        return COMMANDS[name].model_validate(owned)
    extra = {"which": "policy", "prefix": world.prefix(), "table": world.write("rollout", rollout([9]))}
    return COMMANDS[name].model_validate({**owned, **(extra if name == "logprobs" else {"weights": world.initial})})


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_runs_out_names_the_knobs(name: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.recipe = rlhf_recipe()
    trainer = world.trainer()
    if name == "finish":
        monkeypatch.setattr(Saving, "write", _runs_out)  # in a thread
    command = _command(world, trainer, name)
    for part in ("load", "learn", "score", "named_weights", "plan_checkpoint"):
        monkeypatch.setattr(trainer.backend, part, _runs_out)
    with pytest.raises(UserError) as caught:
        trainer.run(command)
    assert "Tried to allocate 2.00 GiB" in str(caught.value) and TRAINER_MEMORY in str(caught.value)


@pytest.mark.parametrize("found", [OUT, CheckpointException("load", {0: (OUT, traceback.StackSummary())})])
def test_a_checkpoint_for_which_there_is_no_room_is_not_called_another_models(
    found: BaseException, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> NoReturn:
        raise found

    world.recipe = rlhf_recipe()
    trainer = world.trainer()
    command = _command(world, trainer, "load")
    monkeypatch.setattr("torch.distributed.checkpoint.load", fails)
    with pytest.raises(UserError, match="the trainer ran out of memory") as caught:
        trainer.run(command)
    assert TRAINER_MEMORY in str(caught.value)


def test_a_trainer_that_it_ended_is_reported_with_the_same_words() -> None:
    assert TRAINER_MEMORY in advice("trainer", f"torch.OutOfMemoryError: {OUT}")
