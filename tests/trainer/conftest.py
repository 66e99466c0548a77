"""Shapes are checked while these tests run; a tiny Llama, a store and a trainer to command."""

from __future__ import annotations

from pathlib import Path

import jaxtyping
import pytest

with jaxtyping.install_import_hook(["areal_tasks.engines.trainer", "areal_tasks.data.batching"], "beartype.beartype"):
    import areal_tasks.engines.trainer.process  # noqa: F401

import torch
from trainer_builders import TINY, World, sft_recipe

from areal_tasks.data.scratch import make_scratch
from areal_tasks.store.backend import open_store


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """A model this small gains nothing from more, and busy machines lose a lot."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a Llama of two layers and 16 tokens."""
    return make_scratch(TINY, 7, 64, tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def world(tiny: Path, tmp_path: Path) -> World:
    """A store with that model as version 0 of run `r`."""
    return World(open_store(f"file://{tmp_path}/store"), tiny, sft_recipe())
