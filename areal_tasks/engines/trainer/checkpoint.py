"""Training state on disk through torch.distributed.checkpoint (DCP), which any number of ranks can read back."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from areal_tasks.engines.trainer.backend import Progress


def save_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """Write model, optimizer, RNG and progress into `folder`, which must be fresh."""
    with _single_process():
        dcp.save(_state(model, optimizer, progress), checkpoint_id=folder)


def load_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Put back into `model` and `optimizer`, in place, what `save_state` wrote; every bit of it."""
    state = _state(model, optimizer, Progress())
    with _single_process():
        dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    torch.set_rng_state(state["rng"])
    return Progress(**state["progress"])


def _state(model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "rng": torch.get_rng_state(), "progress": asdict(progress)}


def _single_process() -> warnings.catch_warnings[None]:
    """DCP warns where there is no process group, which is what one process means."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)
