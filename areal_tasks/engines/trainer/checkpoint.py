"""Training state on disk through torch.distributed.checkpoint (DCP): any backend on any number of ranks reads it back.

It holds tensors and nothing else: of every parameter, under its Hugging Face name, the fp32 weight and AdamW's state;
the random state; and the progress. What is read is taken for data: no code that a file may name is run.
"""

from __future__ import annotations

import errno
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from areal_tasks.engines.trainer.backend import Progress
from areal_tasks.engines.trainer.memory import copy_bytes
from areal_tasks.engines.trainer.optimizer import here, prepare_state
from areal_tasks.engines.trainer.process_group import gather_objects
from schemas.errors import UserError

#: A parameter's `weight`, and what AdamW keeps of it: `step`, `exp_avg`, `exp_avg_sq`. Sharded ones are DTensors.
Parameter = Mapping[str, Tensor]
Parameters = Mapping[str, Parameter]

#: A rank's share goes into files of about so many bytes, or more where they would be too many.
FILE_BYTES: Final = 256 * 2**20
MOST_FILES: Final = 16
#: What DCP's metadata is pickled from; some of it since torch 2.11, some before.
_MODULES: Final = ("torch.distributed.checkpoint.", "torch.distributed.tensor.")
_NAMES: Final = frozenset(
    {
        "torch.Size", "torch.device", "torch.serialization._get_layout", "torch._utils._rebuild_device",
        "collections.OrderedDict", "pathlib.PosixPath", "pathlib._local.PosixPath", "_codecs.encode",
        *(f"torch.{kind}" for kind in ("float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8", "bool")),
    }
)  # fmt: skip


def load_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Put back into `model` and `optimizer`, in place, what a `Saving` wrote; every bit of it.

    Raises:
        UserError: the checkpoint is of another model, damaged, or holds more than tensors.
    """
    return load_parameters(folder, held_parameters(model, optimizer))


def held_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> Parameters:
    """The tensors that `model` and `optimizer` hold themselves, whole or sharded."""
    return {
        name: {"weight": parameter.detach(), **prepare_state(optimizer, parameter)}
        for name, parameter in model.named_parameters()
    }


class Saving:
    """Model, optimizer, RNG and progress on their way into `folder`, which must be fresh.

    Every rank makes one and writes its part; rank 0 finishes.

    DCP's own steps of a save, taken apart: only making it exchanges anything (what each rank holds), and what all
    ranks have written is for the caller to bring together. So a thread may write while the ranks train on.
    """

    def __init__(self, folder: Path, parameters: Parameters, progress: Progress) -> None:
        counts = torch.tensor([progress.step, progress.skipped_in_row])
        state = {"parameters": parameters, "rng": torch.get_rng_state(), "progress": counts}
        self.writer = dcp.FileSystemWriter(folder, sync_files=False, thread_count=_files(parameters))
        self.planner: DefaultSavePlanner = DefaultSavePlanner()
        self.planner.set_up_planner(state, self.writer.storage_meta(), _rank() == 0)
        self.writer.set_up_storage_writer(_rank() == 0)
        plans = gather_objects(self.writer.prepare_local_plan(self.planner.create_local_plan()))
        plans, self.metadata = self.planner.create_global_plan(plans)  # each rank finds the same
        self.plan = self.planner.finish_plan(self.writer.prepare_global_plan(plans)[_rank()])

    def hold(self) -> None:
        """Copy what this rank is to write into host memory: from here on the model may change."""
        originals = self._originals()
        copies = {index: _host_copy(tensor) for index, tensor in originals.items()}
        if any(tensor.is_cuda for tensor in originals.values()):
            torch.cuda.synchronize()  # the next step changes the originals in place
        self.planner = _Held(copies)
        self.writer.per_thread_copy_ahead = 0  # nothing is left on a device

    def host_bytes(self) -> int:
        """Host memory that `hold` takes."""
        return copy_bytes(self._originals().values())

    def _originals(self) -> dict[Any, Tensor]:
        """What this rank is to write, where it is now."""
        return {item.index: self.planner.resolve_data(item) for item in self.plan.items}

    def write(self) -> list[WriteResult]:
        """Write this rank's part. OSError where the disk refuses."""
        written: list[WriteResult] = self.writer.write_data(self.plan, self.planner).value()
        if len(written) < len(self.plan.items):  # DCP's threads keep to themselves what they fail of
            raise OSError(errno.EIO, "not all of the checkpoint could be written", str(self.writer.path))
        return written

    def finish(self, written: list[list[WriteResult]]) -> None:
        """On rank 0, once every rank has written: the index of it all."""
        self.writer.finish(self.metadata, written)


class _Held(DefaultSavePlanner):  # type: ignore[misc]
    def __init__(self, copies: Mapping[Any, Tensor]) -> None:
        super().__init__()
        self.copies = copies

    def resolve_data(self, write_item: Any) -> Tensor:
        return self.copies[write_item.index]


def _host_copy(tensor: Tensor) -> Tensor:
    """A copy in host memory, page-locked if it comes from a GPU; it may still be on its way."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor.detach(), non_blocking=True)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _files(parameters: Parameters) -> int:
    """How many files this rank writes, each from a thread of its own; they are also hashed side by side."""
    held = sum(here(tensor).nbytes for parameter in parameters.values() for tensor in parameter.values())
    return min(max(held // FILE_BYTES, 1), MOST_FILES)


def load_parameters(folder: Path, parameters: Parameters) -> Progress:
    """As `load_state`, into the tensors of `parameters`."""
    rng, counts = torch.get_rng_state(), torch.zeros(2, dtype=torch.int64)
    state = {"parameters": parameters, "rng": rng, "progress": counts}
    check_metadata(folder)
    try:
        with _quiet():
            dcp.load(state, checkpoint_id=folder, planner=_TensorsOnly(), no_dist=_alone())
    except (CheckpointException, RuntimeError, ValueError) as error:
        raise UserError(f"the checkpoint in {folder} is not one of this model: {_reason(error)}") from error
    torch.set_rng_state(rng)
    step, skipped = counts.tolist()
    return Progress(step, skipped)


def check_metadata(folder: Path) -> None:
    """Refuse a checkpoint whose index, which DCP unpickles, names anything but DCP's own types. Raises UserError."""
    with (folder / ".metadata").open("rb") as file:
        _Guarded(file).load()


class _Guarded(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if self._known(module, name) else None
        if f"{module}.{name}" not in _NAMES and (not isinstance(found, type) or found.__module__ != module):
            raise UserError(
                f"the checkpoint names {module}.{name}, which no checkpoint of a model needs: do not use it"
            )
        return found

    @staticmethod
    def _known(module: str, name: str) -> bool:
        """Only names that say what they are: `filesystem` of DCP has imported `os`, and `os.system` is a name too."""
        return f"{module}.{name}" in _NAMES or (f"{module}.".startswith(_MODULES) and "." not in name)


class _TensorsOnly(DefaultLoadPlanner):  # type: ignore[misc]
    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise ValueError(f"{read_item.dest_index.fqn} is not a tensor")


def _alone() -> bool:
    return not dist.is_initialized()


def _quiet() -> warnings.catch_warnings[None]:
    """DCP warns where there is no process group, which is what one process means."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)


def _reason(error: BaseException) -> str:
    """The first failure of any rank."""
    failures = getattr(error, "failures", {})
    first = next((cause for cause, _ in failures.values()), error)
    return str(first).splitlines()[0] if str(first) else type(first).__name__
