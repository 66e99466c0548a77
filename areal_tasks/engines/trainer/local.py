"""The `local` backend: policy, optimizer and frozen reference in one process, on the CPU or one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from areal_tasks.data.batching import Layout
from areal_tasks.engines.trainer import checkpoint
from areal_tasks.engines.trainer.backend import Progress, Scores, TokenLoss, TokenStats, Which
from areal_tasks.engines.trainer.forward import move, to_device
from areal_tasks.engines.trainer.optimizer import clip_gradients, make_optimizer, step_at
from areal_tasks.engines.trainer.policy import Policy, load_policy
from schemas.recipe.sections import Model, Trainer


class LocalBackend:
    """Policy, optimizer and frozen reference in this process."""

    rank = 0
    world = 1

    def __init__(self, settings: Trainer, model: Model) -> None:
        self.settings = settings
        self.model_settings = model
        self.device = torch.device("cpu")
        self.models: dict[Which, Policy] = {}
        self.optimizer: torch.optim.Optimizer

    def load(self, weights: Path, seed: int) -> None:
        torch.manual_seed(seed)
        self.models["policy"] = self._load(weights)
        self.optimizer = make_optimizer(self._parameters(), self.settings)

    def load_reference(self, weights: Path) -> None:
        self.models["reference"] = self._load(weights).requires_grad_(False)

    def learn(
        self, layout: Layout, weights: Float[Tensor, " T"], loss: TokenLoss, temperature: float, last: bool
    ) -> Float[Tensor, "K T"]:
        placed = to_device(layout, self.device)
        total, values = self.models["policy"](placed, temperature, move(weights, self.device), loss)
        total.backward()
        return cast(Tensor, values)

    @torch.no_grad()
    def score(self, layout: Layout, temperature: float, which: Which) -> Scores:
        scores = self.models[which](to_device(layout, self.device), temperature)
        return Scores(*(tensor.cpu() for tensor in scores))

    def step(self, lr: float, wanted: bool) -> float:
        norm = clip_gradients(self._parameters(), self.settings.max_grad_norm)
        if wanted and norm < float("inf"):  # false for NaN too
            step_at(self.optimizer, lr)
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def gather(self, stats: TokenStats) -> TokenStats:
        return stats

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.models["policy"].named_weights()

    def save_checkpoint(self, folder: Path, progress: Progress) -> None:
        checkpoint.save_state(folder, self.models["policy"].model, self.optimizer, progress)

    def load_checkpoint(self, folder: Path) -> Progress:
        return checkpoint.load_state(folder, self.models["policy"].model, self.optimizer)

    def _parameters(self) -> list[Tensor]:
        return list(self.models["policy"].parameters())

    def _load(self, folder: Path) -> Policy:
        return load_policy(folder, self.settings, self.model_settings, self.device)
