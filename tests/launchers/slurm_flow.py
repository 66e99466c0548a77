"""A flow's side of a Slurm cluster, as a program: evaluates each line that it reads, and prints the value as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from areal_tasks.launchers import slurm
from areal_tasks.launchers.cluster import Resources, Submitted, Task
from schemas.errors import UserError
from schemas.recipe.launcher import Launcher

slurm.POLL_SECONDS = 0.2  # type: ignore[misc]
tasks: dict[str, Submitted] = {}
cluster = slurm.slurm(Launcher(slurm=json.loads(sys.argv[1])))


def submit(name: str, *command: str, cpus: int = 1, memory_mb: int = 256, **environment: str) -> None:
    needs = Resources(cpus=cpus, memory_mb=memory_mb)
    tasks[name] = cluster.submit(Task(name, command, environment, needs, Path(f"/run/flow/{name}.out")))


def answer(line: str) -> Any:
    try:
        return eval(line)
    except UserError as error:
        return f"{type(error).__name__}: {error}"


print("ready", flush=True)
for line in sys.stdin:
    print(json.dumps(answer(line)), flush=True)
