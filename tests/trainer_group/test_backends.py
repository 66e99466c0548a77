"""Every backend on two ranks does what `local` does alone: losses, weights, checkpoints, retries, skipped steps."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trainer_builders import World, advantage, rollout, with_column
from two_ranks import STEPS, Player, go_on, play

from areal_tasks.engines.trainer.group import Group
from areal_tasks.engines.trainer.ranks import environment
from areal_tasks.store.shards import read_table
from schemas.manifest import TableRef

#: Options of each backend, and how far its weights may be from those of `local`.
BACKENDS: dict[str, dict[str, Any]] = {
    "fsdp2": {"backend": "fsdp2"},
    **{f"zero-{stage}": {"backend": "deepspeed", "zero_stage": stage} for stage in range(4)},
}
TOLERANCE = {"zero-3": 2e-5}
#: Tokens of the samples of each iteration: an odd number of micro-batches of one sample, fewer samples than ranks, …
LENGTHS = [
    [9, 4, 13, 6, 11, 3, 8, 5, 10, 7, 12, 5],
    [14, 15, 16],
    [11],
    [9, 8, 7, 6, 5],
    [12, 3, 14, 3, 16, 3, 15],
    [9, 4, 13, 6, 11, 3, 8],
    [9, 4, 13, 6],
]
ROWS = 12


@pytest.fixture(scope="module")
def script(world: World) -> dict[str, Any]:
    """The commands. The last iteration's loss is infinite."""
    trains = [_train(world, version, lengths) for version, lengths in enumerate(LENGTHS)]
    table = world.write("rollout", rollout(LENGTHS[0]))
    return {
        "spec": world.spec().model_dump(mode="json"),
        "initial": world.initial.model_dump(mode="json"),
        "trains": trains,
        "logprobs": {"owner": 1, "table": table.model_dump(mode="json")},
    }


def _train(world: World, version: int, lengths: list[int]) -> dict[str, Any]:
    table = rollout(lengths, seed=version)
    gains = advantage(table, seed=version)
    if version == len(LENGTHS) - 1:
        gains = with_column(gains, "advantages", [[float("inf")] * n for n in lengths])
    return world.train_command(version, {"rollout": table, "advantage": gains}, prefix=None).model_dump(mode="json")


@pytest.fixture(scope="module")
def local(script: dict[str, Any]) -> dict[str, Any]:
    """What `local` makes of it, in this process."""
    return play(Player(script, "local", {}, Group()))


@pytest.fixture(scope="module")
def answers(script: dict[str, Any], local: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks make of it with each backend, in two processes as torchrun would start them."""
    folder = tmp_path_factory.mktemp("ranks")
    ranked = {name: {**options, "ranks": 2} for name, options in BACKENDS.items()}
    text = json.dumps({**script, "backends": ranked, "local_checkpoint": local["checkpoint"]})
    (folder / "script.json").write_text(text)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    ranks = [_start(folder, rank, port) for rank in (0, 1)]
    ends = [process.wait(200) for process in ranks]
    assert ends == [0, 0], "\n".join((folder / f"{rank}.log").read_text()[-3000:] for rank in (0, 1))
    found: dict[str, Any] = json.loads((folder / "answers.json").read_text())
    return found


def _start(folder: Path, rank: int, port: int) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([*(p for p in sys.path if p), str(Path(__file__).parent)])
    told = {**environment(rank, 2, port), "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, str(Path(__file__).with_name("two_ranks.py")), str(folder)]
    with (folder / f"{rank}.log").open("wb") as log:
        return subprocess.Popen(command, env={**os.environ, **told}, stdout=log, stderr=log)


def _weights(world: World, prefix: str) -> dict[str, torch.Tensor]:
    folder = world.store.local(prefix)
    assert folder is not None
    return load_file(folder / "model.safetensors")


def _distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("name", BACKENDS)
def test_two_ranks_have_the_losses_and_weights_of_one(
    name: str, world: World, local: dict[str, Any], answers: dict[str, Any]
) -> None:
    found = answers[name]
    for ours, theirs in zip(found["metrics"], local["metrics"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        assert (ours["tokens"], ours["samples"]) == (theirs["tokens"], theirs["samples"])
    initial = _weights(world, world.folder("weights", 0, "first"))
    trained = _weights(world, local["trained"])
    distance = _distance(_weights(world, found["trained"]), trained)
    print(f"{name}: largest difference of a weight {distance:.2g} after {STEPS} steps")
    assert distance <= TOLERANCE.get(name, 5e-6)
    assert _distance(initial, trained) > 1e-3


@pytest.mark.parametrize("name", BACKENDS)
def test_a_repeat_steps_on_no_rank(name: str, answers: dict[str, Any]) -> None:
    assert answers[name]["repeat"] == answers[name]["metrics"][-1]


@pytest.mark.parametrize("name", BACKENDS)
def test_logprobs_are_those_of_one(name: str, world: World, local: dict[str, Any], answers: dict[str, Any]) -> None:
    for which, column in (("policy", "prox_logprobs"), ("reference", "ref_logprobs")):
        ours, theirs = (
            read_table(world.store, TableRef.model_validate(next(iter(found[which].values()))))
            for found in (answers[name], local)
        )
        assert ours.num_rows == ROWS
        assert ours["sample_id"].equals(theirs["sample_id"])
        for one, other in zip(ours[column].to_pylist(), theirs[column].to_pylist(), strict=True):
            assert one == pytest.approx(other, abs=2e-5)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_checkpoint_of_two_ranks_goes_on_alone(
    name: str, world: World, script: dict[str, Any], local: dict[str, Any], answers: dict[str, Any]
) -> None:
    """Model, optimizer and progress: the sixth step has the sixth step's loss, and leads to the same weights."""
    alone = Player(script, f"local-after-{name}", {}, Group())
    alone.load()
    alone.train(0)
    found = go_on(alone, answers[name]["checkpoint"], "six")
    assert found["step"] == STEPS + 1
    assert found["sixth"]["loss"] == pytest.approx(answers[name]["sixth"]["loss"], abs=1e-6)
    assert _distance(_weights(world, found["six"]), _weights(world, answers[name]["six"])) <= 1e-6
    assert _distance(_weights(world, found["six"]), _weights(world, answers[name]["trained"])) > 1e-4


@pytest.mark.parametrize("name", BACKENDS)
def test_a_checkpoint_of_one_goes_on_on_two_ranks(
    name: str, world: World, local: dict[str, Any], answers: dict[str, Any]
) -> None:
    found = answers[name]["from_local"]
    assert found["step"] == STEPS + 1
    assert found["sixth"]["loss"] == pytest.approx(local["sixth"]["loss"], abs=1e-6)
    assert _distance(_weights(world, found["six"]), _weights(world, local["six"])) <= 1e-6


@pytest.mark.parametrize("name", [*BACKENDS, "local"])
def test_a_step_that_is_not_finite_changes_no_weight(
    name: str, world: World, local: dict[str, Any], answers: dict[str, Any]
) -> None:
    found = local if name == "local" else answers[name]
    assert (found["poisoned"]["skipped_steps"], found["poisoned"]["optimizer_steps"]) == (1, 0)
    assert _distance(_weights(world, found["six"]), _weights(world, found["skipped"])) == 0
