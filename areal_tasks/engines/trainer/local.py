"""The `local` backend: policy, optimizer and frozen reference in one process, on the CPU or one GPU.

The other backends derive from it. Their ranks run the same commands in the same order with the same tables. A rank
takes every `world`-th micro-batch of a minibatch, and all ranks take equally many (`Learner` adds empty ones). Losses
are weighted over the whole minibatch, so gradients are *summed* over micro-batches and ranks, never averaged.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, cast

import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from torch import Tensor

from areal_tasks.data.batching import Layout
from areal_tasks.engines.trainer.checkpoint import Fetch, Progress, Saving, held_parameters, load_parameters
from areal_tasks.engines.trainer.forward import move, to_device
from areal_tasks.engines.trainer.head import Scores, TokenLoss
from areal_tasks.engines.trainer.loading import read_policy
from areal_tasks.engines.trainer.optimizer import clip_gradients, make_optimizer, step_at, use_options
from areal_tasks.engines.trainer.policy import Policy, prepare, working_copy
from areal_tasks.engines.trainer.ranks import ranks_here
from schemas.recipe.sections import Model
from schemas.recipe.training import Trainer

Which = Literal["policy", "reference"]


class LocalBackend:
    """Policy, optimizer and frozen reference in this process; the interface of all backends.

    Weights and optimizer state are fp32. With `model.dtype` bfloat16 the passes use a working copy. `rank` and `world`
    determine this process's share of the micro-batches; the model computes on `device`.
    """

    rank = 0
    world = 1

    def __init__(self, settings: Trainer, model: Model) -> None:
        self.settings = settings
        self.max_grad_norm = settings.max_grad_norm
        self.dtype = torch.bfloat16 if model.dtype == "bfloat16" else torch.float32
        self.device = choose_device(settings, model)
        self.models: dict[Which, Policy] = {}  # used by the passes
        self.master: Policy  # updated by the optimizer: the policy, or the fp32 weights that it is rounded from
        self.optimizer: torch.optim.AdamW

    def load(self, weights: Path, seed: int) -> None:
        """Load the Hugging Face folder `weights` as the policy, with a fresh optimizer."""
        torch.manual_seed(seed)
        self._forget()
        self.master = read_policy(weights, self.settings, self.device)
        rounded = self.dtype != torch.float32
        work = working_copy(self.master, self.dtype) if rounded else self.master
        self.models["policy"] = prepare(work, self.settings)
        self.optimizer = make_optimizer(self.master.named_parameters(), self.settings)

    def load_reference(self, weights: Path) -> None:
        reference = read_policy(weights, self.settings, self.device, self.dtype)
        self.models["reference"] = prepare(reference.requires_grad_(False), self.settings)

    def use(self, settings: Trainer) -> None:
        """Use AdamW's options and the maximal gradient norm of `settings` from now on, and change nothing else."""
        self.max_grad_norm = settings.max_grad_norm
        use_options(self.optimizer, settings)

    def learn(
        self, layout: Layout, weights: Float[Tensor, " T"], loss: TokenLoss, temperature: float, last: bool
    ) -> Float[Tensor, "K T"]:
        """One forward and backward pass, which accumulates the gradient of Σ_t weights[t] · loss(…)[0, t].

        `last` marks the minibatch's last pass on this rank: sharded backends reduce gradients with it. `weights` may be
        on the host or on `device`. Returns the rows of `loss` on `device`, without gradient, not waiting for it.
        """
        placed = to_device(layout, self.device)
        total, values = self.models["policy"](placed, temperature, move(weights, self.device), loss)
        total.backward()
        return cast(Tensor, values)

    @torch.no_grad()
    def score(self, layout: Layout, temperature: float, which: Which, last: bool = True) -> Scores:
        """Logprobs and entropies of the counted tokens, without gradient and without waiting for the device.

        Unless this is the `last` pass, the next call must be another pass of the same policy.
        """
        return cast(Scores, self.models[which](to_device(layout, self.device), temperature))

    def step(self, lr: float, wanted: bool) -> float:
        """Clip, apply if `wanted` and finite, and clear the gradient; returns its norm before clipping."""
        norm = clip_gradients(list(self.master.parameters()), self.max_grad_norm)
        if wanted and norm < float("inf"):  # false for NaN too
            step_at(self.optimizer, lr)
            self._round()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def of_ranks(self, mine: Shaped[Tensor, " n"]) -> Shaped[Tensor, "n ranks"]:
        """These numbers of each rank, which are on the CPU: the same on every rank, in the order of ranks."""
        if not dist.is_initialized():
            return mine[:, None]
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(found, mine)
        return torch.stack(found, 1)

    def add_up(self, numbers: Shaped[Tensor, "..."]) -> None:
        """Replace numbers, which are on the CPU, by their sums over ranks: exact if all ranks but one have 0."""
        if dist.is_initialized():
            dist.all_reduce(numbers)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors by the model's names, in `model.dtype`, and buffers: one by one, on `device`, by all ranks."""
        policy = self.models["policy"]
        yield from ((name, parameter.detach()) for name, parameter in policy.model.named_parameters())
        yield from policy.saved_buffers()

    @property
    def copies_early(self) -> bool:
        """Whether the memory for the first checkpoint's copies is allocated after the first step: it is page-locked."""
        return self.device.type == "cuda"

    def plan_checkpoint(self, folder: Path, progress: Progress) -> Saving:
        """Plan to write model, optimizer, RNG and progress into `folder`. Every rank takes part."""
        return Saving(folder, held_parameters(self.master.model, self.optimizer), progress)

    def load_checkpoint(self, folder: Path, fetch: Fetch) -> Progress:
        """Restore all of these bitwise, into a policy that was loaded before. `fetch`: see `load_parameters`."""
        progress = load_parameters(folder, held_parameters(self.master.model, self.optimizer), fetch)
        self._round()
        return progress

    @torch.no_grad()
    def _round(self) -> None:
        """Round the master weights into their working copy, if there is one."""
        if (work := self.models["policy"]) is not self.master:
            torch._foreach_copy_(list(work.parameters()), list(self.master.parameters()))

    def _forget(self) -> None:
        """Free what a load replaces before the load allocates memory."""
        if "policy" in self.models:
            del self.models["policy"], self.master, self.optimizer


class ReplicatedBackend(LocalBackend):
    """Whole copies of policy and optimizer on every rank, and sums of their gradients: ZeRO's stage 0."""

    def __init__(self, settings: Trainer, model: Model) -> None:
        super().__init__(settings, model)
        self.rank, self.world, self.device = ranks_here()

    def step(self, lr: float, wanted: bool) -> float:
        """As `LocalBackend.step`, with the gradients of all ranks."""
        for parameter in self.master.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
        return super().step(lr, wanted)


def choose_device(settings: Trainer, model: Model) -> torch.device:
    """The GPU, if there is one, for bfloat16 or if `trainer.gpus` names GPUs; else the CPU.

    fp32 uses the CPU by default: there training is bitwise reproducible with the same number of threads.
    """
    if (model.dtype == "bfloat16" or settings.gpus) and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
