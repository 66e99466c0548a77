"""A plain transformers training step: packed sequences, full logits, cross-entropy, AdamW; no recompute.

    python -m benchmarks.gpu.baseline_step SHAPE [--variant eager|layers] [--micro-batches 16,8]

`eager` runs rows of a batch through scaled-dot-product attention; `layers` packs them into one row with variable-length
attention and compiles each layer (one compilation) and the loss. Weights are float32 under autocast to bf16, or
(`--master`) bf16 with float32 masters in the optimizer: the faster one is the baseline. Every step trains on `--rows`
sequences; the micro-batch is the fastest of up to three that fits, as far as `--choose-seconds` allow; the record says
which were tried.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.gpu.packed_model import VARLEN, compile_layers, packed_inputs, random_policy
from benchmarks.gpu.results import add_results_option, record
from benchmarks.gpu.shapes import SHAPES, mfu

MICRO_BATCHES = {"135m": (32, 64, 16), "0.5b": (16, 32, 8), "1.5b": (8, 16, 4), "tiny": (1,)}


@dataclass
class Step:
    """One optimizer step over `rows` sequences, `micro` at a time."""

    model: Any
    loss: Callable[[Tensor, Tensor], Tensor]
    packed: bool
    master: list[Tensor] | None = None  # float32 copies that are trained, where the model itself is bf16

    def __post_init__(self) -> None:
        self.weights: list[Tensor] = list(self.model.parameters())
        trained = self.master or self.weights
        self.adamw = torch.optim.AdamW(trained, 1e-6, (0.9, 0.95), fused=True)

    def __call__(self, ids: Tensor, micro: int) -> None:
        for part in ids.split(micro):
            self.accumulate(part, len(part) / len(ids))
        self.update()

    def accumulate(self, ids: Tensor, share: float) -> None:
        """Forward and backward of some rows [rows, length]; the loss is the mean over them, times `share`."""
        inputs = packed_inputs(ids) if self.packed else {"input_ids": ids}
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.master is None):
            logits = self.model(**inputs).logits
        (self.loss(logits.flatten(0, 1), targets(ids)) * share).backward()

    def update(self) -> None:
        """Clip, step and clear."""
        if self.master is not None:
            for master, weight in zip(self.master, self.weights, strict=True):
                assert weight.grad is not None
                master.grad = weight.grad.float()
                weight.grad = None
        trained = self.master or self.weights
        torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        if self.master is not None:
            with torch.no_grad():
                torch._foreach_copy_(self.weights, self.master)


def targets(ids: Tensor) -> Tensor:
    """The next token of each position of rows [rows, length], flat; -100 where a row ends."""
    following = torch.full_like(ids, -100)
    following[:, :-1] = ids[:, 1:]
    return following.flatten()


def full_logits_loss(logits: Tensor, following: Tensor) -> Tensor:
    """Cross-entropy over the whole vocabulary in float32."""
    return cross_entropy(logits.float(), following)


def make_step(shape: str, variant: str, device: str, master: bool) -> Step:
    """The step of a variant, its model made and compiled (on first use)."""
    dtype = torch.bfloat16 if master else torch.float32
    model = random_policy(SHAPES[shape], device, "sdpa" if variant == "eager" else VARLEN, dtype)
    masters = [p.detach().float() for p in model.parameters()] if master else None
    if variant == "eager":
        return Step(model, full_logits_loss, packed=False, master=masters)
    compile_layers(model)
    return Step(model, torch.compile(full_logits_loss, dynamic=False), packed=True, master=masters)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], None], repeats: int, device: str) -> list[float]:
    """Wall time of each repeat, the device idle before and after."""
    times = []
    for _ in range(repeats):
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return times


def micro_seconds(step: Step, ids: Tensor, candidates: Sequence[int], device: str, limit: float) -> dict[int, float]:
    """Seconds a row of forward and backward, of each micro-batch that fits; none is begun after `limit` seconds."""
    found: dict[int, float] = {}
    started = time.perf_counter()
    for micro in candidates:
        if found and time.perf_counter() - started > limit:
            print(f"micro-batch {micro}: not tried, {limit:.0f} s are over", flush=True)
            continue
        part = ids[:micro]
        try:
            seconds_of(lambda part=part: step.accumulate(part, 1.0), 2, device)
            found[micro] = min(seconds_of(lambda part=part: step.accumulate(part, 1.0), 2, device)) / len(part)
        except torch.OutOfMemoryError:
            print(f"micro-batch {micro}: out of memory", flush=True)
        step.model.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.empty_cache()
    if not found:
        raise SystemExit(f"none of the micro-batches {list(candidates)} fits")
    return found


def fitted(micro: int, rows: int, length: int) -> int:
    """As many tokens as `micro` rows of 1024, or a few more, in a number of rows that divides `rows`."""
    wanted = min(rows, max(1, micro * 1024 // length))
    return next(n for n in range(wanted, rows + 1) if rows % n == 0)


def measured(arguments: argparse.Namespace, device: str) -> dict[str, Any]:
    """Tokens a second of whole optimizer steps."""
    shape, length = SHAPES[arguments.shape], arguments.length
    started = time.perf_counter()
    step = make_step(arguments.shape, arguments.variant, device, arguments.master)
    ids = torch.randint(3, shape.vocabulary, (arguments.rows, length), device=device)
    known = [fitted(micro, arguments.rows, length) for micro in MICRO_BATCHES[arguments.shape]]
    candidates = arguments.micro_batches or tuple(dict.fromkeys(known))
    tried = micro_seconds(step, ids, candidates, device, arguments.choose_seconds)
    micro, row_seconds = min(tried.items(), key=lambda item: item[1])
    prepared = time.perf_counter() - started
    repeats = max(2, min(8, int(arguments.seconds / (row_seconds * arguments.rows))))
    step(ids, micro)
    times = seconds_of(lambda: step(ids, micro), repeats, device)
    rate = arguments.rows * length / statistics.median(times)
    return {
        "shape": arguments.shape,
        "variant": arguments.variant + ("+master" if arguments.master else ""),
        "tokens_per_second": round(rate, 1),
        "mfu": round(mfu(shape, rate, length), 4),
        "rows": arguments.rows,
        "length": length,
        "micro_batch": micro,
        "micro_batches_tried": {str(rows): round(seconds, 6) for rows, seconds in tried.items()},
        "step_seconds": [round(t, 4) for t in times],
        "prepare_seconds": round(prepared, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if device == "cuda" else 0.0,
    }


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--variant", choices=("eager", "layers"), default="eager")
    parser.add_argument("--master", action="store_true", help="bf16 weights with float32 masters, no autocast")
    parser.add_argument("--micro-batches", type=numbers, default=(), help="rows at a time, to choose from")
    parser.add_argument("--choose-seconds", type=float, default=60, help="begin with no further micro-batch after that")
    parser.add_argument("--rows", type=int, default=128, help="sequences an optimizer step")
    parser.add_argument("--length", type=int, default=1024, help="tokens a sequence")
    parser.add_argument("--seconds", type=float, default=6.0, help="time the measured steps about so long")
    add_results_option(parser)
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    record(arguments.results, "plain_step", **measured(arguments, device))


if __name__ == "__main__":
    main()
