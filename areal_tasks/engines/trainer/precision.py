"""Computing in lower precision than that of the weights: a copy for the passes, fp32 for the optimizer."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from areal_tasks.engines.trainer.policy import Policy, prepare
from schemas.recipe.sections import Trainer


def working_copy(master: Policy, dtype: torch.dtype) -> Policy:
    """A copy of `master` in `dtype` whose gradients, pass by pass, add up in fp32 in the parameters of `master`.

    Buffers keep their precision: rotary frequencies need it.
    """
    taken: dict[int, Any] = {id(p): nn.Parameter(p.detach().to(dtype), p.requires_grad) for p in master.parameters()}
    work = copy.deepcopy(master, taken | {id(master.names): master.names})  # reuses these: no fp32 copy
    for low, high in zip(work.parameters(), master.parameters(), strict=True):
        low.register_post_accumulate_grad_hook(_Adder(high))  # type: ignore[no-untyped-call]
    return work


@torch.no_grad()
def copy_weights(master: Policy, work: Policy) -> None:
    """Round the weights of `master` into its working copy."""
    torch._foreach_copy_(list(work.parameters()), list(master.parameters()))


class Rounded(nn.Module):
    """`master`, whose passes use a working copy in `dtype`; wrappers of this module see only the fp32 weights.

    Call `round` after each change of the weights.
    """

    def __init__(self, master: Policy, dtype: torch.dtype, settings: Trainer) -> None:
        super().__init__()
        self.master = master
        self._work = [prepare(working_copy(master, dtype), settings)]  # in a list: not a submodule

    def forward(self, *arguments: Any) -> Any:
        """The working copy's result for the arguments of a `Policy`."""
        return self._work[0](*arguments)

    def round(self) -> None:
        """Round the weights into the working copy."""
        copy_weights(self.master, self._work[0])


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
