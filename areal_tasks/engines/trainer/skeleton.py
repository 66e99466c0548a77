"""Models without memory: parameters are on `meta` until each is allocated where it is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from areal_tasks.engines.trainer.attention import NAME
from schemas.errors import UserError

_REGISTER: Final = nn.Module.register_parameter
_ONE_AT_A_TIME: Final = threading.Lock()


def empty_model(folder: Path) -> Any:
    """The causal language model of a Hugging Face folder, without its weights: fp32 parameters on `meta`.

    Buffers are allocated: those that are not saved, such as rotary frequencies, have the values of the model's class.

    Raises:
        UserError: its weights are quantised.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if getattr(config, "quantization_config", None):
        raise UserError(f"the weights in {folder} are quantised and cannot be trained; name those they were made of")
    with _parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=torch.float32)
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
    """Inside this context, modules that this thread builds get their parameters on `meta`.

    torch's own context for `meta` would drop the values of buffers, too.
    """
    thread = threading.get_ident()

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta and threading.get_ident() == thread:
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        _REGISTER(module, name, parameter)

    with _ONE_AT_A_TIME:
        nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = _REGISTER  # type: ignore[method-assign]
