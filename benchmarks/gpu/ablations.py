"""What each of the trainer's choices is worth: the same steps with one thing changed, one process, one table.

    python -m benchmarks.gpu.ablations SHAPE [--only NAME …] [--without NAME …] [--varied] [--profile FOLDER]

`now` is the trainer as it is; every other row changes one thing and puts it back. Some rows undo a choice, some try
one that the trainer does not make. The batch is that of `benchmarks.trainer_core`. `--list` names them all.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from areal_tasks.data import batching
from areal_tasks.data.batching import Layout
from areal_tasks.engines.trainer import ahead, fsdp2, learner, policy
from areal_tasks.engines.trainer.backend import Backend
from areal_tasks.engines.trainer.policy import decoder_layers
from benchmarks import trainer_core
from benchmarks.gpu.results import machine
from benchmarks.gpu.shapes import SHAPES, mfu

Change = Callable[[Backend, argparse.Namespace], AbstractContextManager[None]]
BOUNDS: Final = 64  # a padded row's bounds come in multiples of so many


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    tokens_per_second: float
    mfu: float
    step_seconds: list[float]
    ready_seconds: float  # the first step, compilation included
    peak_gib: float


# ── what is undone ──────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def dtensor_step(backend: Backend, _: argparse.Namespace) -> Iterator[None]:
    """Norm, clip and AdamW through DTensors instead of their local shares."""

    def clip(parameters: list[Tensor], max_norm: float) -> float:
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        clip_grads_with_norm_(parameters, max_norm, norm)
        return float(fsdp2.whole(norm))

    def step(optimizer: torch.optim.Optimizer, lr: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()

    with patch.object(fsdp2, "clip_gradients", clip), patch.object(fsdp2, "step_at", step):
        yield


@contextmanager
def late_host(backend: Backend, _: argparse.Namespace) -> Iterator[None]:
    """Statistics and layouts are made while the device waits for the next step."""
    with patch.object(ahead.Ahead, "prepare", lambda _: None), patch.object(learner, "fetch", lambda t: t.cpu()):
        yield


@contextmanager
def added_picks(backend: Backend, _: argparse.Namespace) -> Iterator[None]:
    """The gradient of the picked positions is added up by atomic operations."""
    with patch.object(policy, "_picked", lambda h, layout: h.flatten(0, 1).index_select(0, layout.predictors)):
        yield


@contextmanager
def eager_norm(backend: Backend, _: argparse.Namespace) -> Iterator[None]:
    """The final norm is not compiled."""
    norm = policy_of(backend).model.base_model.norm
    with patch.object(norm, "forward", type(norm).forward.__get__(norm)):
        yield


@contextmanager
def before(backend: Backend, arguments: argparse.Namespace) -> Iterator[None]:
    """All of these at once: the trainer before they were made."""
    with ExitStack() as stack:
        for change in (dtensor_step, late_host, added_picks, eager_norm):
            stack.enter_context(change(backend, arguments))
        yield


# ── what is tried ───────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def static_shapes(backend: Backend, arguments: argparse.Namespace) -> Iterator[None]:
    """Layers are compiled for one number of tokens: kernels know all sizes."""
    with recompiled(backend, arguments, dynamic=False):
        yield


@contextmanager
def open_sizes(backend: Backend, arguments: argparse.Namespace) -> Iterator[None]:
    """Layers are compiled for any sizes, the width of a head included, as they were before the compiler was told."""
    with recompiled(backend, arguments, dynamic=True):
        yield


@contextmanager
def static_padded(backend: Backend, arguments: argparse.Namespace) -> Iterator[None]:
    """The same, every pass padded to a multiple of an eighth of the budget, so that few numbers occur."""
    unit = (arguments.micro_batch_tokens or trainer_core.SIZES[arguments.shape][0]) // 8
    with (
        patch.object(learner, "lay_out", lambda *a: widened(batching.lay_out(*a), unit)),
        recompiled(backend, arguments, dynamic=False),
    ):
        yield


@contextmanager
def tuned(backend: Backend, arguments: argparse.Namespace) -> Iterator[None]:
    """One number of tokens, and the compiler tries out the shapes of its kernels' blocks."""
    with recompiled(backend, arguments, dynamic=False, options={"coordinate_descent_tuning": True}):
        yield


@contextmanager
def recompiled(backend: Backend, arguments: argparse.Namespace, dynamic: bool, **how: Any) -> Iterator[None]:
    """Layers and norm compiled otherwise; back to what they were afterwards.

    Not `dynamic`: the integers of modules are constants too, which those of sharded ones are not otherwise.
    """
    model = policy_of(backend)
    modules = [*decoder_layers(model), model.model.base_model.norm]
    before = [module.forward for module in modules]
    torch._dynamo.reset()
    for module in modules:
        plain = type(module).forward.__get__(module)
        module.forward = plain if arguments.eager else torch.compile(plain, dynamic=dynamic, **how)
    try:
        with torch._dynamo.config.patch(specialize_int=not dynamic):
            yield
    finally:
        for module, forward in zip(modules, before, strict=True):
            module.forward = forward
        torch._dynamo.reset()


def sized(micro: float = 1.0, chunk: float = 1.0) -> Change:
    """Other sizes of a pass and of a chunk of logits, as multiples of the usual ones."""

    @contextmanager
    def change(backend: Backend, arguments: argparse.Namespace) -> Iterator[None]:
        usual, chunks = trainer_core.SIZES[arguments.shape]
        model = policy_of(backend)
        with (
            patch.object(arguments, "micro_batch_tokens", int(usual * micro)),
            patch.object(model, "head_chunk_tokens", int(chunks * chunk)),
        ):
            yield

    return change


def widened(layout: Layout, unit: int) -> Layout:
    """`layout` with its row padded to a multiple of `unit`; the padding makes samples of its own, which count nothing.

    The list of bounds is filled up with empty samples, since compiled code knows its length too.
    """
    have = layout.input_ids.shape[1]
    width = -(-have // unit) * unit
    assert layout.bounds is not None and layout.position_ids is not None
    padding = torch.arange(have, width, layout.longest, dtype=torch.int32)[1:]
    bounds = torch.cat([layout.bounds, padding])
    filled = -(-(len(bounds) + 1) // BOUNDS) * BOUNDS
    return dataclasses.replace(
        layout,
        input_ids=torch.nn.functional.pad(layout.input_ids, (0, width - have)),
        position_ids=torch.nn.functional.pad(layout.position_ids, (0, width - have)),
        bounds=torch.nn.functional.pad(bounds, (0, filled - len(bounds)), value=width),
    )


#: Changes to the backend that is loaded, and the rows they make.
CHANGES: Final[dict[str, Change]] = {
    "now": lambda _b, _a: nullcontext(),
    "step through DTensors": dtensor_step,
    "host work before the step": late_host,
    "picks added by atomics": added_picks,
    "final norm eager": eager_norm,
    "all four": before,
    "passes ½": sized(micro=0.5),
    "passes ¼": sized(micro=0.25),
    "passes 2×": sized(micro=2.0),
    "head chunks ½": sized(chunk=0.5),
    "head chunks 2×": sized(chunk=2.0),
    "sizes left open": open_sizes,
    "static shapes": static_shapes,
    "static, padded": static_padded,
    "static, tuned blocks": tuned,
}


# ── the measurement ─────────────────────────────────────────────────────────────────────────────────────────────────


def policy_of(backend: Backend) -> Any:
    return backend.models["policy"]  # type: ignore[attr-defined]


def timed(backend: Backend, arguments: argparse.Namespace, name: str) -> Row:
    """Seconds and rate of whole iterations of `--steps` optimizer steps, after one to warm up."""
    shape = SHAPES[arguments.shape]
    started = time.perf_counter()
    settings = trainer_core.make_settings(arguments.shape, arguments.backend, arguments, 1)
    trainer_core.learn(backend, settings, trainer_core.make_batch(shape, arguments.rows, arguments))
    ready = time.perf_counter() - started
    settings = trainer_core.make_settings(arguments.shape, arguments.backend, arguments, arguments.steps)
    batch = trainer_core.make_batch(shape, arguments.rows * arguments.steps, arguments)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    rows = trainer_core.learn(backend, settings, batch)
    seconds = time.perf_counter() - begun
    tokens = sum(row["total_tokens"] for row in rows)
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    steps = [round(row["step_seconds"], 4) for row in rows]
    utilisation = mfu(shape, tokens / seconds, round(tokens / len(batch.ids)))
    return Row(name, round(tokens / seconds, 1), round(utilisation, 4), steps, round(ready, 1), round(peak, 1))


def measured(backend: Backend, arguments: argparse.Namespace, name: str) -> Row | None:
    """The row of one change; None where memory did not suffice, or a kernel refused."""
    try:
        with CHANGES[name](backend, arguments):
            return timed(backend, arguments, name)
    except RuntimeError as error:
        print(f"{name}: not possible here: {str(error).splitlines()[0][:150]}", flush=True)
    gc.collect()
    torch.cuda.empty_cache()
    policy_of(backend).zero_grad(set_to_none=True)
    return None


def show(row: Row, now: Row | None) -> None:
    ratio = "" if now is None else f"{row.tokens_per_second / now.tokens_per_second - 1:+7.1%}"
    print(
        f"{row.name:28} {row.tokens_per_second:10,.0f} tokens/s  MFU {row.mfu:6.2%} {ratio:8} "
        f"step {statistics.median(row.step_seconds):.4f} s  first {row.ready_seconds:5.1f} s  {row.peak_gib:5.1f} GiB",
        flush=True,
    )


def run(arguments: argparse.Namespace) -> None:
    """Load once, then every row; `now` comes first and once more at the end, to show the noise."""
    wanted = [n for n in CHANGES if n not in arguments.without and (not arguments.only or n in arguments.only)]
    settings = trainer_core.make_settings(arguments.shape, arguments.backend, arguments, 1)
    backend = trainer_core.loaded(settings, arguments.shape)
    now: Row | None = None
    for name in [*wanted, *(["now"] if "now" in wanted and len(wanted) > 1 else [])]:
        row = measured(backend, arguments, name)
        if row is None:
            continue
        show(row, now)
        now = now or (row if name == "now" else None)
        if arguments.json:
            shared = {"shape": arguments.shape, "backend": arguments.backend, "varied": arguments.varied}
            with arguments.json.open("a") as sink:
                sink.write(json.dumps({"what": "ablation", **shared, **vars(row), **machine()}) + "\n")
        if name == "now" and row is now and arguments.profile:
            settings = trainer_core.make_settings(arguments.shape, arguments.backend, arguments, 2)
            trainer_core.profile(backend, settings, arguments.shape, arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES, nargs="?", default="tiny")
    parser.add_argument("--only", nargs="+", choices=CHANGES, default=[])
    parser.add_argument("--without", nargs="+", choices=CHANGES, default=[])
    parser.add_argument("--list", action="store_true", help="name the rows")
    trainer_core.add_options(parser)
    parser.add_argument("--backend", choices=("local", "fsdp2"), default="fsdp2")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(CHANGES))
        return
    run(arguments)


if __name__ == "__main__":
    main()
