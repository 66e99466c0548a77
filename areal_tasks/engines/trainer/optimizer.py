"""AdamW, its learning-rate schedules and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from schemas.recipe.sections import Trainer


def learning_rate(step: int, total: int, settings: Trainer) -> float:
    """Learning rate of optimizer step `step` (from 0) of `total`.

    Linear warm-up reaches `lr` with its last step; then constant, linear or cosine (Loshchilov and Hutter,
    arXiv:1608.03983, eq. 5) decay, which reaches `lr_final · lr` with step total - 1 and stays there.
    """
    warmup = settings.warmup_steps
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    done = min((step - warmup) / max(total - warmup - 1, 1), 1.0)
    return settings.lr * (settings.lr_final + (1 - settings.lr_final) * _remaining(done, settings.lr_schedule))


def _remaining(done: float, schedule: str) -> float:
    """The share of the decay that is still to come, from 1 to 0, after the share `done` of the steps."""
    if schedule == "constant":
        return 1.0
    return 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2


def make_optimizer(parameters: Iterable[Tensor], settings: Trainer) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) over fp32 master weights, in one fused kernel."""
    return torch.optim.AdamW(
        parameters,
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def clip_gradients(parameters: Sequence[Tensor], max_norm: float) -> float:
    """Scale the gradients down to the global L2 norm `max_norm`; returns the norm they had, which may be NaN or inf."""
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    clip_grads_with_norm_(parameters, max_norm, norm)
    return float(norm)


def step_at(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """One optimizer step at the learning rate `lr`."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
