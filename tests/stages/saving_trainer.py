"""The trainer's process, which a kill ends in the middle of writing a checkpoint where a file says so."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from areal_tasks.engines.trainer import process, writing
from areal_tasks.engines.trainer.writing import CheckpointWriter

DIES = "AREAL_TEST_DIES"  # names the file, which goes before the process does

_put = CheckpointWriter._put


def put(writer: CheckpointWriter, prefix: str, name: str) -> None:
    file = Path(os.environ[DIES])
    if file.exists():
        file.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    _put(writer, prefix, name)


if __name__ == "__main__":
    writing.CheckpointWriter._put = put  # type: ignore[method-assign]
    process.main()
