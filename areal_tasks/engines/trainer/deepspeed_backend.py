"""The `deepspeed` backend: ZeRO splits optimizer state (stage 1), gradients (2) and weights (3) over the ranks.

At stage 0, which splits nothing, `ReplicatedBackend` takes its place. DeepSpeed's own operators are not used: the
optimizer is torch's AdamW, as in the other backends; nothing is compiled.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed requires it, also of a single process

import deepspeed
from deepspeed import utils

from areal_tasks.data.batching import Layout
from areal_tasks.engines.empty import replace_parameters, with_memory
from areal_tasks.engines.trainer.checkpoint import Fetch, Parameter, Progress, Saving, load_parameters
from areal_tasks.engines.trainer.forward import move, to_device
from areal_tasks.engines.trainer.head import TokenLoss
from areal_tasks.engines.trainer.loading import empty_policy, fill_policy, read_policy
from areal_tasks.engines.trainer.local import LocalBackend, Which
from areal_tasks.engines.trainer.optimizer import parameter_groups, prepare_state, whole
from areal_tasks.engines.trainer.policy import Policy, prepare
from areal_tasks.engines.trainer.ranks import ranks_here
from areal_tasks.engines.trainer.shares import Share, share_of
from schemas.recipe.sections import Model
from schemas.recipe.training import Trainer

#: More steps than any run takes, so that DeepSpeed does not print.
_NEVER: Final = 10**12
MOMENTS: Final = ("exp_avg", "exp_avg_sq")


class GatedAdamW(torch.optim.AdamW):
    """AdamW that steps only while `open`: DeepSpeed sums, clips and clears gradients in the same call as the step."""

    open = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.open:
            super().step()


class DeepSpeedBackend(LocalBackend):
    """This rank's share of policy and optimizer. The frozen reference is split at stage 3, else whole on every rank.

    With bfloat16, the optimizer's fp32 weights start from the rounded ones.
    """

    copies_early = False  # planning a checkpoint makes copies already

    def __init__(self, settings: Trainer, model: Model) -> None:
        super().__init__(settings, model)
        self.rank, self.world, self.device = ranks_here()
        self.optimizer: GatedAdamW
        self.models: dict[Which, Any] = {}  # the policy inside DeepSpeed's engine
        self.mesh = init_device_mesh("cpu", (self.world,))  # checkpoints are assembled in host memory
        self.gradients = False  # a minibatch's passes are done, its step is not
        utils.logger.setLevel(logging.WARNING)
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would have to be compiled

    def load(self, weights: Path, seed: int) -> None:
        """As `LocalBackend.load`; ZeRO splits what its stage says."""
        torch.manual_seed(seed)
        self._forget()
        self.master = prepare(self._load(weights), self.settings)
        groups = parameter_groups(self.master.named_parameters(), self.settings)
        self.optimizer = GatedAdamW(groups, lr=self.settings.lr, fused=True)
        self.models["policy"] = self._wrap(self.master, self.optimizer)
        for shard in self._shards():
            prepare_state(self.optimizer, shard)
        if hasattr(self.engine.optimizer, "_lazy_init_hp_params_optimizer_state"):  # stages 1, 2: links the state
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()

    def load_reference(self, weights: Path) -> None:
        reference = prepare(self._load(weights), self.settings).requires_grad_(False)
        self.models["reference"] = self._wrap(reference) if self.settings.zero_stage == 3 else reference

    def use(self, settings: Trainer) -> None:
        super().use(settings)
        self.engine.optimizer.clip_grad = settings.max_grad_norm

    def learn(
        self, layout: Layout, weights: Float[Tensor, " T"], loss: TokenLoss, temperature: float, last: bool
    ) -> Float[Tensor, "K T"]:
        """As `LocalBackend.learn`, through DeepSpeed's engine."""
        if self.gradients:  # left by a minibatch without counted tokens
            self.step(0.0, wanted=False)
        self.engine.set_gradient_accumulation_boundary(last)
        total, values = self.engine(to_device(layout, self.device), temperature, move(weights, self.device), loss)
        self.engine.backward(total * self.world)  # DeepSpeed averages over ranks; losses are to be summed
        self.gradients = last
        return cast(Tensor, values)

    def step(self, lr: float, wanted: bool) -> float:
        """As `LocalBackend.step`; DeepSpeed clips."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.open = wanted
        self.engine.step()
        self.optimizer.open = False
        self.gradients = False
        return float(self.engine.get_global_grad_norm())

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.master.model.named_parameters():
            with self._gathered(parameter):
                yield name, parameter.detach().to(self.dtype, copy=True)
        yield from self.master.saved_buffers()

    def plan_checkpoint(self, folder: Path, progress: Progress) -> Saving:
        """As `LocalBackend.plan_checkpoint`: the format does not depend on the backend."""
        held = {name: self._read(parameter) for name, parameter in self.master.model.named_parameters()}
        return Saving(folder, held, progress, copies=True)

    def load_checkpoint(self, folder: Path, fetch: Fetch) -> Progress:
        """As `LocalBackend.load_checkpoint`, on any stage and number of ranks."""
        named = dict(self.master.model.named_parameters())
        held = {name: self._empty(parameter) for name, parameter in named.items()}
        progress = load_parameters(folder, held, fetch)
        for name, parameter in named.items():
            self._write(parameter, held[name])
        return progress

    def _read(self, parameter: Tensor) -> Parameter:
        """This rank's rows of a parameter's fp32 weight and state; DeepSpeed gathers each whole on all ranks."""
        full = {key: utils.safe_get_full_optimizer_state(parameter, key) for key in MOMENTS}
        full["weight"] = utils.safe_get_full_fp32_param(parameter)
        return {"step": self._counts()[0].cpu().clone(), **{key: self._rows(tensor) for key, tensor in full.items()}}

    def _empty(self, parameter: Tensor) -> Parameter:
        """Tensors shaped like those of `_read`, to be filled."""
        full = torch.empty(getattr(parameter, "ds_shape", parameter.shape), dtype=torch.float32, device="meta")
        return {"step": torch.zeros(()), **{key: self._rows(full) for key in ("weight", *MOMENTS)}}

    def _rows(self, full: Tensor) -> Tensor:
        """This rank's share of `full`, in host memory."""
        parts = full.chunk(self.world)
        mine = parts[self.rank] if self.rank < len(parts) else full[:0]
        local = torch.empty(mine.shape) if mine.is_meta else mine.cpu().clone()
        share: Tensor = DTensor.from_local(
            local, self.mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride()
        )
        return share

    @torch.no_grad()
    def _write(self, parameter: Tensor, rows: Parameter) -> None:
        """Restore a parameter's fp32 weight and state, and the weight that the passes use."""
        for count in self._counts():
            count.copy_(rows["step"])
        for key in MOMENTS:
            utils.safe_set_full_optimizer_state(parameter, whole(rows[key]).to(self.device), key)
        weight = whole(rows["weight"]).to(self.device)
        utils.safe_set_full_fp32_param(parameter, weight)
        with self._gathered(parameter, modified=True):
            parameter.data.copy_(weight)

    @property
    def engine(self) -> Any:
        """DeepSpeed's engine of the loaded policy."""
        return self.models["policy"]

    def _load(self, weights: Path) -> Policy:
        """The policy in `dtype`. At stage 3 no rank ever holds more of it than its share and one whole parameter."""
        if self.settings.zero_stage < 3:
            return read_policy(weights, self.settings, self.device, self.dtype)
        policy = empty_policy(weights, self.settings)
        config = make_config(self.settings, self.dtype)

        def partitioned(parameter: nn.Parameter) -> nn.Parameter:
            made = with_memory(parameter, self.device, self.dtype)
            deepspeed.zero.Init(nn.ParameterList([made]), config_dict_or_path=config, dtype=self.dtype)
            return made

        replace_parameters(policy, partitioned)
        fill_policy(policy, weights, self.device, _share_of)
        return policy

    def _wrap(self, policy: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """DeepSpeed's engine of the policy."""
        config = make_config(self.settings, self.dtype)
        buffers = [buffer.clone() for buffer in policy.buffers()]
        engine, *_ = deepspeed.initialize(model=policy, optimizer=optimizer, config=config)
        for buffer, exact in zip(policy.buffers(), buffers, strict=True):
            buffer.data = exact  # includes rotary frequencies, whose rounding would corrupt long sequences
        return engine

    def _shards(self) -> list[Tensor]:
        """What the optimizer updates: this rank's flat fp32 part of all weights."""
        if self.settings.zero_stage == 3:
            return list(self.engine.optimizer.fp32_partitioned_groups_flat)
        return [shard for group in self.optimizer.param_groups for shard in group["params"]]

    def _counts(self) -> list[Tensor]:
        """AdamW's step count of each shard; all are equal."""
        return [self.optimizer.state[shard]["step"] for shard in self._shards()]

    def _gathered(self, parameter: Tensor, modified: bool = False) -> Any:
        """A context in which a parameter is whole; with `modified` all ranks take rank 0's value of it afterwards."""
        if self.settings.zero_stage < 3:
            return nullcontext()
        return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0 if modified else None)

    def _forget(self) -> None:
        """Free what a load replaces before the load allocates memory."""
        if "policy" in self.models:
            self.engine.destroy()
        super()._forget()
        self.gradients = False


def _share_of(tensor: Any) -> Share:
    """This rank's share of a parameter that ZeRO-3 has partitioned, or of a buffer."""
    if not hasattr(tensor, "ds_tensor"):
        return share_of(tensor)
    part, size = tensor.ds_tensor, tensor.ds_tensor.ds_numel
    start = min(size * dist.get_rank(), tensor.ds_numel)
    return Share(part.narrow(0, 0, min(size, tensor.ds_numel - start)), tensor.ds_shape, start)


def make_config(settings: Trainer, dtype: torch.dtype) -> dict[str, Any]:
    """DeepSpeed's configuration: one optimizer step per minibatch, of any number of passes."""
    zero: dict[str, Any] = {"stage": settings.zero_stage}
    if settings.cpu_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": _NEVER,
        "gradient_clipping": settings.max_grad_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
    }
