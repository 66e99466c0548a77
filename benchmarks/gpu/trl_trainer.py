"""TRL's GRPOTrainer set up for speed, with its steps timed, and optionally with rollouts that are given to it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

Rollouts = tuple[list[list[int]], list[list[int]]]  # prompt and completion ids of each sample


class StepTimer(TrainerCallback):
    """Wall seconds of each optimizer step, the device idle at both ends; generation included."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        _synchronize()
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        _synchronize()
        self.seconds.append(time.perf_counter() - self._began)


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer that keeps how long each round of rollouts took: generation, rewards and advantages."""

    given: Rollouts | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.generation_seconds: list[float] = []
        self.timer = StepTimer()
        self.add_callback(self.timer)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        _synchronize()
        began = time.perf_counter()
        outputs = super()._generate_and_score_completions(inputs)
        _synchronize()
        self.generation_seconds.append(time.perf_counter() - began)
        return outputs

    def _generate_single_turn(self, *arguments: Any, **named: Any) -> Any:
        if self.given is None:
            return super()._generate_single_turn(*arguments, **named)
        return self.given[1], None

    def _tokenize_prompts(self, prompts: Any) -> Any:
        if self.given is None:
            return super()._tokenize_prompts(prompts)
        return self.given[0], None, {}


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def alternating_reward(completions: list[Any], **_: Any) -> list[float]:
    """1, 0, 1, 0, …: every group has a spread, whatever it says."""
    return [float(i % 2) for i in range(len(completions))]


def make_trainer(
    model: Path, prompts: list[str], size: int, new_tokens: int, micro: int, steps: int, output: Path, **settings: Any
) -> TimedTrainer:
    """A trainer of `steps` steps, each on all `prompts` times `size` samples, `micro` samples at a time.

    bf16 autocast over float32 weights, fused AdamW, no recompute, no reference model, nothing saved or logged.
    """
    samples = len(prompts) * size
    config = GRPOConfig(
        output_dir=str(output),
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        model_init_kwargs={"dtype": settings.pop("dtype", "float32"), "attn_implementation": "sdpa"},
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=samples // micro,
        steps_per_generation=samples // micro,
        num_generations=size,
        max_completion_length=new_tokens,
        max_steps=steps,
        learning_rate=1e-6,
        beta=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        shuffle_dataset=False,
        report_to=[],
        save_strategy="no",
        logging_steps=10_000,
        disable_tqdm=True,
        **settings,
    )
    data = Dataset.from_dict({"prompt": prompts})
    return TimedTrainer(model=str(model), reward_funcs=alternating_reward, args=config, train_dataset=data)


def micro_batch(wanted: int, samples: int) -> int:
    """The largest number of samples up to `wanted` that divides them all."""
    return next(n for n in range(min(wanted, samples), 0, -1) if samples % n == 0)


def vocabulary(model: Path) -> int:
    size: int = json.loads((model / "config.json").read_text())["vocab_size"]
    return size
