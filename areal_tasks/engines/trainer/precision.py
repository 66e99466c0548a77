"""Computing in a lower precision than the weights are kept in: a copy for the passes, fp32 for the optimizer."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from areal_tasks.engines.trainer.policy import Policy


def cast_parameters(policy: Policy, dtype: torch.dtype) -> Policy:
    """`policy` with parameters in `dtype`. Buffers stay: rotary frequencies need their precision."""
    for parameter in policy.parameters():
        parameter.data = parameter.data.to(dtype)
    return policy


def working_copy(master: Policy, dtype: torch.dtype) -> Policy:
    """A copy of `master` in `dtype` whose gradients, pass by pass, add up in fp32 in the parameters of `master`."""
    work = cast_parameters(copy.deepcopy(master), dtype)
    for low, high in zip(work.parameters(), master.parameters(), strict=True):
        low.register_post_accumulate_grad_hook(_Adder(high))  # type: ignore[no-untyped-call]
    return work


@torch.no_grad()
def copy_weights(master: Policy, work: Policy) -> None:
    """Round the weights of `master` into its working copy."""
    torch._foreach_copy_(list(work.parameters()), list(master.parameters()))


class _Adder:
    """Adds the gradient of a low-precision parameter to `high`'s and frees it."""

    def __init__(self, high: Tensor) -> None:
        self.high = high

    def __call__(self, low: Tensor) -> None:
        assert low.grad is not None
        if self.high.grad is None:
            self.high.grad = low.grad.to(self.high.dtype)
        else:
            self.high.grad.add_(low.grad)
        low.grad = None
