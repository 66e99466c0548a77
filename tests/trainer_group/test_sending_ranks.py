"""Each rank of a trainer gives the server on its GPU the weights: the same bits as through the store."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from trainer_builders import World, advantage, rlhf_recipe, rollout
from waiting import LIMIT
from warm_processes import Popen

from areal_tasks.engines.ports import HOST
from areal_tasks.engines.trainer.ranks import Place, environment
from areal_tasks.store.commit import new_attempt

TOKEN = "secret"
RECEIVER = Path(__file__).parents[1] / "transports" / "receiver.py"


def _start(folder: Path, rank: int, port: int) -> Popen:
    path = os.pathsep.join([*(p for p in sys.path if p), str(Path(__file__).parent)])
    told = environment(Place(rank, rank, 2, 2, True), HOST, port) | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("sending_ranks.py")), str(folder)]
    with (folder / f"{rank}.log").open("wb") as log:
        return Popen(command, env={**os.environ, **told, "DS_ACCELERATOR": "cpu"}, stdout=log, stderr=log)


def _train(world: World, version: int) -> dict[str, Any]:
    table = rollout([9, 4, 13, 6], seed=version, version=version)
    return world.train_command(version, {"rollout": table, "advantage": advantage(table)}).model_dump(mode="json")


def _played(folder: Path, script: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What rank 0 reports, and the processes of the ranks."""
    servers = [Popen([sys.executable, str(RECEIVER), TOKEN], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    urls = [f"http://127.0.0.1:{int(server.stdout.readline())}" for server in servers if server.stdout]
    (folder / "script.json").write_text(json.dumps({**script, "urls": urls, "token": TOKEN}))
    with socket.socket() as held:  # the first rank can listen there, and no other process is given the port
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((HOST, 0))
        ranks = [_start(folder, rank, held.getsockname()[1]) for rank in range(2)]
        code = ranks[0].wait(LIMIT)
    for process in (*servers, ranks[1]):
        process.kill()
        process.wait()
    assert code == 0, "\n".join((folder / f"{rank}.log").read_text()[-3000:] for rank in range(2))
    return json.loads((folder / "answers.json").read_text()), [str(rank.pid) for rank in ranks]


@pytest.mark.parametrize(
    "trainer",
    [
        pytest.param({"backend": "fsdp2"}, id="fsdp2"),
        pytest.param(
            {"backend": "deepspeed", "zero_stage": 3},
            id="zero-3",
            marks=pytest.mark.slow("the other backend shows it in `make test`"),
        ),
    ],
)
def test_each_server_gets_the_weights_of_the_rank_on_its_gpu(
    trainer: dict[str, Any], world: World, tmp_path: Path
) -> None:
    """While all ranks are free (η = 0), while they train on (η > 0), and while the server of one rank fails."""
    if trainer["backend"] == "deepspeed":
        pytest.importorskip("deepspeed")
    world.recipe = rlhf_recipe(trainer={"threads": 1, "ranks": 2, **trainer})
    prefixes = [world.folder("weights", version, new_attempt()) for version in range(3)]
    answers, makers = _played(
        tmp_path,
        {
            "spec": world.spec().model_copy(update={"sending": (0, 1)}).model_dump(mode="json"),
            "initial": world.initial.model_dump(mode="json"),
            "trains": [_train(world, 0), _train(world, 1)],
            "prefixes": prefixes,
        },
    )
    for version, prefix in enumerate(prefixes):
        folder, answer = world.store.local(prefix), answers[str(version)]
        assert folder is not None
        written = {name: tensor.float().tolist() for name, tensor in load_file(folder / "model.safetensors").items()}
        reached = 2 if version < 2 else 1
        assert len(answer["gone"]) == 2 - reached
        for state, maker in zip(answer["states"][:reached], makers, strict=False):
            assert (state["version"], state["makers"]) == (str(version), [maker])
            assert state["tensors"] == written
            assert state["flushes"] == (version != 1)
    assert "out of order" in next(iter(answers["2"]["gone"].values()))
    assert answers["2"]["states"][1]["version"] == "1", "it is the supervisor's to end"
