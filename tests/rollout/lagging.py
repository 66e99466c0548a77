"""Servers that get new weights one by one, and the workflow that generates on them; a test chooses every step."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from test_rollouts import sample

from areal_tasks.engines.client import GenerateRequest
from areal_tasks.engines.pool_weights import UpdatedPool
from areal_tasks.engines.routing import choose
from areal_tasks.engines.server import Server, Target
from areal_tasks.engines.sharing import Followers
from areal_tasks.workflows import Prompt, Sample, WorkflowContext

SLOTS: Final = 8  # requests that a server has at once; others wait
TOKENS: Final = 2  # of a completion, or more: `Attempt.sample` has its numbers in their places


@dataclass
class Attempt:
    """A group that a worker generates, by one request. `end` is set to its reward, or to what its workflow raises.

    `versions`: of the weights that sampled each token so far.
    """

    number: int
    group: int
    floor: int
    end: asyncio.Future[float]
    server: Server | None = None
    versions: list[int] = field(default_factory=list)

    def generate(self) -> None:
        """One token, by the weights that its server holds now."""
        assert self.server is not None and self.server.version is not None
        assert self.server.version >= self.floor, "a server below the floor generates"
        self.versions.append(self.server.version)

    def leave(self) -> None:
        if self.server is not None:
            self.server.end(1, 0.0)
        self.server = None

    def sample(self, reward: float) -> Sample:
        """What the workflow returns; its tokens say which attempt made it."""
        more = len(self.versions) - TOKENS
        return replace(
            sample(self.group, 0),
            completion=f"{reward}",
            input_ids=[1, self.number, self.group, *[0] * more],
            versions=[-1, *self.versions],
            loss_mask=[False, *[True] * len(self.versions)],
            logprobs=[0.0, *[-1.0] * len(self.versions)],
        )


class LaggingServers:
    """The client of some servers, and the workflow that generates on them.

    A request goes to any server that holds its floor or something newer, and goes on with what that server holds.
    `targeted`: the flow gives floors of the newest weights that a server holds; else of the oldest ones.
    """

    version = UpdatedPool.version

    def __init__(self, number: int, targeted: bool, capacity: int) -> None:
        self.servers = [Server(f"http://{n}", SLOTS, version=0) for n in range(number)]
        self.target = Target(0) if targeted else None
        self.newest, self.capacity = 0, capacity
        self.followers = Followers()
        self.serving: Any = None
        self.attempts: list[Attempt] = []

    async def run(self, prompt: Prompt, context: WorkflowContext) -> list[Sample]:
        request = GenerateRequest([1], max_new_tokens=99, group=prompt.group_id)
        made: Any = await context.client.generate([request])
        return [attempt.sample(attempt.end.result()) for attempt in made]

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Attempt]:
        [request] = requests
        end = asyncio.get_running_loop().create_future()
        self.attempts.append(attempt := Attempt(len(self.attempts), request.group, request.floor, end))
        self._dispatch(self.attempts[-1:])
        try:
            await end
        finally:
            attempt.leave()
            self._dispatch(self.open())
        return [attempt]

    def open(self) -> list[Attempt]:
        return [attempt for attempt in self.attempts if not attempt.end.done()]

    def under_way(self) -> list[Attempt]:
        """Those that a server generates."""
        return [attempt for attempt in self.open() if attempt.server is not None]

    def _dispatch(self, attempts: Iterable[Attempt]) -> None:
        for attempt in attempts:
            if attempt.server is None and (server := choose(self.servers, attempt.floor)) is not None:
                server.begin(1, 0.0)
                attempt.server = server

    def publish(self, version: int) -> None:
        """Servers can have these weights from now on."""
        self.newest = version
        if self.target is not None:
            self.target = Target(version)

    def load(self, server: Server) -> None:
        """It has the newest weights, whatever it held, and goes on with its requests; a lost one is back."""
        server.version, server.healthy = self.newest, True
        self._dispatch(self.open())

    def lose(self, server: Server, keeps: bool) -> None:
        """Its requests go to other servers, which go on after the last token or (`keeps` is false) begin again.

        Without a target the last one is not lost: there would be no floor.
        """
        if self.target is None and not any(other.healthy for other in self.servers if other is not server):
            return
        server.healthy = False
        for attempt in [attempt for attempt in self.open() if attempt.server is server]:
            attempt.leave()
            if not keeps:
                attempt.versions.clear()
        self._dispatch(self.open())
