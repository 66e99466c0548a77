"""What a GPU does during a step: kernels by kind, idle time and where, launches, and how often the host waits."""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity

#: Kinds of kernels by what their names contain; the first that matches.
KINDS: Final = (
    ("attention", r"flash|fmha|cudnn.*sdpa|_attn"),
    ("matrix product", r"gemm|nvjet|cutlass|xmma|cublas|splitK"),
    ("copy and fill", r"Memcpy|Memset|CatArray|copy_kernel|FillFunctor"),
    ("communication", r"nccl"),
    ("optimizer and norm", r"multi_tensor|FusedAdam|fused_adam|LpNorm"),
    ("compiled", r"triton"),
    ("indexing", r"index|gather|scatter|embedding|sort"),
)
#: Calls after which the host knows that the device is done.
WAITS: Final = frozenset({"cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy"})
LAUNCHES: Final = re.compile(r"cudaLaunchKernel|cuLaunchKernel")


@dataclass(frozen=True)
class Span:
    """A kernel (or, on a CPU, an operation), in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Profile:
    """One profiled piece of work. `seconds` is its wall time with the profiler's own cost."""

    seconds: float
    spans: list[Span]
    waits: Counter[str]
    launches: int

    def busy(self) -> float:
        """Seconds in which at least one kernel ran."""
        return sum(end - start for start, end in merged(self.spans)) / 1e6

    def describe(self, rows: int = 14) -> str:
        """A short report."""
        idle = 1 - self.busy() / self.seconds if self.seconds else 0.0
        waits = ", ".join(f"{name} {n}" for name, n in self.waits.most_common()) or "none"
        head = f"{self.seconds:.3f} s, idle {idle:.1%}, {self.launches} launches, {len(self.spans)} kernels"
        parts = [head, f"the host waited: {waits}", _table("kind", by_kind(self.spans), rows)]
        return "\n".join([*parts, _table("kernel", by_name(self.spans), rows), _gaps(self.spans)])


def profiled(work: Callable[[], Any]) -> tuple[Profile, torch.profiler.profile]:
    """Profile `work` once, the device idle before and after; on a CPU its operations count as kernels."""
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=activities) as found:
        _synchronize()
        began = time.perf_counter()
        work()
        _synchronize()
        seconds = time.perf_counter() - began
    return read(found.events(), seconds, on_gpu), found


def read(events: Sequence[Any], seconds: float, on_gpu: bool) -> Profile:
    """A `Profile` of the profiler's events."""
    kinds = torch.autograd.DeviceType  # type: ignore[attr-defined]
    wanted = kinds.CUDA if on_gpu else kinds.CPU
    spans = [
        Span(e.name, e.time_range.start, e.time_range.end)
        for e in events
        if e.device_type == wanted and (on_gpu or e.cpu_parent is None) and not e.name.startswith("## ")
    ]
    waits = Counter(e.name for e in events if e.name in WAITS)
    if not on_gpu:
        waits.update("value read" for e in events if e.name == "aten::_local_scalar_dense")
    return Profile(seconds, spans, waits, sum(bool(LAUNCHES.search(e.name)) for e in events))


def merged(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """The times covered by any span, in order, none touching another."""
    found: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda s: s.start):
        if found and span.start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], span.end))
        else:
            found.append((span.start, span.end))
    return found


def kind(name: str) -> str:
    """The kind of a kernel."""
    return next((label for label, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "eager")


def by_kind(spans: Sequence[Span]) -> dict[str, tuple[float, int]]:
    """Milliseconds and number of each kind, longest first."""
    return _added((kind(s.name), s) for s in spans)


def by_name(spans: Sequence[Span]) -> dict[str, tuple[float, int]]:
    """The same of each kernel."""
    return _added((s.name, s) for s in spans)


def _added(named: Any) -> dict[str, tuple[float, int]]:
    total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for name, span in named:
        total[name][0] += (span.end - span.start) / 1e3
        total[name][1] += 1
    return {name: (ms, int(n)) for name, (ms, n) in sorted(total.items(), key=lambda item: -item[1][0])}


def _table(title: str, found: dict[str, tuple[float, int]], rows: int) -> str:
    whole = sum(ms for ms, _ in found.values()) or 1.0
    lines = [f"{ms:9.2f} ms {ms / whole:6.1%} {n:6d}  {name[:90]}" for name, (ms, n) in list(found.items())[:rows]]
    return "\n".join([f"  by {title}:", *lines])


def _gaps(spans: Sequence[Span], most: int = 6) -> str:
    """The longest times without a kernel, and which kernel ended them."""
    starts = {span.start: span.name for span in sorted(spans, key=lambda s: s.end)}
    gaps = [(after[0] - before[1], after[0]) for before, after in pairwise(merged(spans))]
    longest = sorted(gaps, reverse=True)[:most]
    lines = [f"{gap / 1e3:9.2f} ms before {starts[start][:80]}" for gap, start in longest]
    return "\n".join([f"  longest of {len(gaps)} gaps ({sum(g for g, _ in gaps) / 1e3:.1f} ms in all):", *lines])


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
