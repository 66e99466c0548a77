"""The `fsdp2` backend: weights, gradients and optimizer state split over the ranks (torch's fully_shard)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from areal_tasks.data.batching import Layout
from areal_tasks.engines.names import Names
from areal_tasks.engines.trainer import checkpoint
from areal_tasks.engines.trainer.backend import Progress, Scores, TokenLoss, TokenStats, Which
from areal_tasks.engines.trainer.forward import move, to_device
from areal_tasks.engines.trainer.optimizer import clip_gradients, local_share, make_optimizer, step_at, use_options
from areal_tasks.engines.trainer.policy import Policy, decoder_layers, empty_policy, fill_policy, prepare
from areal_tasks.engines.trainer.process_group import gather_stats, ranks_here
from areal_tasks.engines.trainer.skeleton import replace_parameters, with_memory
from schemas.recipe.sections import Model, Trainer

#: Whole weights and gradients stay on a GPU between a minibatch's passes if they need less than this share of it.
ROOMY: Final = 0.2
#: A single rank gathers and reduces all at once if whole weights, gradients and two gradient buffers need less.
SMALL: Final = 0.1


class Fsdp2Backend:
    """This rank's share of policy, optimizer and frozen reference."""

    def __init__(self, settings: Trainer, model: Model) -> None:
        self.settings = settings
        self.max_grad_norm = settings.max_grad_norm
        self.dtype = torch.bfloat16 if model.dtype == "bfloat16" else torch.float32
        self.rank, self.world, self.device = ranks_here()
        self.mesh = init_device_mesh(self.device.type, (self.world,))
        self.models: dict[Which, Policy] = {}
        self.optimizer: torch.optim.AdamW
        self.roomy = False
        self.parts: list[FSDPModule] = []  # the policy's modules that are each gathered and reduced at once

    def load(self, weights: Path, seed: int) -> None:
        torch.manual_seed(seed)
        self._forget()
        policy = empty_policy(weights, self.settings)
        self.roomy = self._has_room(policy, 6, ROOMY)  # bytes: bf16 and fp32
        self.models["policy"] = self._read(policy, weights, torch.float32)
        self.parts = _parts(self.models["policy"])
        self.optimizer = make_optimizer(self.models["policy"].named_parameters(), self.settings)

    def load_reference(self, weights: Path) -> None:
        reference = empty_policy(weights, self.settings).requires_grad_(False)
        self.models["reference"] = self._read(reference, weights, self.dtype)

    def use(self, settings: Trainer) -> None:
        self.max_grad_norm = settings.max_grad_norm
        use_options(self.optimizer, settings)

    def learn(
        self, layout: Layout, weights: Float[Tensor, " T"], loss: TokenLoss, temperature: float, last: bool
    ) -> Float[Tensor, "K T"]:
        self._between_passes(last)
        policy = self.models["policy"]
        total, values = policy(to_device(layout, self.device), temperature, move(weights, self.device), loss)
        total.backward()
        return cast(Tensor, values)

    @torch.no_grad()
    def score(self, layout: Layout, temperature: float, which: Which, last: bool = True) -> Scores:
        scores = self.models[which](to_device(layout, self.device), temperature)
        if last:
            _reshard(self.models[which])  # whole weights would be stale after the next change of their shards
        return cast(Scores, scores)

    def step(self, lr: float, wanted: bool) -> float:
        norm = clip_gradients(list(self.models["policy"].parameters()), self.max_grad_norm)
        if wanted and norm < float("inf"):  # false for NaN too
            step_at(self.optimizer, lr)
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def gather(self, stats: TokenStats) -> TokenStats:
        return gather_stats(stats)

    def names(self) -> Names:
        return self.models["policy"].names

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        policy = self.models["policy"]
        for name, shard in policy.model.named_parameters():
            yield name, whole(shard.detach().to(self.dtype)).to(self.device)
        yield from policy.saved_buffers()

    def save_checkpoint(self, folder: Path, progress: Progress) -> Mapping[str, str]:
        return checkpoint.save_state(folder, self.models["policy"].model, self.optimizer, progress)

    def load_checkpoint(self, folder: Path) -> Progress:
        return checkpoint.load_state(folder, self.models["policy"].model, self.optimizer)

    def _read(self, policy: Policy, weights: Path, dtype: torch.dtype) -> Policy:
        """Prepare and split a policy without weights, then read this rank's shares: no rank ever holds the whole."""
        self._sharded(prepare(policy, self.settings))
        home = torch.device("cpu") if self.settings.cpu_offload else self.device
        replace_parameters(policy, lambda parameter: with_memory(parameter, home, dtype))
        policy.load_state_dict({}, strict=False)  # makes FSDP use the new parameters
        fill_policy(policy, weights, self.device)
        return policy

    def _sharded(self, policy: Policy) -> None:
        """Split each decoder layer, then the rest: embeddings, norm and head, which stay whole during a pass.

        A single rank takes a small model as one part: no other rank waits for its layers, and FSDP's work per layer is
        a quarter of the host's time in a pass, which small kernels do not hide; nor do they hide copies.
        """
        options: dict[str, Any] = {
            "mesh": self.mesh,
            "reshard_after_forward": self.world > 1,
            "mp_policy": MixedPrecisionPolicy(self.dtype, torch.float32, cast_forward_inputs=False),
            "offload_policy": self._offload(),
        }
        at_once = self.world == 1 and self._has_room(policy, 14, SMALL)  # bytes: bf16, and fp32 three times
        for layer in [] if at_once else decoder_layers(policy):
            fully_shard(layer, **options)
        fully_shard(policy, **options)
        for module in _parts(policy):
            module.set_gradient_divide_factor(1.0)  # losses are weighted over all ranks: gradients add up
            module.set_force_sum_reduction_for_comms(True)

    def _forget(self) -> None:
        """Free what a load replaces before the load allocates memory."""
        if "policy" in self.models:
            del self.models["policy"], self.optimizer
            self.parts = []

    def _offload(self) -> OffloadPolicy:
        if self.settings.cpu_offload:
            return CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        return OffloadPolicy()

    def _between_passes(self, last: bool) -> None:
        """If there is memory, sum gradients over ranks (and split weights again) in the last pass only."""
        for part in self.parts:  # one by one: recursion would search the model in every pass
            part.set_requires_gradient_sync(last or not self.roomy, recurse=False)
            part.set_reshard_after_backward(last or not self.roomy, recurse=False)

    def _has_room(self, policy: Policy, bytes_each: int, share: float) -> bool:
        """Whether `bytes_each` per parameter need less than `share` of the GPU. CPU: always; offload to it: never."""
        if self.device.type == "cpu" or self.settings.cpu_offload:
            return self.device.type == "cpu"
        held = sum(p.numel() * bytes_each for p in policy.parameters())
        return held < share * torch.cuda.get_device_properties(self.device).total_memory


def whole(tensor: Tensor) -> Tensor:
    """The full tensor behind this rank's share; every rank takes part. A single rank's share is it, and not copied."""
    if not isinstance(tensor, DTensor):
        return tensor
    return local_share(tensor) if tensor.device_mesh.size() == 1 else tensor.full_tensor()


def _parts(policy: Policy) -> list[FSDPModule]:
    return [module for module in policy.modules() if isinstance(module, FSDPModule)]


def _reshard(policy: Policy) -> None:
    for module in _parts(policy):
        module.reshard()
