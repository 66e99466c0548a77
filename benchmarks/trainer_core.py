"""The trainer's optimizer steps alone: GRPO over packed random samples, without pipeline, store or other processes.

    python -m benchmarks.trainer_core [135m 0.5b 1.5b 7b] [--backend local fsdp2] [--json FILE]
    python -m benchmarks.trainer_core --check        (kernels of this device against plain fp32, on a tiny model)

Every step is what /train does with a minibatch: layouts, passes in bf16 through the backend, statistics, clipping,
AdamW on fp32 weights. Samples have `--length` positions, all trained on, or with `--varied` lengths from an eighth of
that. On a CPU only the shape `tiny` makes sense, and is the default.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import torch
from torch import Tensor

from areal_tasks.algorithms.behaviour import Bound
from areal_tasks.data.batching import make_layout, make_sequences
from areal_tasks.engines.trainer.checkpoint import Progress
from areal_tasks.engines.trainer.forward import one_core, to_device
from areal_tasks.engines.trainer.learner import Learner
from areal_tasks.engines.trainer.loading import read_policy
from areal_tasks.engines.trainer.local import LocalBackend
from areal_tasks.engines.trainer.plan import make_plan
from areal_tasks.engines.trainer.policy import Policy, prepare, working_copy
from areal_tasks.engines.trainer.rows import Batch
from areal_tasks.engines.trainer.settings import Settings
from benchmarks.gpu.results import machine
from benchmarks.gpu.shapes import SHAPES, Shape, mfu, random_model
from schemas.recipe.sections import Model
from schemas.recipe.training import Trainer

#: Tokens of a pass and of a chunk of logits that fit an H200 (139 GiB), without recompute; with it at 7B.
SIZES: Final = {
    "135m": (66560, 16384),
    "0.5b": (66560, 8192),
    "1.5b": (33280, 8192),
    "7b": (8192, 4096),
    "tiny": (512, 128),
}
#: How far bf16 passes may be from fp32 ones, as a share of the gradient's norm.
CLOSE: Final = 0.03


@dataclass(frozen=True)
class Result:
    """One shape on one backend; rates count every position that the model computes."""

    shape: str
    backend: str
    varied: bool
    rows: int
    length: int
    tokens_per_second: float
    mfu: float
    step_seconds: list[float]
    warm_up_seconds: float
    peak_gib: float
    passes: int
    tokens: int


def make_settings(shape: str, backend: str, arguments: argparse.Namespace, steps: int) -> Settings:
    """The settings that a recipe would give."""
    micro, chunk = SIZES[shape]
    trainer = Trainer(
        backend=backend,
        lr=1e-6,
        layout=arguments.layout,
        micro_batch_tokens=arguments.micro_batch_tokens or micro,
        head_chunk_tokens=arguments.head_chunk_tokens or chunk,
        gradient_checkpointing=arguments.gradient_checkpointing,
        compile=not arguments.eager,
    )
    model = Model(dtype="bfloat16", max_length=max(arguments.length + 1, 8))
    return Settings(
        kind="grpo",
        seed=0,
        trainer=trainer,
        model=model,
        temperature=1.0,
        minibatches=steps,
        total_steps=10 * steps,
        mean="token_mean",
        clip_ratio=0.2,
        behaviour=Bound("cap", 2.0),
    )


def make_batch(shape: Shape, rows: int, arguments: argparse.Namespace) -> Batch:
    """Random samples; the first token of each is the prompt, since no position predicts it."""
    generator = torch.Generator().manual_seed(0)
    shortest = arguments.length // 8 if arguments.varied else arguments.length
    lengths = torch.randint(shortest, arguments.length + 1, (rows,), generator=generator) + 1
    total = int(lengths.sum())
    ids = torch.randint(3, shape.vocabulary, (total,), generator=generator)
    noise = {name: torch.randn(total, generator=generator) for name in ("behaviour", "advantages")}
    noise["behaviour"] -= math.log(shape.vocabulary)
    samples = make_sequences(ids, torch.ones(total, dtype=torch.bool), lengths)
    names, kept = pa.array([str(i) for i in range(rows)]), torch.ones(rows, dtype=torch.bool)
    return Batch(names, lengths, kept, None, samples, torch.arange(rows), noise)


def make_backend(settings: Settings) -> LocalBackend:
    """The backend of that name, as the trainer service makes it."""
    if settings.trainer.backend == "local":
        return LocalBackend(settings.trainer, settings.model)
    from areal_tasks.engines.trainer.fsdp2 import Fsdp2Backend

    return Fsdp2Backend(settings.trainer, settings.model)


def loaded(settings: Settings, shape: str) -> LocalBackend:
    """A backend that holds a random model, read from a folder in memory as it would be from a store."""
    backend = make_backend(settings)
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        random_model(SHAPES[shape], 0).save_pretrained(folder)
        free()
        backend.load(Path(folder), 0)
    return backend


def learn(backend: LocalBackend, settings: Settings, batch: Batch) -> list[dict[str, Any]]:
    """One iteration of training; its rows of `train_steps`."""
    with one_core(backend.device, settings.trainer):
        plan = make_plan(batch, settings, 0, backend.world)
        learned = Learner(backend, settings, batch, plan).learn(0, Progress())
    rows: list[dict[str, Any]] = learned.train_steps.to_pylist()
    synchronize()
    return rows


def measure(shape: str, name: str, arguments: argparse.Namespace) -> Result:
    """Warm up with one step, then time the others."""
    started = time.perf_counter()
    settings = make_settings(shape, name, arguments, arguments.steps)
    backend = loaded(settings, shape)
    learn(backend, make_settings(shape, name, arguments, 1), make_batch(SHAPES[shape], arguments.rows, arguments))
    warm = time.perf_counter() - started
    batch = make_batch(SHAPES[shape], arguments.rows * arguments.steps, arguments)
    begun = time.perf_counter()
    rows = learn(backend, settings, batch)
    seconds = time.perf_counter() - begun
    tokens = sum(row["total_tokens"] for row in rows)
    length = round(tokens / len(batch.ids))
    peak = max(max(row["peak_bytes"]) for row in rows) / 2**30 if torch.cuda.is_available() else 0.0
    return Result(
        shape=shape,
        backend=name,
        varied=arguments.varied,
        rows=arguments.rows,
        length=arguments.length,
        tokens_per_second=tokens / seconds,
        mfu=mfu(SHAPES[shape], tokens / seconds, length),
        step_seconds=[round(row["step_seconds"], 4) for row in rows],
        warm_up_seconds=round(warm, 1),
        peak_gib=round(peak, 1),
        passes=sum(row["micro_batches"] for row in rows),
        tokens=tokens,
    )


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# ── the check ───────────────────────────────────────────────────────────────────────────────────────────────────────


def check(arguments: argparse.Namespace) -> int:
    """Compare loss and gradient of packed bf16 passes by this device's kernels to plain fp32; 1 if they differ much."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        random_model(SHAPES["tiny"], 0).save_pretrained(folder)
        for compiled in (False, True):
            for chunk in (16, 4096):
                gap = gradient_gap(Path(folder), device, Trainer(head_chunk_tokens=chunk, compile=compiled))
                print(f"compile={compiled!s:5} head_chunk_tokens={chunk:4}: gradient off by {gap:.4f} of its norm")
                worst = max(worst, gap)
    print("agrees" if worst < CLOSE else f"DISAGREES: more than {CLOSE}")
    return int(not worst < CLOSE)


def gradient_gap(folder: Path, device: torch.device, settings: Trainer) -> float:
    """‖g - g₀‖ / ‖g₀‖ over passes of several lengths; g₀ is of full logits, each sample in a row of its own."""
    reference, master = (read_policy(folder, settings, device) for _ in range(2))
    work = prepare(working_copy(master, torch.bfloat16), settings)
    for lengths in ([200, 3, 77, 130], [64, 190], [33, 2, 150, 90, 41, 260]):
        ids = torch.randint(3, 500, (sum(lengths),), generator=torch.Generator().manual_seed(len(lengths)))
        samples = make_sequences(ids, torch.arange(len(ids)) % 3 > 0, torch.tensor(lengths))
        rows = torch.arange(len(lengths))
        packed = to_device(make_layout(samples, rows, "packed"), device)
        padded = to_device(make_layout(samples, rows, "padded"), device)
        weights = torch.full((len(packed.targets),), 1 / len(packed.targets), device=device)
        work(packed, 0.8, weights, lambda logprobs, entropy, _part: torch.stack([-logprobs, entropy]))[0].backward()
        logits = reference.model(input_ids=padded.input_ids, use_cache=False).logits.flatten(0, 1)[padded.predictors]
        torch.nn.functional.cross_entropy(logits / 0.8, padded.targets).backward()
    synchronize()
    wanted = gradient(reference)
    return float((gradient(master) - wanted).norm() / wanted.norm())


def gradient(policy: Policy) -> Tensor:
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────────────


def show(result: Result) -> None:
    """Print a result in one line."""
    steps = " ".join(f"{s:.3f}" for s in result.step_seconds)
    print(
        f"{result.shape:5} {result.backend:6} {result.tokens_per_second:10,.0f} tokens/s  MFU {result.mfu:6.1%}  "
        f"{result.peak_gib:6.1f} GiB  {result.passes} passes  steps {steps} s  ready after {result.warm_up_seconds} s",
        flush=True,
    )


def run(arguments: argparse.Namespace) -> int:
    failures = 0
    for name in arguments.backend:
        for shape in arguments.shapes:
            try:
                result = measure(shape, name, arguments)
            except torch.OutOfMemoryError as error:
                print(f"{shape} {name}: {str(error).splitlines()[0]} Lower --micro-batch-tokens.", flush=True)
                failures += 1
            else:
                show(result)
                if arguments.json:
                    with arguments.json.open("a") as sink:
                        sink.write(json.dumps({"what": "trainer_core", **vars(result), **machine()}) + "\n")
            free()
    return failures


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of what a step trains on, how, and where its results go."""
    parser.add_argument("--rows", type=int, default=128, help="samples an optimizer step")
    parser.add_argument("--length", type=int, default=1024, help="positions of a sample")
    parser.add_argument("--varied", action="store_true", help="lengths from an eighth of --length up")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps that are timed")
    parser.add_argument("--micro-batch-tokens", type=int, default=0, help="default: what fits an H200")
    parser.add_argument("--head-chunk-tokens", type=int, default=0, help="default: what fits an H200")
    parser.add_argument("--layout", choices=("packed", "padded"), default="packed")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--json", type=Path, help="append results to this file")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "shapes", nargs="*", help=f"of {', '.join(SHAPES)}; default: 135m, 0.5b and 1.5b on a GPU, else tiny"
    )
    parser.add_argument("--backend", nargs="+", choices=("local", "fsdp2"), default=["local"])
    add_options(parser)
    parser.add_argument("--check", action="store_true", help="compare gradients instead of timing them")
    arguments = parser.parse_args()
    if not arguments.shapes:
        arguments.shapes = ["135m", "0.5b", "1.5b"] if torch.cuda.is_available() else ["tiny"]
    if unknown := set(arguments.shapes) - set(SHAPES):
        parser.error(f"no shape {unknown.pop()}: there are {', '.join(SHAPES)}")
    return check(arguments) if arguments.check else run(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
