"""Kernels of packed causal attention by themselves: forward and backward over samples of equal length.

    python -m benchmarks.gpu.attention_kernels [135m 0.5b 1.5b] [--tokens 32768] [--length 1024]

`varlen` is what the trainer uses (FlashAttention-2 in torch); `sdpa flash` and `sdpa cudnn` take the samples as rows of
a batch, which only samples of one length can be. (cuDNN takes bounds too, through torch's private call for nested
tensors: its gradients were NaN, 50 times slower.) The difference is to `varlen`. On a CPU: `sdpa math` alone, to see
that it runs. Times are by the clock: at small shapes the host's part of a call shows in them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from areal_tasks.engines.trainer.attention import in_one_kernel
from benchmarks.gpu.results import add_results_option, record
from benchmarks.gpu.shapes import SHAPES, Shape

Heads = tuple[Tensor, Tensor, Tensor]  # queries, keys, values, each [1, heads, tokens, width]
REPEATS = 10


def inputs(shape: Shape, tokens: int, device: str) -> Heads:
    """Random heads, in memory as the projections leave them: [tokens, heads, width]."""
    width = shape.hidden // shape.heads
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def made(heads: int) -> Tensor:
        tensor = torch.randn(tokens, heads, width, device=device, dtype=dtype)
        return tensor.transpose(0, 1)[None].detach().requires_grad_()

    return made(shape.heads), made(shape.kv_heads), made(shape.kv_heads)


def varlen(heads: Heads, length: int) -> Tensor:
    """The trainer's kernel."""
    bounds = bounds_of(heads, length)
    return in_one_kernel(*heads, bounds, length, None, None)


def batched(backend: SDPBackend) -> Callable[[Heads, int], Tensor]:
    """Rows of a batch through one of the backends of scaled-dot-product attention."""

    def attend(heads: Heads, length: int) -> Tensor:
        rows = [tensor[0].unflatten(1, (-1, length)).transpose(0, 1) for tensor in heads]
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
        return out.transpose(0, 1).flatten(1, 2)[None]

    return attend


def bounds_of(heads: Heads, length: int) -> Tensor:
    return torch.arange(0, heads[0].shape[2] + 1, length, dtype=torch.int32, device=heads[0].device)


def milliseconds(attend: Callable[[Heads, int], Tensor], heads: Heads, length: int) -> tuple[float, float]:
    """Of a forward pass, and of a forward and backward pass, the device idle before and after."""

    def timed(work: Callable[[], object]) -> float:
        work()
        synchronize()
        began = time.perf_counter()
        for _ in range(REPEATS):
            work()
        synchronize()
        return (time.perf_counter() - began) / REPEATS * 1e3

    def both() -> None:
        attend(heads, length).sum().backward()

    with torch.no_grad():
        forward = timed(lambda: attend(heads, length))
    return forward, timed(both)


def gradients(attend: Callable[[Heads, int], Tensor], heads: Heads, length: int) -> Tensor:
    """Of a fixed function of the output, flat."""
    out = attend(heads, length)
    found = torch.autograd.grad((out * torch.linspace(-1, 1, out.shape[-1], device=out.device)).sum(), heads)
    return torch.cat([g.float().flatten() for g in found])


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--length", type=int, default=1024)
    add_results_option(parser)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kernels: dict[str, Callable[[Heads, int], Tensor]] = {"sdpa math": batched(SDPBackend.MATH)}
    if device == "cuda":
        flash, cudnn = batched(SDPBackend.FLASH_ATTENTION), batched(SDPBackend.CUDNN_ATTENTION)
        kernels = {"varlen": varlen, "sdpa flash": flash, "sdpa cudnn": cudnn}
    for name in arguments.shapes or ["135m", "1.5b"]:
        compare(name, kernels, arguments, device)


def compare(
    name: str, kernels: dict[str, Callable[[Heads, int], Tensor]], arguments: argparse.Namespace, device: str
) -> None:
    """A line for each kernel; one that the device or this torch lacks says so."""
    shape = SHAPES[name]
    heads = inputs(shape, arguments.tokens, device)
    flops = 2 * 2 * arguments.tokens * arguments.length * shape.hidden / 2
    wanted: Tensor | None = None
    for kernel, attend in kernels.items():
        try:
            found = gradients(attend, heads, arguments.length)
            forward, both = milliseconds(attend, heads, arguments.length)
        except (RuntimeError, TypeError) as error:
            print(f"{name} {kernel}: not possible here: {str(error).splitlines()[0][:150]}", flush=True)
            continue
        wanted = found if wanted is None else wanted
        off = float((found - wanted).norm() / wanted.norm())
        rate = 3.5 * flops / both / 1e9
        record(arguments.results, "attention", shape=name, kernel=kernel, forward_ms=round(forward, 3),
               both_ms=round(both, 3), tflops=round(rate, 1), off=round(off, 5), tokens=arguments.tokens)  # fmt: skip


if __name__ == "__main__":
    main()
