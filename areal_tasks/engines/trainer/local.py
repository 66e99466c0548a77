"""The `local` backend: one process, fp32 weights, CPU or whatever torch runs on here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from areal_tasks.data.batching import Layout
from areal_tasks.engines.trainer import checkpoint
from areal_tasks.engines.trainer.backend import Progress, Scores, TokenStats, Which
from areal_tasks.engines.trainer.forward import score_tokens
from areal_tasks.engines.trainer.optimizer import clip_gradients, make_optimizer, step_at
from schemas.recipe.sections import Trainer


class LocalBackend:
    """Policy, optimizer and frozen reference in this process."""

    rank = 0
    world = 1

    def __init__(self, settings: Trainer) -> None:
        self.settings = settings
        self.models: dict[Which, Any] = {}
        self.optimizer: torch.optim.Optimizer

    def load(self, weights: Path, seed: int) -> None:
        torch.manual_seed(seed)
        self.models["policy"] = _load_model(weights)
        self.optimizer = make_optimizer(self._parameters(), self.settings)

    def load_reference(self, weights: Path) -> None:
        self.models["reference"] = _load_model(weights).requires_grad_(False)

    def forward(self, layout: Layout, temperature: float) -> Scores:
        return score_tokens(self.models["policy"], layout, temperature)

    @torch.no_grad()
    def score(self, layout: Layout, temperature: float, which: Which) -> Scores:
        return score_tokens(self.models[which], layout, temperature)

    def backward(self, loss: Float[Tensor, ""]) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, lr: float, wanted: bool) -> float:
        norm = clip_gradients(self._parameters(), self.settings.max_grad_norm)
        if wanted and norm < float("inf"):  # false for NaN too
            step_at(self.optimizer, lr)
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def gather(self, stats: TokenStats) -> TokenStats:
        return stats

    def save_weights(self, folder: Path) -> None:
        self.models["policy"].save_pretrained(folder)

    def save_checkpoint(self, folder: Path, progress: Progress) -> None:
        checkpoint.save_state(folder, self.models["policy"], self.optimizer, progress)

    def load_checkpoint(self, folder: Path) -> Progress:
        return checkpoint.load_state(folder, self.models["policy"], self.optimizer)

    def _parameters(self) -> list[Tensor]:
        return list(self.models["policy"].parameters())


def _load_model(folder: Path) -> Any:
    """The causal language model in `folder`, in fp32, with dropout off."""
    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
