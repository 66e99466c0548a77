"""Causal language models built from their configurations alone, with parameters that have no memory yet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from areal_tasks.engines.models import BUILDING

_REGISTER: Final = nn.Module.register_parameter


def empty_model(config: Any, attention: str) -> Any:
    """The causal language model of `config` without weights: fp32 parameters on `meta`, `attention` by its name in
    transformers, dropout off.

    Buffers are allocated: those that are not saved, such as rotary frequencies, have the values of the model's class.
    """
    with _parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    return model.eval()


def replace_parameters(model: nn.Module, make: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Replace each parameter by what `make` returns for it. Tied parameters stay tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in made:
                made[parameter] = make(parameter)
            setattr(module, name, made[parameter])


def with_memory(parameter: nn.Parameter, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    """A parameter like `parameter`, whole or sharded, with uninitialised memory on `device`."""
    return nn.Parameter(torch.empty_like(parameter, device=device, dtype=dtype), parameter.requires_grad)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Inside, modules that this thread builds have `meta` parameters; torch's context would drop buffers' values."""
    thread = threading.get_ident()

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta and threading.get_ident() == thread:
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        _REGISTER(module, name, parameter)

    with BUILDING:
        nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = _REGISTER  # type: ignore[method-assign]
