"""TRL's GRPO training step on given rollouts: tokens a second of its optimizer steps, generation left out.

    python -m benchmarks.gpu.baseline_trl_step SHAPE --model FOLDER [--variant plain|liger|compile] [--varied]

The real trainer runs, with its accumulation, clipping, optimizer and metrics; only generation is replaced by fixed
completions, and the time of making rollouts, rewards and advantages is subtracted. All sequences have one length, so
that TRL, which pads, pads nothing; with `--varied` lengths from an eighth of it up, as `benchmarks.trainer_core` has
them, and padding is not counted. Log-probabilities come from TRL's own fused head, which never makes full logits.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.results import add_results_option, record
from benchmarks.gpu.shapes import SHAPES, mfu
from benchmarks.gpu.trl_trainer import TimedTrainer, make_trainer, micro_batch, vocabulary

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "liger": {"use_liger_kernel": True},
    "compile": {"torch_compile": True},
    "bf16": {"dtype": "bfloat16"},  # weights and optimizer in bf16: lower precision than ours, for information
}
MICRO_BATCHES = {"135m": 64, "0.5b": 32, "1.5b": 16, "tiny": 4}
SIZE = 8  # samples a group


def lengths(arguments: argparse.Namespace) -> list[int]:
    """Tokens of each sample, the prompt's included."""
    shortest = arguments.length // 8 if arguments.varied else arguments.length
    generator = torch.Generator().manual_seed(0)
    found: list[int] = torch.randint(shortest, arguments.length + 1, (arguments.rows,), generator=generator).tolist()
    return found


def run(arguments: argparse.Namespace, micro: int) -> TimedTrainer:
    """Train; the trainer with its times."""
    prompt, length, groups = arguments.prompt_tokens, arguments.length, arguments.rows // SIZE
    top = vocabulary(arguments.model)
    generator = torch.Generator().manual_seed(0)
    questions = torch.randint(3, top, (groups, prompt), generator=generator).repeat_interleave(SIZE, 0).tolist()
    answers = [torch.randint(3, top, (n - prompt,), generator=generator).tolist() for n in lengths(arguments)]
    names = [f"prompt {i}" for i in range(groups)]
    with tempfile.TemporaryDirectory() as output:
        settings = VARIANTS[arguments.variant]
        trainer = make_trainer(
            arguments.model, names, SIZE, length - prompt, micro, arguments.steps, Path(output), **settings
        )
        trainer.given = (questions, answers)
        trainer.train()
    return trainer


def largest(arguments: argparse.Namespace) -> tuple[TimedTrainer, int]:
    """The trainer's run with the wanted micro-batch, halved until it fits."""
    micro = micro_batch(arguments.micro_batch or MICRO_BATCHES[arguments.shape], arguments.rows)
    while True:
        try:
            return run(arguments, micro), micro
        except torch.OutOfMemoryError:
            print(f"micro-batch {micro}: out of memory", flush=True)
        torch.cuda.empty_cache()
        micro = micro_batch(micro // 2, arguments.rows)


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second, prompts included, of the steps after the first."""
    started = time.perf_counter()
    trainer, micro = largest(arguments)
    times = [step - made for step, made in zip(trainer.timer.seconds, trainer.generation_seconds, strict=True)]
    tokens = sum(lengths(arguments))
    rate = tokens / statistics.median(times[1:])
    return {
        "shape": arguments.shape,
        "variant": arguments.variant,
        "tokens_per_second": round(rate, 1),
        "mfu": round(mfu(SHAPES[arguments.shape], rate, round(tokens / arguments.rows)), 4),
        "rows": arguments.rows,
        "length": arguments.length,
        "varied": arguments.varied,
        "mean_length": round(tokens / arguments.rows, 1),
        "prompt_tokens": arguments.prompt_tokens,
        "micro_batch": micro,
        "step_seconds": [round(t, 4) for t in times],
        "rollout_seconds_left_out": [round(t, 4) for t in trainer.generation_seconds],
        "seconds": round(time.perf_counter() - started, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if torch.cuda.is_available() else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--model", type=Path, required=True, help="the shape's folder")
    parser.add_argument("--variant", choices=VARIANTS, default="liger")
    parser.add_argument("--micro-batch", type=int, default=0, help="samples at a time; halved until it fits")
    parser.add_argument("--rows", type=int, default=128, help="samples an optimizer step")
    parser.add_argument("--length", type=int, default=1024, help="tokens a sample")
    parser.add_argument("--varied", action="store_true", help="lengths from an eighth of --length up")
    parser.add_argument("--prompt-tokens", type=int, default=1, help="of these, the prompt's: not trained")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps; the first is left out")
    add_results_option(parser)
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    record(arguments.results, "trl_step", **measured(arguments))


if __name__ == "__main__":
    main()
