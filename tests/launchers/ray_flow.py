"""A flow's part in the tests of the Ray launcher, on a machine of the test bed: each line is an order, and is answered.

`python ray_flow.py FOLDER`: what tasks print, and Ray's log, are written there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from areal_tasks.launchers.cluster import Resources, Submitted, Task
from areal_tasks.launchers.ray import RayCluster
from schemas.errors import UserError
from schemas.recipe.launcher import Launcher

folder = Path(sys.argv[1])
cluster = RayCluster(Launcher(type="ray"))
tasks: dict[str, Submitted] = {}


def submit(name: str, code: str, environment: dict[str, str] | None = None, **resources: int) -> str:
    command = (sys.executable, "-c", code)
    task = Task(name, command, environment or {}, Resources(**resources), folder / f"{name}.out")
    tasks[name] = cluster.submit(task)
    return name


def state(name: str) -> tuple[str, int | None]:
    return tasks[name].waiting(), tasks[name].exit_code()


def cancel(name: str) -> None:
    tasks[name].cancel()


def machines() -> list[tuple[str, int, int]]:
    """Name, CPUs and free CPUs of each."""
    return sorted((one.name, one.total.cpus, one.free.cpus) for one in cluster.machines())


def close() -> None:
    cluster.close()


if __name__ == "__main__":
    for line in sys.stdin:
        function, arguments = json.loads(line)
        answer: Any
        try:
            answer = {"result": globals()[function](**arguments)}
        except UserError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)
