"""What a trainer puts into the store, as each rank has it in memory: weights, or a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch.distributed.checkpoint.storage import WriteResult

from areal_tasks.engines.trainer.checkpoint import Saving
from areal_tasks.engines.trainer.memory import copy_bytes
from areal_tasks.engines.trainer.snapshot import Named, Snapshot, hand_on, save_tensors


@dataclass(frozen=True)
class Part:
    """The files that a rank has made of a draft, those of their SHA-256 that it knows, and DCP's account of them."""

    names: tuple[str, ...] = ()
    known: Mapping[str, str] = field(default_factory=dict)
    account: tuple[WriteResult, ...] = ()


@runtime_checkable
class Draft(Protocol):
    """Something to be written, the same on every rank. OSError where the disk refuses."""

    def host_bytes(self) -> int:
        """Host memory that `hold` takes on this rank."""
        ...

    def hold(self) -> None:
        """Copy into host memory what this rank writes: from here on the model may change."""
        ...

    def write(self, folder: Path) -> Part:
        """Write this rank's part."""
        ...

    def finish(self, accounts: Sequence[Sequence[WriteResult]]) -> Part:
        """On rank 0, with the accounts of all ranks: what is left to write when they are done."""
        ...


class WeightsDraft:
    """The policy as it is published, with the tokenizer in the folder `source`. Written by rank 0 alone."""

    def __init__(self, snapshot: Snapshot, source: Path | None) -> None:
        self.snapshot = snapshot
        self.source = source  # none on other ranks
        self.held: Named | None = None

    def host_bytes(self) -> int:
        return 0 if self.source is None else copy_bytes(self.snapshot.tensors.values())

    def hold(self) -> None:
        if self.source is not None:
            self.held = self.snapshot.give()

    def write(self, folder: Path) -> Part:
        if self.source is None:
            return Part()
        hand_on(self.source, folder, self.snapshot.dtype)
        known = save_tensors(self.snapshot.host() if self.held is None else self.held, folder)
        return Part(tuple(sorted(path.name for path in folder.iterdir())), known)

    def finish(self, accounts: Sequence[Sequence[WriteResult]]) -> Part:
        return Part()


class CheckpointDraft:
    """Everything that training goes on from; each rank writes its share."""

    def __init__(self, saving: Saving) -> None:
        self.saving = saving

    def host_bytes(self) -> int:
        return self.saving.host_bytes()

    def hold(self) -> None:
        self.saving.hold()

    def write(self, folder: Path) -> Part:
        account = self.saving.write()
        return Part(tuple(sorted({w.storage_data.relative_path for w in account})), account=tuple(account))

    def finish(self, accounts: Sequence[Sequence[WriteResult]]) -> Part:
        self.saving.finish([list(account) for account in accounts])
        return Part((".metadata",))
