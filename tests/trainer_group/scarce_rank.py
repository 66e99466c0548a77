"""As a program: one of two ranks, of which the second is refused the memory for a copy. Prints what came of the write.

`python scarce_rank.py RANK FOLDER`; the ranks meet in FOLDER.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.storage import WriteResult

from areal_tasks.engines.trainer.drafts import Part
from areal_tasks.engines.trainer.process_group import meet
from areal_tasks.engines.trainer.writer import Task, Writer
from areal_tasks.store.backend import open_store


class Note:
    """A draft that leaves a file of each rank."""

    def __init__(self, rank: int, folder: Path, refused: bool) -> None:
        self.rank = rank
        self.folder = folder
        self.refused = refused

    def host_bytes(self) -> int:
        return 8

    def hold(self) -> None:
        if self.refused:
            raise RuntimeError("CUDA error: out of memory")

    def write(self, folder: Path) -> Part:
        (folder / str(self.rank)).write_text("written")
        return Part((str(self.rank),))

    def finish(self, accounts: Sequence[Sequence[WriteResult]]) -> Part:
        (self.folder / "end").write_text(str(len(accounts)))
        return Part(("end",))


if __name__ == "__main__":
    rank, place = int(sys.argv[1]), Path(sys.argv[2])
    meet(rank, 2, dist.FileStore(str(place / "meeting"), 2), torch.device("cpu"))
    store = open_store(f"file://{place}/store")
    writer = Writer(store, rank == 0)
    for name, refused in (("scarce", rank == 1), ("roomy", False)):
        folder = store.local(f"r/{name}")
        assert folder is not None
        folder.mkdir(parents=True, exist_ok=True)
        beside = writer.begin(Task(Note(rank, folder, refused), f"r/{name}", folder, beside=True))
        stored = writer.settle(wait=True)
        print(name, beside, *(Path(file.path).name for file in (stored.files if stored else ())))
    dist.destroy_process_group()
