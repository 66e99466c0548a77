"""SFT compares its passes with transformers before its first step: on the trainer's device, weights and precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from stage_driver import drive, store_in, tiny_sft

from areal_tasks.data.batching import Layout, LayoutKind, make_sequences
from areal_tasks.engines.trainer import attention
from areal_tasks.engines.trainer.alone import SAMPLES, check_alone
from areal_tasks.engines.trainer.head import Scores
from areal_tasks.engines.trainer.local import LocalBackend
from areal_tasks.engines.trainer.rows import Batch
from areal_tasks.store.runs import load_run
from schemas.errors import UserError
from schemas.recipe.sections import Model
from schemas.recipe.training import Trainer
from tests.trainer.families import make_family


def compare(folder: Path, layout: LayoutKind, dtype: Any, samples: int) -> None:
    """Load a model of small random weights, and compare it on so many samples of unequal length."""
    if not folder.exists():
        make_family("qwen3", folder)
    settings = Trainer(layout=layout)
    backend = LocalBackend(settings, Model(path=str(folder), dtype=dtype, max_length=64))
    backend.load(folder, 0)
    lengths = torch.arange(samples) * 7 % 30
    ids = torch.arange(int(lengths.sum())) * 5 % 29 + 3
    sequences = make_sequences(ids, torch.ones(len(ids), dtype=torch.bool), lengths)
    kept = torch.ones(samples, dtype=torch.bool)
    batch = Batch(pa.array([str(i) for i in range(samples)]), lengths, kept, None, sequences, torch.arange(samples), {})
    check_alone(backend, batch, settings)
    assert backend.models["policy"].model.config._attn_implementation == attention.NAME


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_passes_that_are_right_agree(layout: LayoutKind, tmp_path: Path) -> None:
    for dtype, samples in (("float32", 9), ("bfloat16", 9), ("float32", 0), ("float32", SAMPLES - 1)):
        compare(tmp_path / "model", layout, dtype, samples)


def test_a_kernel_that_mixes_packed_samples_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the proof at load does not see, as on a GPU."""
    monkeypatch.setattr("areal_tasks.engines.trainer.loading.proven_attention", lambda *_: attention.NAME)
    monkeypatch.setattr(attention, "one_by_one", lambda q, k, v, _bounds, *more: attention.causal(q, k, v, *more))
    compare(tmp_path / "model", "padded", "float32", 9)
    with pytest.raises(UserError, match=r"trainer and transformers disagree: over \d+ tokens, .* No step was made"):
        compare(tmp_path / "model", "packed", "float32", 9)


def test_an_sft_run_ends_before_its_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: LocalBackend, layout: Layout, *more: Any, **options: Any) -> Scores:
        scores = right(self, layout, *more, **options)
        return scores if len(layout.samples.unique()) < 2 else Scores(scores.logprobs - 0.5, scores.entropy)

    right = LocalBackend.score
    monkeypatch.setattr(LocalBackend, "score", wrong)
    with pytest.raises(UserError, match="the trainer and transformers disagree"):
        drive(tmp_path, "wrong", tiny_sft())
    assert load_run(store_in(tmp_path), "wrong").committed == 0
