"""The trainer's process, whose first training step fails as after a CUDA error where a file says so."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from areal_tasks.engines.trainer import process
from areal_tasks.engines.trainer.local import LocalBackend

FAILURE = "AREAL_TEST_FAILURE"  # names the file, which goes when the step has failed
WORDS = "CUDA error: an illegal memory access was encountered"

_learn = LocalBackend.learn


def learn(backend: LocalBackend, *arguments: Any) -> Any:
    file = Path(os.environ[FAILURE])
    if file.exists():
        file.unlink()
        raise RuntimeError(WORDS)
    return _learn(backend, *arguments)


if __name__ == "__main__":
    LocalBackend.learn = learn  # type: ignore[method-assign]
    process.main()
