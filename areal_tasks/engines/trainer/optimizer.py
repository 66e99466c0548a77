"""AdamW, its learning-rate schedules and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim.adamw import adamw

from schemas.recipe.training import Trainer

Named = Iterable[tuple[str, Tensor]]
_MATRICES: Final = "matrices"  # key of an optimizer group: whether its parameters are matrices (`is_matrix`)


def learning_rate(step: int, total: int, settings: Trainer) -> float:
    """Learning rate of optimizer step `step` (from 0) of `total`.

    Linear warm-up reaches `lr` with its last step; then constant, linear or cosine (Loshchilov and Hutter,
    arXiv:1608.03983, eq. 5) decay, which reaches `lr_final · lr` with step total - 1 and stays there; a run of one step
    has `lr`.
    """
    warmup = settings.warmup_steps
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    done = min((step - warmup) / max(total - warmup - 1, 1), 1.0)
    if settings.lr_schedule == "constant":
        left = 1.0
    else:
        left = 1 - done if settings.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return settings.lr * (settings.lr_final + (1 - settings.lr_final) * left)


def make_optimizer(named: Named, settings: Trainer) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) over fp32 master weights, one fused kernel for each group."""
    return torch.optim.AdamW(parameter_groups(named, settings), lr=settings.lr, fused=True)


def parameter_groups(named: Named, settings: Trainer) -> list[dict[str, Any]]:
    """Groups for torch's AdamW: matrices and embeddings, then norms and biases. Empty groups are left out."""
    parts: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, parameter in named:
        parts[is_matrix(name, parameter)].append(parameter)
    return [
        {"params": parameters, _MATRICES: matrices, **_options(matrices, settings)}
        for matrices, parameters in parts.items()
        if parameters
    ]


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether the parameter is a matrix or an embedding, and neither a norm nor a bias (experts' have a row each)."""
    shape: Sequence[int] = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 leaves an empty tensor in its place
    return len(shape) > 1 and not name.endswith("bias")


def use_options(optimizer: torch.optim.Optimizer, settings: Trainer) -> None:
    """Continue with AdamW's options of other settings, keeping its state."""
    for group in optimizer.param_groups:
        group.update(_options(group[_MATRICES], settings))


def _options(matrices: bool, settings: Trainer) -> dict[str, Any]:
    """The options of a group that a recipe sets, except the learning rate, which each step sets."""
    decays = matrices or settings.decay_norms_and_biases
    return {
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.eps,
        "weight_decay": settings.weight_decay if decays else 0.0,
    }


def prepare_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """AdamW's state of a parameter, initialised with zeros if it has made no step yet."""
    if not optimizer.state[parameter]:
        optimizer.state[parameter].update(
            step=torch.zeros((), dtype=torch.float32, device=parameter.device),
            exp_avg=torch.zeros_like(parameter, memory_format=torch.preserve_format),
            exp_avg_sq=torch.zeros_like(parameter, memory_format=torch.preserve_format),
        )
    state: dict[str, Tensor] = optimizer.state[parameter]
    return state


@torch.no_grad()
def clip_gradients(parameters: Sequence[Tensor], max_norm: float) -> float:
    """Scale the gradients down to the global L2 norm `max_norm`; returns the norm they had, which may be NaN or inf.

    Every rank contributes its share of each sharded parameter; either all parameters are sharded or none.
    """
    gradients = [local_share(p.grad) for p in parameters if p.grad is not None]
    norm = get_total_norm(gradients)
    mesh = next((p.device_mesh for p in parameters if isinstance(p, DTensor)), None)
    if mesh is not None and mesh.size() > 1:
        square = norm.double().square()  # of this rank's shares, in float64: squares do not overflow
        dist.all_reduce(square)
        copies = mesh.size() // split_over(mesh)  # ranks that hold the same share
        norm = (square / copies).sqrt().to(norm.dtype)
    if gradients:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return float(norm)


@torch.no_grad()
def step_at(optimizer: torch.optim.AdamW, lr: float) -> None:
    """One optimizer step at the learning rate `lr`, on this rank's share of each parameter.

    AdamW is elementwise, so shares are independent; a step through DTensors launches its kernel milliseconds later.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
        taken = [parameter for parameter in group["params"] if parameter.grad is not None]
        states = [prepare_state(optimizer, parameter) for parameter in taken]
        adamw(
            [local_share(parameter) for parameter in taken],
            [local_share(parameter.grad) for parameter in taken],
            [local_share(state["exp_avg"]) for state in states],
            [local_share(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=lr,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def split_over(mesh: DeviceMesh) -> int:
    """Over how many ranks tensors on `mesh` are split: its last dimension; those along the other hold the same."""
    return int(mesh.size(mesh.ndim - 1))


def local_share(tensor: Tensor) -> Tensor:
    """This rank's share of a sharded tensor, in the same memory; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The full tensor behind this rank's share; every rank takes part. A share that is all of it is not copied."""
    if not isinstance(tensor, DTensor):
        return tensor
    return local_share(tensor) if split_over(tensor.device_mesh) == 1 else tensor.full_tensor()
