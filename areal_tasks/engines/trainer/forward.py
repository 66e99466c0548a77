"""A layout on the device that computes, and the plain way from logits to log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from areal_tasks.data.batching import Layout
from areal_tasks.engines.trainer.backend import Scores


@dataclass(frozen=True)
class DeviceLayout:
    """What the model needs of a `Layout`, on its device; the fields are those of the same name there."""

    input_ids: Int[Tensor, "R L"]
    position_ids: Int[Tensor, "R L"] | None
    predictors: Int[Tensor, " T"]
    targets: Int[Tensor, " T"]
    bounds: Int[Tensor, " S"] | None = None
    longest: int = 0


def to_device(layout: Layout, device: torch.device) -> DeviceLayout:
    """Copy `layout` to `device` without waiting for what it computes."""
    return DeviceLayout(
        input_ids=move(layout.input_ids, device),
        position_ids=None if layout.position_ids is None else move(layout.position_ids, device),
        predictors=move(layout.predictors, device),
        targets=move(layout.targets, device),
        bounds=None if layout.bounds is None else move(layout.bounds, device),
        longest=layout.longest,
    )


def staged(layout: Layout, device: torch.device) -> Layout:
    """`layout` with what goes to `device` in memory that it is copied from without waiting."""
    if device.type != "cuda":
        return layout
    moved = ("input_ids", "position_ids", "predictors", "targets", "bounds", "where")
    held = ((name, getattr(layout, name)) for name in moved)
    changes: dict[str, Any] = {name: pinned(tensor, device) for name, tensor in held if tensor is not None}
    return replace(layout, **changes)


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor in memory that a copy to `device` need not wait for; itself where it lies in such."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on `device`. From ordinary memory the copy would wait for all that is queued there, so pin it."""
    if tensor.device.type == device.type:
        return tensor
    return pinned(tensor, device).to(device, non_blocking=device.type == "cuda")


def fetch(tensor: Tensor) -> Tensor:
    """What `tensor` will hold, in host memory: it is there once the device has been waited for, which this does not."""
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def token_scores(logits: Float[Tensor, "T V"], targets: Int[Tensor, " T"], temperature: float) -> Scores:
    """log softmax(logits / temperature) at the targets, and the entropy of that distribution, in fp32 nats."""
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    with torch.no_grad():  # the clamp keeps 0 · -inf, of a token that the model rules out, at 0
        entropy = -(logprobs.exp() * logprobs.clamp_min(torch.finfo(logprobs.dtype).min)).sum(-1)
    return Scores(logprobs.gather(-1, targets[:, None])[:, 0], entropy)
