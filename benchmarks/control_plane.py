"""The cost of the flow's bookkeeping for the groups of a run on 64, 512 and 1,024 GPUs, measured.

    python -m benchmarks.control_plane [--gpus 64 512 1024] [--iterations 6]

The product's `Rollouts` leases groups to simulated rollout workers, one per 8 generating GPUs, whose groups end when
those of a 7B model would; messages are encoded and decoded as in a run, but cross no network. The clock is simulated;
only the CPU seconds of the flow's side are measured. Assumed, as in `simulate_scale`: 32 groups of 8 samples per GPU
and iteration, half of the GPUs generate and half train, η = 4. An iteration trains its tokens at the rate measured for
7B on an H200 (`benchmarks/results/gpu-h200-trainer.md`).
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import math
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final, cast

import psutil

from areal_tasks.engines.client import InferenceClient
from areal_tasks.engines.sharing import Followers
from areal_tasks.rollout.group_tracker import GroupTracker
from areal_tasks.rollout.link import Link
from areal_tasks.rollout.orders import Event, Finished, Generated, Lease, News, Orders, Part, Written
from areal_tasks.rollout.rollouts import Rollouts
from areal_tasks.rollout.spooling import Spool
from areal_tasks.rollout.staleness import Staleness
from areal_tasks.store.backend import open_store
from benchmarks.bare_loop import machine
from benchmarks.simulate import Load
from benchmarks.simulate_scale import GROUPS_PER_GPU
from schemas.recipe.sections import Rollout

ETA: Final = 4
TRAIN_RATE: Final = 9_339.0  # tokens per second and GPU, 7B on an H200
TOKEN_SECONDS: Final = 0.0125  # of a sample among 512 on a server
SLOTS: Final = 512  # samples that a server generates at once
GPUS_PER_WORKER: Final = 8
VERIFY_SECONDS: Final = 0.5
ROUND_TRIP: Final = 0.002  # of a worker's news: what ends meanwhile comes with it
TURNS: Final = 4  # of the event loop, for what a message sets off


@dataclass
class Servers:
    """The part of the servers' client that `Rollouts` uses."""

    capacity: int
    version: int = 0
    followers: Followers = field(default_factory=Followers)
    serving: Any = None


@dataclass
class Cost:
    """CPU seconds of the flow's side: of all its work, and of taking an iteration's groups."""

    whole: float = 0.0
    taking: float = 0.0
    messages: int = 0
    parts: int = 0  # of iterations, with one shard each


class FarWorker:
    """A link to a worker whose groups end by the simulated clock."""

    def __init__(self, url: str, flow: Rollouts, work: Work) -> None:
        self.url, self.busy, self.start = url, dict[str, int](), None
        self.ready, self.tried, self.explained, self.leaving, self.retired = True, True, False, False, False
        self.listener, self.work = flow, work

    def give(self, leases: list[Lease]) -> None:
        Orders(begin=tuple(leases)).model_dump_json()
        for lease in leases:
            self.work.begin(self, lease)

    def take_back(self, numbers: list[int]) -> None:
        Orders(forget=tuple(numbers)).model_dump_json()

    async def write(self, part: Part) -> Written:
        part.model_dump_json()
        return Written(tables={}, samples=len(part.numbers), tokens=0, truncated=0)


@dataclass
class Work:
    """The groups under way at all workers: when each has been generated, and verified."""

    load: Load
    clock: float = 0.0
    ends: list[tuple[float, int, FarWorker, Event]] = field(default_factory=list)
    order: count[int] = field(default_factory=count)

    def begin(self, worker: FarWorker, lease: Lease) -> None:
        generated = self.clock + max(self.load.lengths(lease.index)) * TOKEN_SECONDS
        self.at(generated, worker, Generated(number=lease.number, index=lease.index))
        finished = Finished(number=lease.number, index=lease.index, version=lease.floor)
        self.at(generated + VERIFY_SECONDS, worker, finished)

    def at(self, when: float, worker: FarWorker, event: Event) -> None:
        heapq.heappush(self.ends, (when, next(self.order), worker, event))

    def next_news(self, until: float) -> dict[FarWorker, list[Event]]:
        """The groups that end within a round trip after the next end, by worker; none if that is after `until`."""
        if not self.ends or self.ends[0][0] > until:
            self.clock = until
            return {}
        news: dict[FarWorker, list[Event]] = {}
        last = self.ends[0][0] + ROUND_TRIP
        while self.ends and self.ends[0][0] <= last:
            self.clock, _, worker, event = heapq.heappop(self.ends)
            news.setdefault(worker, []).append(event)
        return news


async def run(gpus: int, iterations: int, folder: Path) -> tuple[Cost, float]:
    """The cost of `iterations` iterations, after as many for warm-up, and their simulated seconds."""
    load = Load(groups=GROUPS_PER_GPU * gpus)
    rule = Staleness(lambda k: ETA, 10**6, lambda k: load.groups)
    servers = Servers(capacity=gpus // 2 * SLOTS // load.group_size)
    work, store = Work(load), open_store(folder.as_uri())
    rollouts = Rollouts(
        GroupTracker(rule, 0), cast(InferenceClient, servers), cast(Any, None),
        lambda url, flow: cast(Link, FarWorker(url, flow, work)),
        Rollout(groups=load.groups), Spool(store, "run", 1, "made"),
    )  # fmt: skip
    await rollouts.use_workers({(str(n), 0) for n in range(max(1, gpus // 2 // GPUS_PER_WORKER))})
    train_seconds = trained_tokens(load) / (gpus / 2 * TRAIN_RATE)
    cost, began = Cost(), 0.0
    for iteration in range(2 * iterations):
        if iteration == iterations:
            cost, began = Cost(), work.clock
        taking = asyncio.ensure_future(rollouts.take("run"))
        cost.parts += len(await step(work, cost, math.inf, taking))
        begun = time.process_time()
        taken = rollouts.tracker.take() or []
        rollouts.consume(taken)
        cost.whole += time.process_time() - begun
        await step(work, cost, work.clock + train_seconds)
        servers.version = iteration + 1
    return cost, work.clock - began


async def step(work: Work, cost: Cost, until: float, taking: asyncio.Future[Any] | None = None) -> list[Written]:
    """Deliver events until `taking` has its groups, as these parts, or until the time `until`."""
    while work.clock < until:
        begun = time.process_time()
        for _ in range(TURNS):
            await asyncio.sleep(0)  # a turn of the event loop
        cost.whole += time.process_time() - begun
        if taking is not None and taking.done():
            cost.taking += time.process_time() - begun
            return cast(list[Written], taking.result())
        encoded = [(worker, News(events=tuple(e)).model_dump_json()) for worker, e in work.next_news(until).items()]
        begun = time.process_time()
        for worker, text in encoded:
            cost.messages += 1
            for event in News.model_validate_json(text).events:
                worker.listener.received(cast(Link, worker), event)
        cost.whole += time.process_time() - begun
    return []


def trained_tokens(load: Load) -> float:
    """The tokens of an iteration, prompts included, estimated from the lengths of some groups."""
    some = random.Random(0).sample(range(10**6), 1000)
    mean = sum(sum(load.lengths(index)) for index in some) / len(some)
    return load.groups * (mean + load.prompt * load.group_size)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[64, 512, 1024])
    parser.add_argument("--iterations", type=int, default=6)
    options = parser.parse_args(arguments)
    print(machine(), "load", os.getloadavg()[0])
    print("| GPUs | groups | s per iteration | messages | parts | CPU s | share of a core | taking, s | memory, MB |")
    print("| --- " * 9 + "|")
    for gpus in options.gpus:
        with tempfile.TemporaryDirectory() as folder:
            cost, seconds = asyncio.run(run(gpus, options.iterations, Path(folder)))
        n = options.iterations
        print(
            f"| {gpus:,} | {GROUPS_PER_GPU * gpus:,} | {seconds / n:.1f} | {cost.messages / n:,.0f} "
            f"| {cost.parts / n:,.0f} "
            f"| {cost.whole / n:.2f} | {cost.whole / seconds:.2%} | {cost.taking / n:.3f} "
            f"| {psutil.Process().memory_info().rss / 1e6:,.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
