"""Every backend on several ranks does what `local` does alone: losses, weights, checkpoints, retries, skipped steps."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_builders import TINY, World, advantage, rollout, with_column
from two_ranks import STEPS, Player, go_on, play, publish_twice
from warm_processes import Popen

from areal_tasks.data.scratch import make_scratch
from areal_tasks.engines.ports import HOST
from areal_tasks.engines.trainer.group import Group
from areal_tasks.engines.trainer.ranks import Place, environment
from areal_tasks.store.objects.files import read_weights
from areal_tasks.store.shards import read_table
from schemas.manifest import TableRef, WeightsRef
from tests.trainer.families import make_family


def _made(backend: str, dtype: str = "float32", **options: Any) -> dict[str, Any]:
    return {"trainer": {"backend": backend, **options}, "model": {"dtype": dtype}}


#: What each changes in the recipe.
BACKENDS: dict[str, dict[str, Any]] = {
    "fsdp2": _made("fsdp2"),
    "hsdp": _made("fsdp2", ranks=4, replicas=2),
    "fsdp2-offload": _made("fsdp2", cpu_offload=True),
    **{f"zero-{stage}": _made("deepspeed", zero_stage=stage) for stage in range(4)},
    "zero-3-offload": _made("deepspeed", zero_stage=3, cpu_offload=True),
    "fsdp2-bf16": _made("fsdp2", "bfloat16"),
    "zero-0-bf16": _made("deepspeed", "bfloat16", zero_stage=0),
    "zero-3-bf16": _made("deepspeed", "bfloat16", zero_stage=3),
    "zero-2-bf16-offload": _made("deepspeed", "bfloat16", zero_stage=2, cpu_offload=True),
}
LOCAL = {"float32": "local", "bfloat16": "local-bf16"}
#: Those that are given a mixture of experts as well.
EXPERTS = ["fsdp2", "zero-2", "zero-3"]
#: Those that restore a checkpoint with each rank on a machine of its own.
APART = ["fsdp2", "zero-3"]
#: Between them: either backend, models and gradients sharded or whole, either precision, state on either side.
QUICK = ("fsdp2", "hsdp", "zero-3", "zero-2-bf16-offload")
ALL_OTHERS = pytest.mark.slow("other combinations of what the three quick ones show")


def _marked(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else ALL_OTHERS) for name in names]


NAMES = _marked(BACKENDS)


#: Something for each of some backends.
Named = dict[str, Any]


@dataclass(frozen=True)
class Close:
    """How far from `local`: the loss and the (relative) gradient norm of a step, weights after five, logprobs, and
    weights a step after a checkpoint."""

    loss: float = 1e-6
    norm: float = 1e-5
    weights: float = 5e-6
    logprobs: float = 2e-5
    resumed: float = 1e-6


ZERO_3 = Close(weights=2e-5)
#: In bfloat16 (2⁻⁸) other rows in a product are rounded otherwise; where a gradient's sign follows, AdamW's steps of
#: 1e-3 lead apart. Above stage 0 the fp32 weights begin as the rounded ones, too.
ROUNDED = Close(loss=5e-4, norm=5e-3, weights=5e-3, logprobs=5e-3, resumed=5e-4)
CLOSE = {"zero-3": ZERO_3, "zero-3-offload": ZERO_3, **{name: ROUNDED for name in BACKENDS if "bf16" in name}}
#: What each rank takes, at most, while it loads a model, or a checkpoint over it: 1 is the whole model in fp32.
#: A checkpoint is read into what is there, in pieces; with those, the plans that the ranks exchange are all it takes.
SHARES = {
    "fsdp2": {"load": 0.5, "reference": 0.5, "restore": 0.1},
    "hsdp": {"load": 0.5, "reference": 0.5},
    "fsdp2-bf16": {"load": 0.5, "reference": 0.25},
    "zero-3": {"reference": 0.5},
    "zero-3-bf16": {"reference": 0.25},
}
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
#: Of a rollout that is scored: one sample, so that all ranks but one have none.
FEW = [11]


@pytest.fixture(scope="module")
def experts(world: World, tmp_path_factory: pytest.TempPathFactory) -> World:
    """Another run in that store, with a tiny DeepSeek-V3: experts, and buffers that belong to the checkpoint."""
    return World(world.store, make_family("deepseek_v3", tmp_path_factory.mktemp("experts")), world.recipe, "experts")


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which neither one tensor nor the plans for a checkpoint are a large part; in bfloat16."""
    size = TINY.model_copy(update={"layers": 8, "hidden": 128, "intermediate": 192})
    folder = make_scratch(size, 7, 64, tmp_path_factory.mktemp("deep"))
    file = folder / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def script(world: World, experts: World, deep: Path) -> dict[str, Any]:
    """The commands. The last iteration's loss is infinite."""
    trains = [_train(world, version, lengths) for version, lengths in enumerate(LENGTHS)]
    made = {"trains": trains, "logprobs": _scored(world, LENGTHS[0]), "few": _scored(world, FEW)}
    return {**_named(world), **made, "deep": str(deep), "experts": _named(experts) | {"trains": trains[:1]}}


def _scored(world: World, lengths: list[int]) -> dict[str, Any]:
    return {"owner": 1, "table": world.write("rollout", rollout(lengths)).model_dump(mode="json")}


def _named(world: World) -> dict[str, Any]:
    return {"spec": world.spec().model_dump(mode="json"), "initial": world.initial.model_dump(mode="json")}


def _train(world: World, version: int, lengths: list[int]) -> dict[str, Any]:
    table = rollout(lengths, seed=version)
    gains = advantage(table, seed=version)
    if version == len(LENGTHS) - 1:
        gains = with_column(gains, "advantages", [[float("inf")] * n for n in lengths])
    return world.train_command(version, {"rollout": table, "advantage": gains}, prefix=None).model_dump(mode="json")


@pytest.fixture(scope="module")
def alone(script: dict[str, Any]) -> dict[str, Any]:
    """What `local` makes of it in this process, in either precision."""
    return {dtype: play(Player(script, name, _made("local", dtype), Group())) for dtype, name in LOCAL.items()}


def _dtype(name: str) -> str:
    dtype: str = BACKENDS[name]["model"]["dtype"]
    return dtype


@pytest.fixture
def local(name: str, alone: dict[str, Any]) -> dict[str, Any]:
    """What `local` makes of it in the precision of the backend under test."""
    found: dict[str, Any] = alone[_dtype(name)]
    return found


@pytest.fixture(scope="module")
def answers(
    request: pytest.FixtureRequest,
    script: dict[str, Any],
    alone: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """What the ranks make of it with each backend that is asked for: first four of them, then two."""
    here = [item for item in request.session.items if item.path == request.path]
    slow = any(item.get_closest_marker("slow") for item in here)
    quick = any(not item.get_closest_marker("slow") for item in here)
    made = {name: made for name, made in BACKENDS.items() if (quick if name in QUICK else slow)}
    checkpoints = {name: alone[_dtype(name)]["checkpoint"] for name in made}
    found: dict[str, Any] = {}
    for count in (4, 2):
        several = {name: one for name, one in made.items() if one["trainer"].get("ranks", 2) == count}
        given = {name: checkpoints[name] for name in several}
        others = {name: found["hsdp"]["checkpoint"] for name in several if name == "fsdp2"}
        if several:
            found |= _played(tmp_path_factory.mktemp("ranks"), script, several, count, given, others)
    return found


def _played(
    folder: Path, script: dict[str, Any], made: dict[str, Any], count: int, given: Named, others: Named
) -> dict[str, Any]:
    """What `count` ranks make of the script, in as many processes as torchrun would start them."""
    ranked = {name: {**one, "trainer": {**one["trainer"], "ranks": count}} for name, one in made.items()}
    experts = script["experts"] | {"backends": [name for name in EXPERTS if name in made]}
    peaks = {name: list(steps) for name, steps in SHARES.items() if name in made}
    apart = [name for name in APART if name in made]
    asked = {"apart": apart, "backends": ranked, "local_checkpoints": given, "other_checkpoints": others}
    (folder / "script.json").write_text(json.dumps({**script, **asked, "experts": experts, "peaks": peaks}))
    numbers = range(count)
    with socket.socket() as held:  # the first rank can listen there, and no other process is given the port
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        ranks = [_start(folder, rank, count, held.getsockname()[1]) for rank in numbers]
        ends = [process.wait() for process in ranks]
    assert not any(ends), "\n".join((folder / f"{rank}.log").read_text()[-3000:] for rank in numbers)
    found: dict[str, Any] = json.loads((folder / "answers.json").read_text())
    return found


def _start(folder: Path, rank: int, count: int, port: int) -> Popen:
    path = os.pathsep.join([*(p for p in sys.path if p), str(Path(__file__).parent)])
    told = environment(Place(rank, rank, count, count, True), HOST, port)
    told |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, str(Path(__file__).with_name("two_ranks.py")), str(folder)]
    with (folder / f"{rank}.log").open("wb") as log:
        return Popen(command, env={**os.environ, **told}, stdout=log, stderr=log)


@pytest.mark.parametrize("name", NAMES)
def test_every_rank_loads_what_the_checkpoint_holds(name: str, world: World, answers: dict[str, Any]) -> None:
    """Whole tensors, put together of the shares that ranks have read."""
    initial = _weights(world, world.folder("weights", 0, "first"))
    dtype = getattr(torch, _dtype(name))
    loaded = _weights(world, answers[name]["loaded"])
    assert loaded.keys() == initial.keys()
    assert all(torch.equal(loaded[key], initial[key].to(dtype)) for key in initial)


@pytest.mark.parametrize("name", _marked(SHARES))
def test_no_rank_holds_more_than_its_share(name: str, deep: Path, answers: dict[str, Any]) -> None:
    """Beyond it there may be one whole tensor, rotary frequencies, and a part of a file.

    DeepSpeed broadcasts each tensor, and either thread of gloo may still hold one whose broadcast has ended.
    """
    tensors = load_file(deep / "model.safetensors").values()
    model, slack = sum(4 * t.numel() for t in tensors), 3 * 4 * max(t.numel() for t in tensors) + 4096
    for step, share in SHARES[name].items():
        for peak in answers[name]["peaks"][step]:
            assert 0.1 * share * model < peak <= share * model + slack, (step, peak / model)


def _weights(world: World, prefix: str) -> dict[str, torch.Tensor]:
    folder = world.store.local(prefix)
    assert folder is not None
    return load_file(folder / "model.safetensors")


def _distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("name", NAMES)
def test_several_ranks_have_the_losses_and_weights_of_one(
    name: str, world: World, local: dict[str, Any], answers: dict[str, Any]
) -> None:
    found, close = answers[name], CLOSE.get(name, Close())
    for ours, theirs in zip(found["metrics"], local["metrics"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=close.loss)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=close.norm)
        assert (ours["tokens"], ours["samples"]) == (theirs["tokens"], theirs["samples"])
    initial = _weights(world, world.folder("weights", 0, "first"))
    trained = _weights(world, local["trained"])
    distance = _distance(_weights(world, found["trained"]), trained)
    print(f"{name}: largest difference of a weight {distance:.2g} after {STEPS} steps")
    assert distance <= close.weights
    assert _distance(initial, trained) > 1e-3


@ALL_OTHERS
def test_without_zero_bf16_is_that_of_fsdp2(world: World, answers: dict[str, Any]) -> None:
    """Both keep fp32 weights, compute in bfloat16 and add gradients up in fp32, of the same passes on each rank."""
    ours, theirs = answers["zero-0-bf16"], answers["fsdp2-bf16"]
    for one, other in zip([*ours["metrics"], ours["sixth"]], [*theirs["metrics"], theirs["sixth"]], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
    assert _distance(_weights(world, ours["six"]), _weights(world, theirs["six"])) <= 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_a_repeat_steps_on_no_rank(name: str, answers: dict[str, Any]) -> None:
    assert answers[name]["repeat"] == answers[name]["metrics"][-1]


@pytest.mark.parametrize("name", NAMES)
def test_logprobs_are_those_of_one(name: str, world: World, local: dict[str, Any], answers: dict[str, Any]) -> None:
    scored = (("policy", "prox_logprobs", LENGTHS[0]), ("reference", "ref_logprobs", LENGTHS[0]))
    for which, column, lengths in (*scored, ("few", "prox_logprobs", FEW)):
        ours, theirs = (
            read_table(world.store, TableRef.model_validate(next(iter(found[which].values()))))
            for found in (answers[name], local)
        )
        assert ours.num_rows == len(lengths)
        assert ours["sample_id"].equals(theirs["sample_id"])
        for one, other in zip(ours[column].to_pylist(), theirs[column].to_pylist(), strict=True):
            assert one == pytest.approx(other, abs=CLOSE.get(name, Close()).logprobs)


@pytest.mark.parametrize("name", [*NAMES, *LOCAL])
def test_ranks_train_while_a_checkpoint_is_written(name: str, alone: dict[str, Any], answers: dict[str, Any]) -> None:
    """See `play`; the tests below load it, and find the bits of the step before."""
    assert {**answers, **alone}[name]["early"] is None


@pytest.mark.parametrize("name", _marked(APART))
def test_a_rank_that_cannot_write_its_share_fails_the_checkpoint_alone(name: str, answers: dict[str, Any]) -> None:
    assert answers[name]["told"] == "Unavailable: the store is away"


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_of_several_ranks_goes_on_alone(
    name: str, world: World, script: dict[str, Any], answers: dict[str, Any]
) -> None:
    """Model, optimizer and progress: the sixth step has the sixth step's loss, and leads to the same weights."""
    close = CLOSE.get(name, Close())
    player = Player(script, f"local-after-{name}", _made("local", _dtype(name)), Group())
    player.load()
    player.train(0)
    found = go_on(player, answers[name]["checkpoint"], "six")
    assert found["step"] == STEPS + 1
    assert found["sixth"]["loss"] == pytest.approx(answers[name]["sixth"]["loss"], abs=close.loss)
    assert _distance(_weights(world, found["six"]), _weights(world, answers[name]["six"])) <= close.resumed
    assert _distance(_weights(world, found["six"]), _weights(world, answers[name]["trained"])) > 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_of_one_goes_on_on_several_ranks(
    name: str, world: World, local: dict[str, Any], answers: dict[str, Any]
) -> None:
    found, close = answers[name]["from_local"], CLOSE.get(name, Close())
    assert found["step"] == STEPS + 1
    assert found["sixth"]["loss"] == pytest.approx(local["sixth"]["loss"], abs=close.loss)
    assert _distance(_weights(world, found["six"]), _weights(world, local["six"])) <= close.resumed


def test_a_checkpoint_of_four_ranks_goes_on_on_two(world: World, answers: dict[str, Any]) -> None:
    """Of two copies, each split over two ranks; what two ranks load of it they share as one copy."""
    found, close = answers["fsdp2"]["from_other"], Close()
    assert found["step"] == STEPS + 1
    assert found["sixth"]["loss"] == pytest.approx(answers["hsdp"]["sixth"]["loss"], abs=close.loss)
    assert _distance(_weights(world, found["six"]), _weights(world, answers["hsdp"]["six"])) <= close.resumed


@pytest.mark.parametrize("name", _marked(APART))
def test_a_machine_fetches_what_its_ranks_restore_of_a_checkpoint(
    name: str, world: World, answers: dict[str, Any]
) -> None:
    """Each of two its own rank's file; both the index, and the file of what every rank needs."""
    first, second = (set(names) for names in answers[name]["apart"]["fetched"])
    saved = WeightsRef.model_validate(answers[name]["checkpoint"])
    whole = {Path(file.path).name: file.bytes for file in read_weights(world.store, saved).files}
    assert first | second == whole.keys()
    assert ".metadata" in first & second and len(first & second) == 2
    assert len(first - second) == len(second - first) == 1
    restored = _weights(world, answers[name]["apart"]["weights"])
    assert _distance(restored, _weights(world, answers[name]["trained"])) == 0


@pytest.mark.parametrize("name", _marked(APART))
def test_two_machines_fetch_each_table_once_and_pass_it_on(name: str, answers: dict[str, Any]) -> None:
    apart = answers[name]["apart"]
    assert sorted(apart["tables"]) == [["advantage-00000.parquet"], ["rollout-00000.parquet"]]
    assert apart["sixth"]["loss"] == answers[name]["sixth"]["loss"]


@pytest.mark.parametrize("name", [*NAMES, *LOCAL])
def test_a_step_that_is_not_finite_changes_no_weight(
    name: str, world: World, alone: dict[str, Any], answers: dict[str, Any]
) -> None:
    found = {**answers, **alone}[name]
    assert (found["poisoned"]["skipped_steps"], found["poisoned"]["optimizer_steps"]) == (1, 0)
    assert _distance(_weights(world, found["six"]), _weights(world, found["skipped"])) == 0


@pytest.mark.parametrize("name", _marked(EXPERTS))
def test_experts_that_are_split_over_ranks_are_published_as_the_checkpoint_has_them(
    name: str, experts: World, script: dict[str, Any], answers: dict[str, Any]
) -> None:
    """Names, shapes and values before the first step; after it what `local` publishes."""
    before, after = (_weights(experts, prefix) for prefix in answers[name]["experts"])
    initial = load_file(experts.model / "model.safetensors")
    assert len([n for n in initial if ".experts." in n]) == 36 and any("correction_bias" in n for n in initial)
    assert _distance(before, initial) == 0
    alone = publish_twice(Player(script["experts"], f"experts-beside-{name}", _made("local"), Group()))[1]
    assert _distance(after, _weights(experts, alone)) <= Close().weights
    assert _distance(after, initial) > 1e-4
