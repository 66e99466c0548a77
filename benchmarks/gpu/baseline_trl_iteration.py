"""Whole GRPO iterations of TRL's GRPOTrainer with transformers generation: seconds each.

    python -m benchmarks.gpu.baseline_trl_iteration SHAPE --model FOLDER --prompts PROMPTS.jsonl [--variant bf16]

As many prompts, completions and tokens as an iteration of ours has on that shape (benchmarks/gpu/settings.py) unless
told otherwise. vLLM, TRL's usual generator, is not used. Random weights hardly ever end a completion by themselves,
and a batch is decoded to its longest, so lengths are fixed.

`float32`: weights as in our trainer, recast to bf16 by autocast at every token generated. `bf16`: weights, and with
them the optimizer, in bf16, the only way for TRL 1.16 to generate from bf16 weights by `generate`: less precise than
ours, and a faster baseline. `continuous`: transformers' continuous batching, for which TRL casts the weights to bf16
for good; it knows no shortest completion, so a few may end early.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.gpu.prompts import read_prompts
from benchmarks.gpu.results import add_results_option, record
from benchmarks.gpu.settings import recipe_of_shape
from benchmarks.gpu.shapes import SHAPES

VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"dtype": "bfloat16"},
    "continuous": {"use_transformers_continuous_batching": True},
}


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


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the iterations after the first, and what of them was generation."""
    prompts = read_prompts(arguments.prompts)[: arguments.groups]
    samples = len(prompts) * arguments.size
    micro = micro_batch(arguments.micro_batch, samples)
    with tempfile.TemporaryDirectory() as output:
        trainer = make_trainer(
            arguments.model,
            prompts,
            arguments.size,
            arguments.new_tokens,
            micro,
            arguments.steps,
            Path(output),
            use_liger_kernel=torch.cuda.is_available(),
            generation_kwargs={"min_new_tokens": arguments.new_tokens},
            **VARIANTS[arguments.variant],
        )
        trainer.train()
    return {
        "shape": arguments.shape,
        "variant": arguments.variant,
        "groups": len(prompts),
        "group_size": arguments.size,
        "samples": samples,
        "new_tokens": arguments.new_tokens,
        "micro_batch": micro,
        "iteration_seconds": round(statistics.median(trainer.timer.seconds[1:]), 3),
        "rollout_seconds": round(statistics.median(trainer.generation_seconds[1:]), 3),
        "all_iterations": [round(t, 3) for t in trainer.timer.seconds],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--model", type=Path, required=True, help="the shape's folder")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with a prompt a line")
    parser.add_argument("--variant", choices=VARIANTS, default="float32")
    parser.add_argument("--groups", type=int, default=0, help="prompts")
    parser.add_argument("--size", type=int, default=0, help="completions a prompt")
    parser.add_argument("--new-tokens", type=int, default=0)
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3, help="iterations; the first is left out")
    add_results_option(parser)
    arguments = parser.parse_args()
    rollout = recipe_of_shape(arguments.shape).rollout
    arguments.groups = arguments.groups or rollout.groups
    arguments.size = arguments.size or rollout.group_size
    arguments.new_tokens = arguments.new_tokens or rollout.max_new_tokens
    torch.set_float32_matmul_precision("high")
    record(arguments.results, "trl_iteration", **measured(arguments))


if __name__ == "__main__":
    main()
