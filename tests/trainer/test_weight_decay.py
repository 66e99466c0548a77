"""Which parameters decay: matrices and embeddings; in runs begun before that rule, all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save
from recorded_runs import unpack
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, load

from areal_tasks.engines.service import ServiceSpec
from areal_tasks.engines.trainer.commands import Compare, Load
from areal_tasks.engines.trainer.local import LocalBackend
from areal_tasks.engines.trainer.optimizer import is_matrix, make_optimizer, step_at, use_options
from areal_tasks.engines.trainer.service import Trainer as Service
from areal_tasks.engines.trainers import retrain_command, stage_of
from areal_tasks.store.backend import Store
from areal_tasks.store.objects.files import materialise, read_weights
from areal_tasks.store.reachable import published_weights
from areal_tasks.store.runs import Run, load_run
from schemas.manifest import WeightsRef
from schemas.recipe.sections import Model
from schemas.recipe.training import Trainer

LR, DECAY = 0.5, 0.1


@pytest.mark.parametrize(
    ("name", "shape", "matrix"),
    [
        ("model.embed_tokens.weight", (7, 4), True),
        ("model.layers.0.mlp.experts.gate_up_proj", (3, 8, 4), True),
        ("model.layers.0.input_layernorm.weight", (4,), False),
        ("model.layers.0.self_attn.q_proj.bias", (4,), False),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (3, 8), False),
    ],
)
def test_what_is_a_matrix(name: str, shape: tuple[int, ...], matrix: bool) -> None:
    assert is_matrix(name, torch.zeros(shape)) == matrix
    partitioned = torch.zeros(0)
    partitioned.ds_shape = torch.Size(shape)  # type: ignore[attr-defined]  # as ZeRO-3 does
    assert is_matrix(name, partitioned) == matrix


def shrunk(settings: Trainer, then: Trainer | None = None) -> dict[str, float]:
    """By what a step without gradients multiplies each parameter; of settings that came later, if they are given."""
    named: dict[str, Tensor] = {"matrix.weight": torch.ones(2, 2), "norm.weight": torch.ones(2)}
    optimizer = make_optimizer(named.items(), settings)
    use_options(optimizer, then or settings)
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    step_at(optimizer, LR)
    return {name: float(parameter.flatten()[0]) for name, parameter in named.items()}


def test_norms_decay_only_where_the_recipe_says_so() -> None:
    plain = Trainer(weight_decay=DECAY)
    every = Trainer(weight_decay=DECAY, decay_norms_and_biases=True)
    left = pytest.approx(1 - LR * DECAY)
    assert shrunk(plain) == {"matrix.weight": left, "norm.weight": 1.0}
    assert shrunk(every) == {"matrix.weight": left, "norm.weight": left}
    assert shrunk(every, plain) == shrunk(plain) and shrunk(plain, every) == shrunk(every)
    assert set(shrunk(Trainer()).values()) == {1.0}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with runs that the program recorded before the rule."""
    return unpack(tmp_path_factory.mktemp("recorded"))


def trained_again(run: Run, **changes: Any) -> float:
    """How far a recorded run's version 1 is from what its first iteration gives now, with `changes` of its trainer."""
    commit, recipe = run.commit(0), run.recipe_at(0)
    recipe = {**recipe, "trainer": {**recipe["trainer"], **changes}}
    initial = published_weights(run.store, stage_of(run, commit, "initialise"))
    spec = ServiceSpec(name="trainer", restart=0, store_url=run.store.url, run=run.name, owner=run.owner, recipe=recipe)
    trainer = Service(spec)
    trainer.load(Load(owner=run.owner, version=0, weights=initial))
    command = retrain_command(run, stage_of(run, commit, "train"), commit)
    trainer.train(command.model_copy(update={"recipe": recipe}))
    return trainer.compare(Compare(owner=run.owner, version=1, weights=commit.weights)).difference


def test_a_recorded_run_is_trained_again_as_it_was_trained(recorded: Store) -> None:
    """Another kind of CPU rounds otherwise, by far less than a norm decays in its two steps."""
    run = load_run(recorded, "sft")
    settings = run.recipe_at(0)["trainer"]
    assert settings["decay_norms_and_biases"] is True, "the program knows how it was trained"
    assert trained_again(run) < 1e-6
    decayed = 2 * settings["lr"] * settings["weight_decay"]
    assert trained_again(run, decay_norms_and_biases=False) == pytest.approx(decayed, rel=0.01)


def test_a_checkpoint_of_before_is_one_of_now(recorded: Store, tmp_path: Path) -> None:
    run = load_run(recorded, "grpo")
    commit = run.commit(0)
    assert commit.checkpoint is not None
    before, weights = (_folder(recorded, ref, tmp_path) for ref in (commit.checkpoint, commit.weights))
    backend = LocalBackend(Trainer(weight_decay=DECAY), Model())
    backend.load(weights, 0)
    progress = backend.load_checkpoint(before, lambda names: None)
    assert progress.step == run.recipe_at(0)["algorithm"]["minibatches"]
    save(backend.plan_checkpoint(tmp_path / "now", progress))
    old, new = _tensors(before), _tensors(tmp_path / "now")
    assert old.keys() == new.keys() and {f"parameters.{n}.exp_avg" for n, _ in backend.named_weights()} < new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old)


def _folder(store: Store, ref: WeightsRef, scratch: Path) -> Path:
    into = scratch / ref.attempt
    into.mkdir()
    return materialise(store, read_weights(store, ref).files, into, verify=True)


def _tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, by its name in it."""
    kinds = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    found = {name: torch.empty(kind.size, dtype=kind.properties.dtype) for name, kind in kinds.items()}
    load(found, checkpoint_id=checkpoint, no_dist=True)
    return found
