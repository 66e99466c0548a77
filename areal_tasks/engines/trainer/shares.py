"""This rank's share of each of a model's tensors, filled from a checkpoint's safetensors.

If the model holds a tensor as it is stored, only the share is read, some megabytes at a time. Tensors that transformers
makes from several stored ones, such as a layer's experts, are made whole in host memory, one group at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Shaped
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from areal_tasks.engines.names import Group, Names
from areal_tasks.engines.trainer.optimizer import local_share, split_over
from schemas.errors import UserError, listed

#: Stored elements that are read at once (or one row if that is larger).
READ_ELEMENTS: Final = 8 * 2**20


@dataclass(frozen=True)
class Share:
    """Consecutive elements of a tensor of `shape`, from element `start` on; `target` is their memory."""

    target: Tensor  # contiguous
    shape: torch.Size
    start: int = 0

    @property
    def flat(self) -> Shaped[Tensor, " n"]:
        return self.target.view(-1)


def share_of(tensor: Tensor) -> Share:
    """This rank's share of a tensor: all of it, or the rows of a sharded one that `Shard(0)` gives this rank."""
    if not isinstance(tensor, DTensor):
        return Share(tensor.detach(), tensor.shape)
    mesh = tensor.device_mesh
    first = first_row(tensor.shape[0], split_over(mesh), mesh.get_local_rank(mesh.ndim - 1))
    return Share(local_share(tensor.detach()), tensor.shape, first * prod(tensor.shape[1:]))


def first_row(rows: int, parts: int, part: int) -> int:
    """The first row of `part` when torch's `chunk` splits `rows` rows into `parts`; `rows` if the part is empty."""
    return min(-(-rows // parts) * part, rows)


@torch.no_grad()
def fill(folder: Path, names: Names, shares: Mapping[str, Share]) -> None:
    """Read `shares`, which are named as in the model, from the checkpoint in `folder`. Rounds to the targets' dtypes.

    UserError: the checkpoint lacks a share's tensor, or has another shape of it, or two values of tied tensors.
    """
    made = {name for group in names.groups for name in group.held}
    if lacking := shares.keys() - made - set(names.buffers):  # a missing buffer keeps its module's value
        raise UserError(f"the weights in {folder} lack tensors of their model: {listed(lacking)}; name complete ones")
    with ExitStack() as stack:
        stored = _Stored(folder, stack)
        for group in _without_duplicates(names.groups, stored):
            if any(shares[name].target.numel() for name in group.held):
                _fill_group(stored, group, shares)


def _fill_group(stored: _Stored, group: Group, shares: Mapping[str, Share]) -> None:
    if group.same:
        (name,), (held,) = group.stored, group.held
        share = shares[held]
        _check_shape(held, share, stored.shape(name))
        for at, piece in stored.pieces(name, share.start, share.target.numel()):
            share.flat[at : at + len(piece)].copy_(piece.to(share.target.device))
        return
    whole = group.to_model([stored.whole(name) for name in group.stored])
    for held, tensor in zip(group.held, whole, strict=True):
        share = shares[held]
        _check_shape(held, share, tensor.shape)
        share.flat.copy_(tensor.reshape(-1)[share.start : share.start + share.target.numel()])


def _check_shape(name: str, share: Share, shape: Iterable[int]) -> None:
    if list(share.shape) != list(shape):
        raise UserError(
            f"the weights are not of the model that their config.json describes: {name} has the shape {list(shape)} "
            f"there, and {list(share.shape)} in the model"
        )


def _without_duplicates(groups: Iterable[Group], stored: _Stored) -> Iterator[Group]:
    """The groups, without duplicates: a tied tensor that is stored under both its names."""
    made: dict[tuple[str, ...], Group] = {}
    for group in groups:
        if group.held not in made:
            made[group.held] = group
            yield group
        elif not stored.equal(made[group.held].stored[0], group.stored[0]):
            both = listed([*made[group.held].stored, *group.stored])
            raise UserError(
                f"config.json ties {both}, but the weights hold different values for them: set tie_word_embeddings to "
                "false there"
            )


class _Stored:
    """The tensors in a folder's safetensors files, which stay open as long as the stack."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        files = [stack.enter_context(safe_open(file, framework="pt")) for file in sorted(folder.glob("*.safetensors"))]
        self.files: dict[str, Any] = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def shape(self, name: str) -> list[int]:
        shape: list[int] = self.files[name].get_slice(name).get_shape()
        return shape

    def whole(self, name: str) -> Tensor:
        tensor: Tensor = self.files[name].get_tensor(name)
        return tensor

    def pieces(self, name: str, start: int, count: int) -> Iterator[tuple[int, Shaped[Tensor, " n"]]]:
        """Elements `start` to `start + count` of a tensor in pieces, each with its offset from `start`."""
        shape = self.shape(name)
        if not shape:
            yield 0, self.whole(name).view(1)
            return
        row = max(prod(shape[1:]), 1)
        step, end = max(READ_ELEMENTS // row, 1) * row, start + count
        at = start
        while at < end:
            until = min(at // row * row + step, end)
            rows = self.files[name].get_slice(name)[at // row : -(-until // row)]
            yield at - start, rows.reshape(-1)[at % row :][: until - at]
            at = until

    def equal(self, one: str, other: str) -> bool:
        """Whether two tensors have the same shape and values."""
        count = prod(self.shape(one))
        pairs = zip(self.pieces(one, 0, count), self.pieces(other, 0, count), strict=True)
        return self.shape(one) == self.shape(other) and all(torch.equal(a, b) for (_, a), (_, b) in pairs)
