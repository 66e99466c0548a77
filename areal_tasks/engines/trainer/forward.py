"""Layouts on the computing device, prepared one item ahead by the host; and log-probabilities from logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Final, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from areal_tasks.data.batching import Layout
from areal_tasks.engines.trainer.head import Scores
from schemas.recipe.training import Trainer

#: The tensors of a `Layout` that the model needs.
_OF_MODEL: Final = ("input_ids", "position_ids", "predictors", "targets", "bounds")


def to_device(layout: Layout, device: torch.device) -> Layout:
    """`layout` with the tensors that the model needs on `device`. Does not wait for the device."""
    return _changed(layout, _OF_MODEL, partial(move, device=device))


def staged(layout: Layout, device: torch.device) -> Layout:
    """`layout` with the tensors that go to `device` in page-locked memory, so that their copies do not block."""
    return _changed(layout, (*_OF_MODEL, "where"), partial(pinned, device=device))


def _changed(layout: Layout, names: Iterable[str], change: Callable[[Tensor], Tensor]) -> Layout:
    held = ((name, getattr(layout, name)) for name in names)
    changes: dict[str, Any] = {name: change(tensor) for name, tensor in held if tensor is not None}
    return replace(layout, **changes)


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor in page-locked memory, so that copies to `device` do not block; itself if `device` is a CPU."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on `device`, pinned first: a copy from pageable memory would wait for all queued work."""
    if tensor.device.type == device.type:
        return tensor
    return pinned(tensor, device).to(device, non_blocking=device.type == "cuda")


def fetch(tensor: Tensor) -> Tensor:
    """A copy of `tensor` in host memory, valid once the device is synchronised, which this does not do."""
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def token_scores(logits: Float[Tensor, "T V"], targets: Int[Tensor, " T"], temperature: float) -> Scores:
    """log softmax(logits / temperature) at the targets, and the entropy of that distribution, in fp32 nats."""
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    with torch.no_grad():  # the clamp makes 0 · -inf, for a token of probability 0, be 0
        entropy = -(logprobs.exp() * logprobs.clamp_min(torch.finfo(logprobs.dtype).min)).sum(-1)
    return Scores(logprobs.gather(-1, targets[:, None])[:, 0], entropy)


# ── one item ahead ──────────────────────────────────────────────────────────────────────────────────────────────────


T = TypeVar("T")


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside this context torch uses one CPU thread: waking others takes several times as long as the work.

    The setting is process-wide; a thread that first uses torch inside the context keeps it.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_core(device: torch.device, settings: Trainer) -> AbstractContextManager[None]:
    """Inside this context torch's host work uses one core if `device` is a GPU.

    That work is a few passes over the batch, and waking the other cores takes longer than all of them. A CPU that
    trains keeps its threads, since results depend bitwise on their number; so does an optimizer in host memory.
    torch.compile recompiles for another number of threads: enter this before every pass, or before none.
    """
    return one_thread() if device.type == "cuda" and not settings.cpu_offload else nullcontext()


def ahead(source: Iterator[T], device: torch.device) -> AbstractContextManager[Iterator[T]]:
    """The items of `source`. On a GPU a thread, ended with the context, makes each while the previous one is used.

    A CPU computes at once what is launched: another thread would only take cores from it. An exception raised while
    making an item is raised when the item is taken.
    """
    return _from_thread(source, device) if device.type == "cuda" else nullcontext(source)


@contextmanager
def _from_thread(source: Iterator[T], device: torch.device) -> Iterator[Iterator[T]]:
    def make() -> list[T]:
        return list(islice(source, 1))

    def items() -> Iterator[T]:
        coming = thread.submit(make)
        while found := coming.result():
            coming = thread.submit(make)
            yield found[0]

    with ThreadPoolExecutor(1, "ahead", _initialise, (device,)) as thread:
        thread.submit(torch.get_num_threads).result()  # `_initialise` has run
        torch.set_num_threads(torch.get_num_threads())  # new threads inherit the last setting: restore this one's
        yield items()


def _initialise(device: torch.device) -> None:
    """Select the device, for pinning memory, and one core: torch would start a pool of threads for this thread."""
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
