"""Layouts on the computing device, and log-probabilities from logits."""

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
    """What the model needs of a `Layout`, on its device; the fields are those of the same name in `Layout`."""

    input_ids: Int[Tensor, "R L"]
    position_ids: Int[Tensor, "R L"] | None
    predictors: Int[Tensor, " T"]
    targets: Int[Tensor, " T"]
    bounds: Int[Tensor, " S"] | None = None
    longest: int = 0


def to_device(layout: Layout, device: torch.device) -> DeviceLayout:
    """Copy `layout` to `device` without waiting for the device."""
    return DeviceLayout(
        input_ids=move(layout.input_ids, device),
        position_ids=None if layout.position_ids is None else move(layout.position_ids, device),
        predictors=move(layout.predictors, device),
        targets=move(layout.targets, device),
        bounds=None if layout.bounds is None else move(layout.bounds, device),
        longest=layout.longest,
    )


def staged(layout: Layout, device: torch.device) -> Layout:
    """`layout` with the tensors that go to `device` in page-locked memory, so that their copies do not block."""
    if device.type != "cuda":
        return layout
    moved = ("input_ids", "position_ids", "predictors", "targets", "bounds", "where")
    held = ((name, getattr(layout, name)) for name in moved)
    changes: dict[str, Any] = {name: pinned(tensor, device) for name, tensor in held if tensor is not None}
    return replace(layout, **changes)


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor in page-locked memory, so that copies to `device` do not block; itself if `device` is a CPU."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on `device`, pinned first: a copy from pageable memory would wait for all work queued there."""
    if tensor.device.type == device.type:
        return tensor
    return pinned(tensor, device).to(device, non_blocking=device.type == "cuda")


def fetch(tensor: Tensor) -> Tensor:
    """A copy of `tensor` in host memory, valid once the device is synchronised, which this does not do."""
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def token_scores(logits: Float[Tensor, "T V"], targets: Int[Tensor, " T"], temperature: float) -> Scores:
    """log softmax(logits / temperature) at the targets, and the entropy of that distribution, in fp32 nats."""
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    with torch.no_grad():  # the clamp makes 0 · -inf, for a token of probability 0, be 0
        entropy = -(logprobs.exp() * logprobs.clamp_min(torch.finfo(logprobs.dtype).min)).sum(-1)
    return Scores(logprobs.gather(-1, targets[:, None])[:, 0], entropy)
