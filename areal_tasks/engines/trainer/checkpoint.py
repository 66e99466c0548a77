"""Training state on disk through torch.distributed.checkpoint (DCP): any backend on any number of ranks can load it.

A checkpoint holds only tensors: for every parameter, under its Hugging Face name, the fp32 weight and AdamW's state;
the random state; and the progress. Loading treats files as data and runs no code that they name.
"""

from __future__ import annotations

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
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from areal_tasks.engines.trainer.backend import Progress
from areal_tasks.engines.trainer.checkpoint_files import HashingWriter, PiecesPlanner
from areal_tasks.engines.trainer.memory import ran_out
from areal_tasks.engines.trainer.optimizer import local_share, prepare_state
from schemas.errors import UserError

#: A parameter's `weight` and its AdamW state: `step`, `exp_avg`, `exp_avg_sq`. Sharded tensors are DTensors.
Parameter = Mapping[str, Tensor]
Parameters = Mapping[str, Parameter]

#: A rank writes files of about this size, or larger ones if they would be more than MOST_FILES.
FILE_BYTES: Final = 256 * 2**20
MOST_FILES: Final = 32
#: Modules and names in DCP's pickled metadata; some since torch 2.11, some before it.
_MODULES: Final = ("torch.distributed.checkpoint.", "torch.distributed.tensor.")
_NAMES: Final = frozenset(
    {
        "torch.Size", "torch.device", "torch.serialization._get_layout", "torch._utils._rebuild_device",
        "collections.OrderedDict", "pathlib.PosixPath", "pathlib._local.PosixPath", "_codecs.encode",
        *(f"torch.{kind}" for kind in ("float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8", "bool")),
    }
)  # fmt: skip


def save_state(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress
) -> Mapping[str, str]:
    """Write model, optimizer, RNG and progress into `folder`, which must be fresh. Every rank takes part.

    Returns, on rank 0, the SHA-256 of the files that hold tensors, by name.
    """
    return save_parameters(folder, held_parameters(model, optimizer), progress)


def load_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Restore `model` and `optimizer`, in place and bitwise, from what `save_state` wrote.

    Raises:
        UserError: the checkpoint belongs to another model, is damaged, or holds more than tensors.
        Exception: memory ran out.
    """
    return load_parameters(folder, held_parameters(model, optimizer))


def held_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> Parameters:
    """The tensors that `model` and `optimizer` hold themselves, whole or sharded."""
    return {
        name: {"weight": parameter.detach(), **prepare_state(optimizer, parameter)}
        for name, parameter in model.named_parameters()
    }


def save_parameters(folder: Path, parameters: Parameters, progress: Progress) -> Mapping[str, str]:
    """As `save_state`, for tensors that the backend made for this purpose. Raises OSError if writing fails."""
    counts = torch.tensor([progress.step, progress.skipped_in_row])
    state = {"parameters": parameters, "rng": torch.get_rng_state(), "progress": counts}
    writer = HashingWriter(folder, _files(parameters))
    try:
        with _without_warnings():
            dcp.save(state, storage_writer=writer, planner=PiecesPlanner(), no_dist=_is_single_process())
    except CheckpointException as error:  # a BaseException, which hides its cause
        raise _cause(error) from error
    return writer.digests


def _files(parameters: Parameters) -> int:
    """How many files this rank writes; they are written and hashed concurrently."""
    held = sum(local_share(tensor).nbytes for parameter in parameters.values() for tensor in parameter.values())
    return min(max(held // FILE_BYTES, 1), MOST_FILES)


def load_parameters(folder: Path, parameters: Parameters) -> Progress:
    """As `load_state`, into the tensors of `parameters`."""
    rng, counts = torch.get_rng_state(), torch.zeros(2, dtype=torch.int64)
    state = {"parameters": parameters, "rng": rng, "progress": counts}
    check_metadata(folder)
    try:
        with _without_warnings():
            dcp.load(state, checkpoint_id=folder, planner=_TensorsOnly(), no_dist=_is_single_process())
    except (CheckpointException, RuntimeError, ValueError) as error:
        if ran_out(cause := _first(error)):
            raise cause from error
        raise UserError(f"the checkpoint in {folder} is not one of this model: {_reason(error)}") from error
    torch.set_rng_state(rng)
    step, skipped = counts.tolist()
    return Progress(step, skipped)


def check_metadata(folder: Path) -> None:
    """Raise UserError if the checkpoint's index, which DCP unpickles, names more than DCP's types and `_NAMES`."""
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
        """No dotted names, which reach imported modules: DCP's `filesystem` imports `os` and thus has `os.system`."""
        return f"{module}.{name}" in _NAMES or (f"{module}.".startswith(_MODULES) and "." not in name)


class _TensorsOnly(DefaultLoadPlanner):  # type: ignore[misc]
    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise ValueError(f"{read_item.dest_index.fqn} is not a tensor")


def _is_single_process() -> bool:
    return not dist.is_initialized()


def _without_warnings() -> warnings.catch_warnings[None]:
    """DCP warns if there is no process group, as in a single process."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)


def _cause(error: CheckpointException) -> Exception:
    first = _first(error)
    return first if isinstance(first, Exception) else RuntimeError(_reason(error))


def _first(error: BaseException) -> BaseException:
    """The first failure of any rank."""
    failures = getattr(error, "failures", {})
    return next((cause for cause, _ in failures.values()), error)


def _reason(error: BaseException) -> str:
    first = _first(error)
    return str(first).splitlines()[0] if str(first) else type(first).__name__
