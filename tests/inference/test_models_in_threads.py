"""Under `launcher.type: inline` servers that start at the same time build their models in threads of one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from areal_tasks.data.scratch import make_scratch
from areal_tasks.engines.embedded.runner import _load
from schemas.recipe.sections import ScratchModel


def test_models_that_are_built_at_the_same_time_have_the_same_tied_weights(tmp_path: Path) -> None:
    """transformers replaces functions of its classes meanwhile: two threads at once would leave them replaced."""
    folder = tmp_path / "model"
    make_scratch(ScratchModel(hidden=16, layers=1, heads=2, intermediate=32), 1, 32, folder)
    with ThreadPoolExecutor(8) as threads:
        models = list(threads.map(lambda _: _load(folder, torch.float32), range(24)))
    for model in [*models, _load(folder, torch.float32)]:
        assert model.lm_head.weight is model.model.embed_tokens.weight
