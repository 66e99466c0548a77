"""AdamW, its learning-rate schedules and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

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
    return torch.optim.AdamW(parameters, **optimizer_options(settings))


def optimizer_options(settings: Trainer) -> dict[str, Any]:
    """The arguments of torch's AdamW."""
    betas = (settings.beta1, settings.beta2)
    return {
        "lr": settings.lr,
        "betas": betas,
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
        "fused": True,
    }


def use_options(optimizer: torch.optim.Optimizer, settings: Trainer) -> None:
    """Go on with AdamW's options of other settings: what it remembers of the gradients stays."""
    options = optimizer_options(settings)
    for group in optimizer.param_groups:
        group.update({name: options[name] for name in ("betas", "eps", "weight_decay")})


def prepare_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """What AdamW keeps of a parameter: the zeros it would begin with, if it has made no step yet."""
    if not optimizer.state[parameter]:
        optimizer.state[parameter].update(
            step=torch.zeros((), dtype=torch.float32, device=parameter.device),
            exp_avg=torch.zeros_like(parameter, memory_format=torch.preserve_format),
            exp_avg_sq=torch.zeros_like(parameter, memory_format=torch.preserve_format),
        )
    state: dict[str, Tensor] = optimizer.state[parameter]
    return state


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
