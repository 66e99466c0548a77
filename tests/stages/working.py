"""Workflows that do to their rollout worker what a user's might."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from areal_tasks.rollout.spooling import Writer
from areal_tasks.workflows import Prompt, Sample, SingleTurn, WorkflowContext
from schemas.manifest import SpoolRecord

WRITE: Final = Writer.write


class Stuck:
    """Blocks its thread, or waits for what never comes."""

    def __init__(self, blocks: bool) -> None:
        self.blocks = blocks

    async def run(self, prompt: Prompt, context: WorkflowContext) -> list[Sample]:
        if self.blocks:
            threading.Event().wait()
        return await asyncio.get_running_loop().create_future()


class Leaking:
    """A single turn that keeps `megabytes` for ever, and writes a file in `folder` for each attempt at a group."""

    def __init__(self, megabytes: int, folder: str) -> None:
        self.megabytes, self.folder = megabytes, Path(folder)
        self.kept: list[bytes] = []

    async def run(self, prompt: Prompt, context: WorkflowContext) -> list[Sample]:
        self.kept.append(b"x" * (self.megabytes * 1_000_000))
        with (self.folder / f"attempt-{prompt.group_id}-{time.time_ns()}").open("x"):
            return await SingleTurn().run(prompt, context)


class Late:
    """A single turn whose group `group` is finished only when servers have the weights of `version`."""

    def __init__(self, group: int, version: int) -> None:
        self.group, self.version = group, version

    async def run(self, prompt: Prompt, context: WorkflowContext) -> list[Sample]:
        samples = await SingleTurn().run(prompt, context)
        while prompt.group_id == self.group and (context.client.version or 0) < self.version:
            await asyncio.sleep(0.01)  # the run goes on without it
        return samples


class Repeating:
    """Samples again where the first completion earns nothing, and returns the second."""

    async def run(self, prompt: Prompt, context: WorkflowContext) -> list[Sample]:
        first = await SingleTurn().run(prompt, context)
        found = [await context.verify(sample) for sample in first]
        second = await SingleTurn().run(prompt, replace(context, generation=1))
        return [
            sample if verdict.reward > 0 else replace(other, turns=2)
            for sample, verdict, other in zip(first, found, second, strict=True)
        ]


class Misbehaving:
    """A single turn, but for what happens `how` in the first attempt at `group`, which a file in `folder` tells of.

    `always`: in all attempts.
    """

    def __init__(self, how: str, group: int, folder: str) -> None:
        self.how, self.group, self.folder = how, group, Path(folder)

    async def run(self, prompt: Prompt, context: WorkflowContext) -> list[Sample]:
        with (self.folder / "attempts").open("a") as file:
            file.write(f"{prompt.group_id} ")
        if prompt.group_id == self.group and (self._first() or self.how == "always"):
            self._misbehave()
        return await SingleTurn().run(prompt, context)

    def _first(self) -> bool:
        try:
            with (self.folder / self.how).open("x") as file:
                file.write(str(Path.cwd()))
        except FileExistsError:
            return False
        return True

    def _misbehave(self) -> Any:
        if self.how in ("leave", "always"):
            os._exit(3)
        if self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        threading.Event().wait()  # for ever


class KilledOnRecording:
    """A single turn whose worker is killed just after it has created a record of this number, once."""

    def __init__(self, record: int, folder: str) -> None:
        self.record, self.killed = record, Path(folder) / "killed"

    async def run(self, prompt: Prompt, context: WorkflowContext) -> list[Sample]:
        Writer.write = self._write  # type: ignore[assignment, method-assign]
        return await SingleTurn().run(prompt, context)

    @property
    def _write(self) -> Any:
        def write(writer: Writer, *groups: Any) -> list[SpoolRecord]:
            records = WRITE(writer, *groups)
            if records[-1].n >= self.record and not self.killed.exists():
                self.killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return records

        return write


class MisbehavingLater(Misbehaving):
    """The same, once there is a file `go` in `folder`."""

    async def run(self, prompt: Prompt, context: WorkflowContext) -> list[Sample]:
        while prompt.group_id == self.group and not (self.folder / "go").exists():
            await asyncio.sleep(0.01)  # the test creates it
        return await super().run(prompt, context)
