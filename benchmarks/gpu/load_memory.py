"""The most memory that each rank of a trainer takes while it loads a model and its reference, and in a first step.

    python -m benchmarks.gpu.load_memory [7b 14b 32b] [--backends fsdp2 zero-2 zero-3] [--ranks 2] [--no-step]

A model's weights are zeros in a file that takes no room on the disk; how much memory it takes does not depend on them.
A rank that runs out of memory is reported with what it had until then. On a CPU, where torch does not count, the
figures are the processes' resident memory, mapped files included; try `tiny` or `0.5b` there.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from areal_tasks.data.batching import make_layout, make_sequences
from areal_tasks.engines.trainer.backend import Backend
from areal_tasks.engines.trainer.ranks import join
from areal_tasks.engines.trainer.service import make_backend
from areal_tasks.engines.trainer.settings import read_settings
from benchmarks.gpu.results import add_results_option, record
from benchmarks.gpu.shapes import SHAPES, Shape

GIB: Final = 2**30
LENGTH: Final = 2048  # of the step's one sample
LARGE: Final = {
    **SHAPES,
    "7b": Shape("qwen2", 3584, 28, 28, 4, 18_944, 152_064, 1e6),
    "14b": Shape("qwen2", 5120, 48, 40, 8, 13_824, 152_064, 1e6),
    "32b": Shape("qwen2", 5120, 64, 40, 8, 27_648, 152_064, 1e6),
}
BACKENDS: Final = ("fsdp2", "zero-0", "zero-1", "zero-2", "zero-3")


def write_zeros(shape: Shape, folder: Path) -> int:
    """A model's folder with a sparse file of bf16 zeros; returns the number of its parameters."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.config(architectures=["Qwen2ForCausalLM"]))
    model.config.save_pretrained(folder)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, parameter in model.named_parameters():
        header[name] = {
            "dtype": "BF16",
            "shape": list(parameter.shape),
            "data_offsets": [at, at + 2 * parameter.numel()],
        }
        at += 2 * parameter.numel()
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + at)
    return at // 2


def make_recipe(backend: str, ranks: int, dtype: str) -> dict[str, Any]:
    """A recipe as the trainer service is given one."""
    kind, _, stage = backend.partition("-")
    chosen = {"backend": "deepspeed", "zero_stage": int(stage)} if kind == "zero" else {"backend": kind}
    trainer = {**chosen, "ranks": ranks, "micro_batch_tokens": LENGTH, "gradient_checkpointing": True}
    model = {"path": "given", "max_length": LENGTH, "dtype": dtype}
    return {"flow": "sft", "name": "memory", "data": {"source": "sums://2"}, "model": model, "trainer": trainer}


def step(backend: Backend, vocabulary: int) -> None:
    """An optimizer step on one sample."""
    samples = make_sequences(
        torch.arange(LENGTH) % vocabulary, torch.ones(LENGTH, dtype=torch.bool), torch.tensor([LENGTH])
    )
    layout = make_layout(samples, torch.arange(1), "packed")
    weights = torch.full((len(layout.targets),), 1 / len(layout.targets))

    def loss(logprobs: Tensor, entropy: Tensor, _part: slice) -> Tensor:
        return torch.stack([-logprobs, entropy])

    backend.learn(layout, weights, loss, 1.0, True)
    backend.step(1e-6, wanted=True)


def taken(work: Callable[[], object]) -> float:
    """The most GiB that were allocated during `work`, with what was there before."""
    if not torch.cuda.is_available():
        work()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / GIB


def be_rank(arguments: argparse.Namespace) -> None:
    """Load, load the reference, step; record the GiB of each as it ends."""
    settings = read_settings(make_recipe(arguments.backends[0], arguments.ranks, arguments.dtype))
    group = join(settings.trainer)
    backend = make_backend(settings)
    works: dict[str, Callable[[], object]] = {
        "load": lambda: backend.load(arguments.folder, 0),
        "reference": lambda: backend.load_reference(arguments.folder),
        "step": lambda: step(backend, LARGE[arguments.shapes[0]].vocabulary),
    }
    for name in list(works)[: 2 if arguments.no_step else 3]:
        about = {"shape": arguments.shapes[0], "backend": arguments.backends[0], "dtype": arguments.dtype}
        found: dict[str, Any] = {**about, "ranks": arguments.ranks, "rank": group.rank, "part": name}
        try:
            record(arguments.results, "load_memory", **found, gib=round(taken(works[name]), 2))
        except torch.OutOfMemoryError as error:
            record(arguments.results, "load_memory", **found, gib=None, error=str(error).splitlines()[0])
            os._exit(1)  # the other ranks may wait in a collective


def measure(shape: str, backend: str, folder: Path, arguments: argparse.Namespace) -> None:
    """Start the ranks; torchrun ends all of them when one fails."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}"]
    options = [shape, "--backends", backend, "--ranks", str(arguments.ranks), "--dtype", arguments.dtype]
    options += ["--results", str(arguments.results), "--folder", str(folder)]
    options += ["--no-step"] if arguments.no_step else []
    subprocess.run([*run, "-m", "benchmarks.gpu.load_memory", *options], check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=["7b"], help=f"of {', '.join(LARGE)}")
    parser.add_argument("--backends", nargs="+", default=["fsdp2", "zero-3"], choices=BACKENDS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--no-step", action="store_true", help="only load: AdamW's state comes with the first step")
    parser.add_argument("--folder", type=Path, help="of the model; given to the ranks")
    add_results_option(parser)
    arguments = parser.parse_args()
    if arguments.folder is not None:
        be_rank(arguments)
        return
    for shape in arguments.shapes:
        with tempfile.TemporaryDirectory() as folder:
            count = write_zeros(LARGE[shape], Path(folder))
            print(f"{shape}: {count / 1e9:.1f} billion parameters, {4 * count / GIB:.1f} GiB in float32", flush=True)
            for backend in arguments.backends:
                measure(shape, backend, Path(folder), arguments)


if __name__ == "__main__":
    main()
