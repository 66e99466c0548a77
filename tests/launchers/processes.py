"""A cluster of one machine: `launcher.type: processes:Processes` runs tasks as processes of this machine."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress

from warm_processes import Popen

from areal_tasks.launchers.cluster import Task
from schemas.recipe.launcher import Launcher

NETWORK = "127.0.0.0/8"


class Running:
    """A task's process, in a session of its own."""

    def __init__(self, process: Popen) -> None:
        self.process = process

    def waiting(self) -> str:
        return ""

    def exit_code(self) -> int | None:
        return self.process.poll()

    def cancel(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, 15)
        try:
            self.process.wait(30)  # for the agent to end its service
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, 9)
            self.process.wait()


class Processes:
    """Gives each task this process's environment, as the machines of a cluster have the keys of the store."""

    def __init__(self, settings: Launcher) -> None:
        self.tasks: list[Running] = []

    def submit(self, task: Task) -> Running:
        with task.output.open("ab") as output:
            process = Popen(
                task.command,
                env=os.environ | dict(task.environment),
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.tasks.append(Running(process))
        return self.tasks[-1]

    def close(self) -> None:
        for task in self.tasks:
            task.cancel()
