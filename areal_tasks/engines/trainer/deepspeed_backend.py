"""The `deepspeed` backend: ZeRO splits optimizer state (stage 1), gradients (2) and weights (3) over the ranks.

DeepSpeed's own operators are not used: the optimizer is torch's AdamW, as in the other backends; nothing is compiled.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping
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
os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed will have it, also from a process on its own

import deepspeed
from deepspeed.utils import (
    logger as deepspeed_logger,
)
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)

from areal_tasks.data.batching import Layout
from areal_tasks.engines.names import Names
from areal_tasks.engines.trainer import checkpoint
from areal_tasks.engines.trainer.backend import Progress, Scores, TokenLoss, TokenStats, Which
from areal_tasks.engines.trainer.forward import move, to_device
from areal_tasks.engines.trainer.optimizer import clip_gradients, parameter_groups, prepare_state, use_options
from areal_tasks.engines.trainer.policy import Policy, empty_policy, fill_policy, prepare, read_policy
from areal_tasks.engines.trainer.precision import Rounded
from areal_tasks.engines.trainer.process_group import gather_stats, ranks_here
from areal_tasks.engines.trainer.shares import Share, share_of
from areal_tasks.engines.trainer.skeleton import replace_parameters, with_memory
from schemas.recipe.sections import Model, Trainer

#: More steps than any run takes: DeepSpeed is not to print.
_NEVER: Final = 10**12
MOMENTS: Final = ("exp_avg", "exp_avg_sq")


class GatedAdamW(torch.optim.AdamW):
    """AdamW that steps only while `open`.

    DeepSpeed sums, clips and clears gradients in one call with the step, so that a step that is not wanted can be left
    out only here.
    """

    open = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.open:
            super().step()


class DeepSpeedBackend:
    """This rank's share of policy and optimizer. The frozen reference is split at stage 3, else whole on every rank.

    With bfloat16, the fp32 weights that the optimizer changes begin as the rounded ones. At stage 0 they do not: there
    DeepSpeed adds gradients up in fp32 only for fp32 weights, which is what it is given, and passes go through a copy.
    """

    def __init__(self, settings: Trainer, model: Model) -> None:
        self.settings = settings
        self.max_grad_norm = settings.max_grad_norm
        self.model_settings = model
        self.rank, self.world, self.device = ranks_here()
        self.dtype = torch.bfloat16 if model.dtype == "bfloat16" else torch.float32
        self.optimizer: GatedAdamW
        self.models: dict[Which, Any] = {}  # the policy inside DeepSpeed's engine
        self.mesh = init_device_mesh("cpu", (self.world,))  # checkpoints are put together in host memory
        self.gradients = False  # the passes of a minibatch are done, its step is not
        deepspeed_logger.setLevel(logging.WARNING)
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled

    def load(self, weights: Path, seed: int) -> None:
        torch.manual_seed(seed)
        self._forget()
        policy = self._read_policy(weights)
        self.optimizer = GatedAdamW(
            parameter_groups(policy.named_parameters(), self.settings), lr=self.settings.lr, fused=True
        )
        self.models["policy"] = self._wrap(policy, self.optimizer)
        for shard in self._shards():
            prepare_state(self.optimizer, shard)
        if hasattr(self.engine.optimizer, "_lazy_init_hp_params_optimizer_state"):  # stages 1 and 2: tells where it is
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()

    def load_reference(self, weights: Path) -> None:
        reference = prepare(self._load(weights, self.dtype), self.settings).requires_grad_(False)
        self.models["reference"] = self._wrap(reference) if self.settings.zero_stage == 3 else reference

    def use(self, settings: Trainer) -> None:
        self.max_grad_norm = settings.max_grad_norm
        use_options(self.optimizer, settings)
        if self.settings.zero_stage > 0:
            self.engine.optimizer.clip_grad = settings.max_grad_norm

    def learn(
        self, layout: Layout, weights: Float[Tensor, " T"], loss: TokenLoss, temperature: float, last: bool
    ) -> Float[Tensor, "K T"]:
        if self.gradients:  # of a minibatch in which nothing counted
            self.step(0.0, wanted=False)
        self.engine.set_gradient_accumulation_boundary(last)
        total, values = self.engine(to_device(layout, self.device), temperature, move(weights, self.device), loss)
        self.engine.backward(total * self.world)  # it averages over ranks; losses are weighted to add up
        self.gradients = last
        return cast(Tensor, values)

    @torch.no_grad()
    def score(self, layout: Layout, temperature: float, which: Which, last: bool = True) -> Scores:
        return cast(Scores, self.models[which](to_device(layout, self.device), temperature))

    def step(self, lr: float, wanted: bool) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        norm = self._clip() if self.settings.zero_stage == 0 else None
        self.optimizer.open = wanted and (norm is None or norm < math.inf)
        self.engine.step()
        self._round()
        self.optimizer.open = False
        self.gradients = False
        return float(self.engine.get_global_grad_norm()) if norm is None else norm

    def gather(self, stats: TokenStats) -> TokenStats:
        return gather_stats(stats)

    def names(self) -> Names:
        return self._policy().names

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._policy().model.named_parameters():
            with self._gathered(parameter):
                yield name, parameter.detach().to(self.dtype, copy=True)
        yield from self._policy().saved_buffers()

    def save_checkpoint(self, folder: Path, progress: Progress) -> Mapping[str, str]:
        if self.settings.zero_stage == 0:
            return checkpoint.save_state(folder, self._policy().model, self.optimizer, progress)
        held = {name: self._read(parameter) for name, parameter in self._policy().model.named_parameters()}
        return checkpoint.save_parameters(folder, held, progress)

    def load_checkpoint(self, folder: Path) -> Progress:
        if self.settings.zero_stage == 0:
            progress = checkpoint.load_state(folder, self._policy().model, self.optimizer)
            self._round()
            return progress
        named = dict(self._policy().model.named_parameters())
        held = {name: self._empty(parameter) for name, parameter in named.items()}
        progress = checkpoint.load_parameters(folder, held)
        for name, parameter in named.items():
            self._write(parameter, held[name])
        return progress

    def _read(self, parameter: Tensor) -> checkpoint.Parameter:
        """This rank's rows of a parameter's fp32 weight and state; DeepSpeed puts each together on all ranks."""
        whole = {key: safe_get_full_optimizer_state(parameter, key) for key in MOMENTS}
        whole["weight"] = safe_get_full_fp32_param(parameter)
        return {"step": self._counts()[0].cpu().clone(), **{key: self._rows(tensor) for key, tensor in whole.items()}}

    def _empty(self, parameter: Tensor) -> checkpoint.Parameter:
        """Room for what `_read` gives."""
        whole = torch.empty(getattr(parameter, "ds_shape", parameter.shape), dtype=torch.float32, device="meta")
        return {"step": torch.zeros(()), **{key: self._rows(whole) for key in ("weight", *MOMENTS)}}

    def _rows(self, whole: Tensor) -> Tensor:
        """This rank's share of `whole`, in host memory."""
        parts = whole.chunk(self.world)
        mine = parts[self.rank] if self.rank < len(parts) else whole[:0]
        here = torch.empty(mine.shape) if mine.is_meta else mine.cpu().clone()
        share: Tensor = DTensor.from_local(
            here, self.mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        return share

    @torch.no_grad()
    def _write(self, parameter: Tensor, rows: checkpoint.Parameter) -> None:
        """Put a parameter's fp32 weight and state in their places, and the weight into the passes too."""
        for count in self._counts():
            count.copy_(rows["step"])
        for key in MOMENTS:
            safe_set_full_optimizer_state(parameter, _whole(rows[key]).to(self.device), key)
        weight = _whole(rows["weight"]).to(self.device)
        safe_set_full_fp32_param(parameter, weight)
        with self._gathered(parameter, modified=True):
            parameter.data.copy_(weight)

    @property
    def engine(self) -> Any:
        """DeepSpeed's engine, of the policy last loaded."""
        return self.models["policy"]

    def _read_policy(self, weights: Path) -> nn.Module:
        """What DeepSpeed is given: weights in the precision of the passes, but at stage 0."""
        if self.settings.zero_stage == 0 and self.dtype != torch.float32:
            return Rounded(self._load(weights, torch.float32), self.dtype, self.settings)
        return prepare(self._load(weights, self.dtype), self.settings)

    def _load(self, weights: Path, dtype: torch.dtype) -> Policy:
        """The policy in `dtype`. At stage 3 no rank ever holds more of it than its share and one whole parameter."""
        if self.settings.zero_stage < 3:
            return read_policy(weights, self.settings, self.device, dtype)
        policy = empty_policy(weights, self.settings)
        config = make_config(self.settings, self.model_settings)

        def partitioned(parameter: nn.Parameter) -> nn.Parameter:
            made = with_memory(parameter, self.device, dtype)
            deepspeed.zero.Init(nn.ParameterList([made]), config_dict_or_path=config, dtype=dtype)
            return made

        replace_parameters(policy, partitioned)
        fill_policy(policy, weights, self.device, _share_of)
        return policy

    def _wrap(self, policy: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """DeepSpeed's engine of the policy."""
        config = make_config(self.settings, self.model_settings)
        buffers = [buffer.clone() for buffer in policy.buffers()]
        engine, *_ = deepspeed.initialize(model=policy, optimizer=optimizer, config=config)
        for buffer, exact in zip(policy.buffers(), buffers, strict=True):
            buffer.data = exact  # rotary frequencies among them: rounded, they would turn long sequences wrong
        return engine

    def _policy(self) -> Policy:
        held = self.engine.module
        return cast(Policy, held.master if isinstance(held, Rounded) else held)

    def _round(self) -> None:
        if isinstance(self.engine.module, Rounded):
            self.engine.module.round()

    def _shards(self) -> list[Tensor]:
        """What the optimizer changes: this rank's part of all weights, end to end in fp32; at stage 0 the weights."""
        if self.settings.zero_stage == 3:
            return list(self.engine.optimizer.fp32_partitioned_groups_flat)
        return [shard for group in self.optimizer.param_groups for shard in group["params"]]

    def _counts(self) -> list[Tensor]:
        """AdamW's count of steps, of each shard: all the same."""
        return [self.optimizer.state[shard]["step"] for shard in self._shards()]

    def _clip(self) -> float:
        """Stage 0 keeps plain gradients, and DeepSpeed would clip them without saying what their norm was."""
        return clip_gradients(list(self._policy().parameters()), self.max_grad_norm)

    def _gathered(self, parameter: Tensor, modified: bool = False) -> Any:
        """A context in which a parameter is whole; with `modified` all ranks then take what rank 0 has made of it."""
        if self.settings.zero_stage < 3:
            return nullcontext()
        return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0 if modified else None)

    def _forget(self) -> None:
        """Free what a load replaces before it takes memory of its own."""
        if "policy" in self.models:
            self.engine.destroy()
            del self.models["policy"], self.optimizer
            self.gradients = False


def _share_of(tensor: Any) -> Share:
    """What is here of a parameter that ZeRO-3 has partitioned, or of a buffer."""
    if not hasattr(tensor, "ds_tensor"):
        return share_of(tensor)
    part, size = tensor.ds_tensor, tensor.ds_tensor.ds_numel
    start = min(size * dist.get_rank(), tensor.ds_numel)
    return Share(part.narrow(0, 0, min(size, tensor.ds_numel - start)), tensor.ds_shape, start)


def _whole(rows: Tensor) -> Tensor:
    return cast(Tensor, cast(Any, rows).full_tensor())


def make_config(settings: Trainer, model: Model) -> dict[str, Any]:
    """DeepSpeed's configuration: one optimizer step per minibatch, of as many passes as there are."""
    stage = settings.zero_stage
    zero: dict[str, Any] = {"stage": stage}
    if settings.cpu_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": _NEVER,
        "gradient_clipping": settings.max_grad_norm if stage > 0 else 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": model.dtype == "bfloat16" and stage > 0},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
    }
