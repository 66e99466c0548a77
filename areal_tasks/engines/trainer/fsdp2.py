"""The `fsdp2` backend: weights, gradients and optimizer state split over the ranks (torch's fully_shard).

With `trainer.replicas` > 1 (HSDP) they are split over the ranks of each replica, and gradients are summed over all.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from areal_tasks.data.batching import Layout
from areal_tasks.engines.empty import replace_parameters, with_memory
from areal_tasks.engines.trainer.head import Scores, TokenLoss
from areal_tasks.engines.trainer.loading import empty_policy, fill_policy
from areal_tasks.engines.trainer.local import LocalBackend, Which
from areal_tasks.engines.trainer.optimizer import make_optimizer, whole
from areal_tasks.engines.trainer.policy import Policy, decoder_layers, prepare
from areal_tasks.engines.trainer.ranks import ranks_here
from schemas.recipe.sections import Model
from schemas.recipe.training import Trainer

#: Whole weights and gradients stay on a GPU between a minibatch's passes if they need less than this share of memory.
ROOMY: Final = 0.2
#: A single rank gathers and reduces all at once if weights, gradients and two gradient buffers need less than this.
SMALL: Final = 0.1


class Fsdp2Backend(LocalBackend):
    """This rank's share of policy, optimizer and frozen reference. FSDP itself rounds the weights for the passes."""

    def __init__(self, settings: Trainer, model: Model) -> None:
        super().__init__(settings, model)
        self.rank, self.world, self.device = ranks_here()
        replicas, kind = settings.replicas, self.device.type
        if replicas == 1:
            self.mesh = init_device_mesh(kind, (self.world,))
        else:  # a row of ranks for each replica
            shape = replicas, self.world // replicas
            self.mesh = init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))
        self.roomy = False
        self.parts: list[FSDPModule] = []  # the policy's modules that are each gathered and reduced at once

    def load(self, weights: Path, seed: int) -> None:
        """As `LocalBackend.load`; each rank reads its own share."""
        torch.manual_seed(seed)
        self._forget()
        policy = empty_policy(weights, self.settings)
        self.roomy = self._has_room(policy, 6, ROOMY)  # bytes: bf16 and fp32
        self.models["policy"] = self.master = self._read(policy, weights, torch.float32)
        self.parts = _parts(self.master)
        self.optimizer = make_optimizer(self.master.named_parameters(), self.settings)

    def load_reference(self, weights: Path) -> None:
        reference = empty_policy(weights, self.settings).requires_grad_(False)
        self.models["reference"] = self._read(reference, weights, self.dtype)

    def learn(
        self, layout: Layout, weights: Float[Tensor, " T"], loss: TokenLoss, temperature: float, last: bool
    ) -> Float[Tensor, "K T"]:
        """As `LocalBackend.learn`; if `roomy`, sums gradients (and splits weights again) in the last pass only."""
        for part in self.parts:  # one by one: recursion would search the model in every pass
            part.set_requires_gradient_sync(last or not self.roomy, recurse=False)
            part.set_reshard_after_backward(last or not self.roomy, recurse=False)
        return super().learn(layout, weights, loss, temperature, last)

    def score(self, layout: Layout, temperature: float, which: Which, last: bool = True) -> Scores:
        scores = super().score(layout, temperature, which)
        for module in _parts(self.models[which]) if last else ():
            module.reshard()  # whole weights would be stale after the next change of their shards
        return scores

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, shard in self.master.model.named_parameters():
            yield name, whole(shard.detach().to(self.dtype)).to(self.device)
        yield from self.master.saved_buffers()

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

        A single rank does not split a small model by layers: no other rank waits for them, and FSDP's work per layer
        takes a quarter of the host's time in a pass, which small kernels do not hide; nor do they hide copies.
        """
        on_gpu = self.device.type == "cuda"
        options: dict[str, Any] = {
            "mesh": self.mesh,
            "reshard_after_forward": self.world > 1,
            "mp_policy": MixedPrecisionPolicy(self.dtype, torch.float32, cast_forward_inputs=False),
            "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu) if self.settings.cpu_offload else OffloadPolicy(),
        }
        at_once = self.world == 1 and self._has_room(policy, 14, SMALL)  # bytes: bf16, and fp32 three times
        for layer in [] if at_once else decoder_layers(policy):
            fully_shard(layer, **options)
        fully_shard(policy, **options)
        for module in _parts(policy):
            module.set_gradient_divide_factor(1.0)  # losses are weighted over all ranks: gradients add up
            module.set_force_sum_reduction_for_comms(True)

    def _forget(self) -> None:
        super()._forget()
        self.parts = []

    def _has_room(self, policy: Policy, bytes_each: int, share: float) -> bool:
        """Whether `bytes_each` per parameter need less than `share` of the GPU. CPU: always; offload to it: never."""
        if self.device.type == "cpu" or self.settings.cpu_offload:
            return self.device.type == "cpu"
        held = sum(p.numel() * bytes_each for p in policy.parameters())
        return held < share * torch.cuda.get_device_properties(self.device).total_memory


def _parts(policy: Policy) -> list[FSDPModule]:
    return [module for module in policy.modules() if isinstance(module, FSDPModule)]
