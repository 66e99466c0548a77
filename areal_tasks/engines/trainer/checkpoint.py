"""Training state on disk through torch.distributed.checkpoint (DCP): any backend on any number of ranks can load it.

A checkpoint holds only tensors: for every parameter, under its Hugging Face name, the fp32 weight and AdamW's state;
the random state; and the progress. Loading treats files as data and runs no code that they name.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.futures import Future

from areal_tasks.engines.trainer.checkpoint_files import Copies, Hashed, PiecesPlanner, Put, write_files
from areal_tasks.engines.trainer.memory import ran_out
from areal_tasks.engines.trainer.optimizer import prepare_state
from areal_tasks.store.objects.local import file_sha256
from schemas.errors import UserError, first_line

#: Fetches files of a checkpoint, by name, into its folder. Every rank calls it for those that it reads itself.
Fetch = Callable[[Collection[str]], None]
#: A parameter's `weight` and its AdamW state: `step`, `exp_avg`, `exp_avg_sq`. Sharded tensors are DTensors.
Parameter = Mapping[str, Tensor]
Parameters = Mapping[str, Parameter]
#: SHA-256 and bytes of each file of a checkpoint, by name.
Files = Mapping[str, tuple[str, int]]
#: The file of a checkpoint that says where in its other files each tensor is.
METADATA: Final = ".metadata"
#: Threads that write a copy while the trainer does something else, which needs cores too.
WRITERS: Final = 4
#: Modules and names in DCP's pickled metadata; some since torch 2.11, some before it.
_MODULES: Final = ("torch.distributed.checkpoint.", "torch.distributed.tensor.")
_NAMES: Final = frozenset(
    {
        "torch.Size", "torch.device", "torch.serialization._get_layout", "torch._utils._rebuild_device",
        "collections.OrderedDict", "pathlib.PosixPath", "pathlib._local.PosixPath", "_codecs.encode",
        *(f"torch.{kind}" for kind in ("float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8", "bool")),
    }
)  # fmt: skip


@dataclass(frozen=True)
class Progress:
    """Training progress, saved with every checkpoint."""

    step: int = 0  # optimizer steps since version 0, skipped and empty ones included
    skipped_in_row: int = 0


def held_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> Parameters:
    """The tensors that `model` and `optimizer` hold themselves, whole or sharded."""
    return {
        name: {"weight": parameter.detach(), **prepare_state(optimizer, parameter)}
        for name, parameter in model.named_parameters()
    }


class Saving:
    """`parameters`, RNG and progress on their way into `folder`, which is fresh. Every rank makes one.

    These are DCP's own steps of a save. Making it, and `finish`, exchange what the ranks hold and have written. Between
    them each rank writes its share by itself, so that `write` may run in a thread while the ranks train. Then `hold`
    has to copy the share before training goes on, unless the tensors are `copies` already.
    """

    def __init__(self, folder: Path, parameters: Parameters, progress: Progress, copies: bool = False) -> None:
        counts = torch.tensor([progress.step, progress.skipped_in_row])
        state = {"parameters": parameters, "rng": torch.get_rng_state(), "progress": counts}
        self.folder = folder
        self.held = copies
        self._metadata: Metadata | None = None  # on rank 0
        self._writer = dcp.FileSystemWriter(folder, sync_files=False)
        self._ranks = _DistWrapper(None, dist.is_initialized(), 0)
        planner = PiecesPlanner()
        with _causes(), _without_warnings():
            plan = self._ranks.reduce_scatter("plan", partial(self._mine, planner, state), partial(self._all, planner))
        plan = planner.finish_plan(plan)
        self._prefix: str = plan.storage_data.prefix
        self._items = plan.items
        self.tensors: list[Tensor] = [planner.resolve_data(item).detach() for item in plan.items]

    def _mine(self, planner: PiecesPlanner, state: dict[str, Any]) -> SavePlan:
        planner.set_up_planner(state, self._writer.storage_meta(), self._ranks.is_coordinator)
        self._writer.set_up_storage_writer(self._ranks.is_coordinator)
        return self._writer.prepare_local_plan(planner.create_local_plan())

    def _all(self, planner: PiecesPlanner, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0: what each rank writes."""
        plans, self._metadata = planner.create_global_plan(plans)
        made: list[SavePlan] = self._writer.prepare_global_plan(plans)
        return made

    def hold(self, copies: Copies) -> None:
        """Copy this rank's share: from now on the parameters may change."""
        self.tensors, self.held = copies.take(self.tensors), True

    def write(self, put: Put) -> list[Hashed]:
        """Write this rank's share; `put` gets the name of each file. Raises OSError if writing fails."""
        pieces = list(zip(self._items, self.tensors, strict=True))
        self.tensors = []  # what deepspeed copied is freed with `pieces`
        threads = WRITERS if self.held else os.cpu_count() or 1
        return write_files(self.folder, self._prefix, pieces, put, threads)

    def finish(self, written: Callable[[], list[Hashed] | None], put: Put) -> Files | None:
        """Have rank 0 write the index, and `put` it, if all ranks have `written`. Every rank takes part.

        Returns, on every rank, all files; None if a rank has not written yet. Raises what any rank's `written` raises.
        """
        with _causes():
            found: Files | None = self._ranks.all_reduce("write", written, lambda all_: self._finished(all_, put))
            return found

    def _finished(self, of_ranks: Sequence[list[Hashed] | None], put: Put) -> Files | None:
        there = [results for results in of_ranks if results is not None]
        if len(there) < len(of_ranks):
            return None
        self._writer.finish(self._metadata, there)
        index = self.folder / METADATA
        files = {METADATA: (file_sha256(index), index.stat().st_size)}
        put(METADATA)
        written = [one for results in there for one in results]
        return files | {one.storage_data.relative_path: (one.file_sha256, one.file_bytes) for one in written}


@contextmanager
def _causes() -> Iterator[None]:
    """Raise what DCP's CheckpointException, a BaseException, hides: the first failure of any rank."""
    try:
        yield
    except CheckpointException as error:
        first = _first(error)
        raise (first if isinstance(first, Exception) else RuntimeError(first_line(_first(error)))) from error


def load_parameters(folder: Path, parameters: Parameters, fetch: Fetch) -> Progress:
    """Restore what a `Saving` wrote, bitwise, into the tensors of `parameters`.

    `folder` holds METADATA at least; the files that this rank reads are fetched. UserError: the checkpoint is of
    another model, is damaged, cannot be fetched, or holds more than tensors. Others: memory ran out, or a disk failed.
    """
    rng, counts = torch.get_rng_state(), torch.zeros(2, dtype=torch.int64)
    state = {"parameters": parameters, "rng": rng, "progress": counts}
    with (folder / METADATA).open("rb") as file:
        _Guarded(file).load()
    try:
        with _without_warnings():
            reader = _FetchingReader(folder, fetch)
            dcp.load(state, storage_reader=reader, planner=_TensorsOnly(), no_dist=not dist.is_initialized())
    except (CheckpointException, RuntimeError, ValueError) as error:
        disk_failed = isinstance(cause := _first(error), OSError) and not isinstance(cause, FileNotFoundError)
        if isinstance(cause, UserError) or disk_failed or ran_out(cause):
            raise cause from error
        raise UserError(f"the checkpoint in {folder} is not one of this model: {first_line(_first(error))}") from error
    torch.set_rng_state(rng)
    step, skipped = counts.tolist()
    return Progress(step, skipped)


class _Guarded(pickle.Unpickler):
    """Reads a checkpoint's index, which DCP unpickles, as DCP does."""

    def find_class(self, module: str, name: str) -> Any:
        """What the index names. Raises UserError for more than DCP's types and `_NAMES`.

        Also for dotted names, which reach imported modules: DCP's `filesystem` imports `os` and thus has `os.system`.
        """
        whole = f"{module}.{name}"
        known = whole in _NAMES or (f"{module}.".startswith(_MODULES) and "." not in name)
        found = super().find_class(module, name) if known else None
        if whole not in _NAMES and (not isinstance(found, type) or found.__module__ != module):
            raise UserError(f"the checkpoint names {whole}, which no checkpoint of a model needs: do not use it")
        return found


class _TensorsOnly(DefaultLoadPlanner):  # type: ignore[misc]
    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise ValueError(f"{read_item.dest_index.fqn} is not a tensor")


class _FetchingReader(dcp.FileSystemReader):  # type: ignore[misc]
    """Reads no file that no tensor of this rank is in: it need not be there."""

    def __init__(self, folder: Path, fetch: Fetch) -> None:
        super().__init__(folder)
        self.fetch = fetch

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self.fetch({self.storage_data[item.storage_index].relative_path for item in plan.items})
        read: Future[None] = super().read_data(plan, planner)
        return read


def _without_warnings() -> warnings.catch_warnings[None]:
    """DCP warns if there is no process group, as in a single process."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)


def _first(error: BaseException) -> BaseException:
    """The first failure of any rank."""
    failures = getattr(error, "failures", {})
    return next((cause for cause, _ in failures.values()), error)
