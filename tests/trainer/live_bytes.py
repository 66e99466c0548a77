"""How many bytes tensors take, at most, while something runs: on the CPU torch does not count them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from areal_tasks.engines.trainer.optimizer import local_share


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators of this thread make, while they live; `peak` is the most they took.

    What operators are given and have not made, such as the pages of a mapped file, is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in _storages((args, kwargs)):
            self._meet(storage, 0)
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            self._meet(storage, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _meet(self, storage: torch.UntypedStorage, counted: int) -> None:
        """Count a storage that is not known yet, until it dies."""
        number = storage._cdata
        if number in self.known:
            return
        self.now += counted

        def died(_: object) -> None:
            del self.known[number]
            self.now -= counted

        self.known[number] = weakref.ref(storage, died)


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    """Of the tensors in nested values, the share of each that is here; none of those on `meta`."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and not leaf.is_meta:
            yield local_share(leaf.detach()).untyped_storage()
