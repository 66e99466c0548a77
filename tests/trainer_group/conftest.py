"""Trainers of two ranks, with the builders and the tiny Llama of the trainer's own tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "trainer"))

import pytest
import torch
from trainer_builders import TINY, World, rlhf_recipe

from areal_tasks.data.scratch import make_scratch
from areal_tasks.store.backend import open_store


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A store with a tiny model as version 0 of run `r`, and a recipe of one optimizer step an iteration."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("world")
    model = make_scratch(TINY, 7, 64, folder / "tiny")
    return World(open_store(f"file://{folder}/store"), model, recipe(backend="local"))


def recipe(**trainer: object) -> dict[str, object]:
    """One optimizer step an iteration, of packed micro-batches that hold two or three samples.

    Its engine is not deterministic, so that the objective is the same (decoupled) one with every backend.
    """
    settings = {"threads": 1, "lr": 1e-3, "weight_decay": 0.5, "layout": "packed", "micro_batch_tokens": 24, **trainer}
    return rlhf_recipe(trainer=settings, algorithm={"minibatches": 1}, inference={"deterministic": False})
