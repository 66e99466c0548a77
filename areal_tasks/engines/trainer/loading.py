"""Policies from Hugging Face folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from areal_tasks.engines.empty import empty_model, replace_parameters, with_memory
from areal_tasks.engines.names import Names, stored_names
from areal_tasks.engines.shallow import read_config
from areal_tasks.engines.trainer.policy import Policy
from areal_tasks.engines.trainer.proven import proven_attention
from areal_tasks.engines.trainer.shares import Share, fill, share_of
from schemas.recipe.training import Trainer


def empty_policy(folder: Path, settings: Trainer) -> Policy:
    """The causal language model in `folder` without its weights, dropout off: fp32 parameters on `meta`.

    UserError: its weights are quantised, or passes of the recipe's layout would be wrong.
    """
    config = read_config(folder)
    model = empty_model(config, proven_attention(config, settings.layout))
    return Policy(model, settings.head_chunk_tokens, settings.compile, Names(model, stored_names(folder)))


def read_policy(folder: Path, settings: Trainer, device: torch.device, dtype: torch.dtype = torch.float32) -> Policy:
    """The causal language model in `folder`, whole, with parameters in `dtype` on `device`, not prepared yet."""
    policy = empty_policy(folder, settings)
    replace_parameters(policy, lambda parameter: with_memory(parameter, device, dtype))
    fill_policy(policy, folder, device)
    return policy


def fill_policy(
    policy: Policy, folder: Path, device: torch.device, share: Callable[[Tensor], Share] = share_of
) -> None:
    """Read this rank's share of each parameter, already allocated, from `folder`; put the buffers on `device`."""
    for buffer in policy.buffers():
        buffer.data = buffer.data.to(device)
    held = [*policy.model.named_parameters(), *policy.saved_buffers()]
    fill(folder, policy.names, {policy.names.tied[name]: share(tensor) for name, tensor in held})
