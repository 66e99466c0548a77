"""N inference servers compared with one, one of them stopped for a while, one killed: tokens/s through our client.

    python -m benchmarks.gpu.servers 1.5b --servers 4 [key=value …]       (a host with so many GPUs; four minutes)
    python -m benchmarks.gpu.servers tiny --servers 2 --cpu --groups 8 --new 128 --warm 4 --folder /tmp/servers

The services of a run (benchmarks/gpu/iteration.yaml), driven in one process without Prefect: a server on each GPU, the
trainer with its memory on the first one. When the first iteration has been trained and its weights are on all servers,
the run's client always gets as many groups as it has room for:

1. all servers, after the last one alone by a client of its own: `ratio`;
2. the processes of the last server are stopped (SIGSTOP) for `--stopped` seconds: tokens/s of the others meanwhile, and
   in a window after it, ÷ their tokens/s before (`others_while_stopped`, `others_after_stop`);
3. they are killed (SIGKILL): seconds until the client has taken its requests back (`evicted_seconds`), and until the
   next sample has ended (`answered_seconds`); the longest time without an answer of the others
   (`longest_pause_seconds`); their tokens/s in the window after the kill ÷ in the one before (`others_after_kill`).

Samples have between half of `--new` tokens and all of it, so that they do not end together. The tokens of a sample
count evenly from the start of its group to its own end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count, pairwise
from pathlib import Path
from typing import Any, Final

import psutil

from areal_tasks.engines.client import GenerateRequest, InferenceClient
from areal_tasks.engines.session import Engines
from areal_tasks.launchers.local import LocalHandle
from areal_tasks.stages.build import Built
from areal_tasks.stages.jobs import Job, run_directly
from areal_tasks.stages.loop import Loop
from areal_tasks.store.backend import open_store
from areal_tasks.store.opening import open_run
from areal_tasks.store.shards import read_table
from benchmarks.gpu.iteration import recipe_of
from benchmarks.gpu.results import add_results_option, record
from benchmarks.gpu.settings import ON_CPU
from benchmarks.gpu.shapes import SHAPES

LOOK_SECONDS: Final = 0.002
SMALL: Final = (
    "rollout.groups=4",
    "rollout.group_size=4",
    "rollout.max_new_tokens=16",
    "trainer.weights_every=1000",
    "trainer.recover_within_seconds=86400",
    "trainer.compile=false",
    "trainer.gpus=[0]",
    "inference.groups_per_request=1",
    "launcher.type=local",
    "schedule.iterations=2",  # of the last iteration, the store would get the weights
)


class Over(Exception):
    """Everything is measured."""


@dataclass(frozen=True)
class Answer:
    """A sample: where it was generated, from when to when (monotonic seconds), and its tokens."""

    server: str
    began: float
    ended: float
    tokens: int


@dataclass
class Load:
    """Groups of samples that a client always has as many of as it has room for."""

    client: InferenceClient
    arguments: argparse.Namespace
    answers: list[Answer] = field(default_factory=list)
    over: bool = False
    numbers: count[int] = field(default_factory=count)

    async def run(self) -> None:
        await asyncio.gather(*(self._groups() for _ in range(self.client.capacity)))

    async def _groups(self) -> None:
        while not self.over:
            await self._group(next(self.numbers), time.monotonic())

    async def _group(self, number: int, began: float) -> None:
        draw, new = random.Random(number), self.arguments.new
        prompt = [draw.randrange(5, 300) for _ in range(self.arguments.prompt_tokens)]
        requests = [
            GenerateRequest(prompt, draw.randint(new // 2, new), group=number) for _ in range(self.arguments.size)
        ]
        for result in await self.client.generate(requests):
            self.answers.append(Answer(result.server, began, time.monotonic(), len(result.output_ids)))

    def rate(self, since: float, until: float, servers: Collection[str]) -> float:
        """Tokens a second of these servers in that time, once what was under way then has ended."""
        chosen = (answer for answer in self.answers if answer.server in servers)
        return sum(answer.tokens * overlap(answer, since, until) for answer in chosen) / (until - since)


def overlap(answer: Answer, since: float, until: float) -> float:
    """The part of the answer's time that lies in an interval."""
    return max(0.0, min(answer.ended, until) - max(answer.began, since)) / (answer.ended - answer.began)


@dataclass
class Bench:
    """Runs the stages until the first weights are on the servers, and measures then."""

    engines: Engines
    arguments: argparse.Namespace
    found: dict[str, Any] = field(default_factory=dict)

    def execute(self, jobs: Sequence[Job]) -> list[Built]:
        """As the flow runs them. Raises Over after the first publication."""
        built = run_directly(jobs)
        if [job.stage.name for job in jobs] == ["publish"]:
            [row] = read_table(jobs[0].context.store, built[0].manifest.tables["publish"]).to_pylist()
            published = {"transport": row["transport"], "publish_seconds": built[0].manifest.metrics["publish_seconds"]}
            self.found = published | self._measured()
            raise Over
        return built

    def _measured(self) -> dict[str, Any]:
        servers = self.engines.servers
        client = servers.inference()
        urls = sorted(client.healthy(), key=self.engines.supervisor.name_at)  # in the order of their GPUs
        alone = InferenceClient(urls[-1:], servers.access, client.settings)
        try:
            one = servers.call(measured_alone(Load(alone, self.arguments)), generates=client)
        finally:
            servers.call(alone.close())
        return servers.call(self._measured_together(Load(client, self.arguments), urls, one), generates=client)

    async def _measured_together(self, load: Load, urls: Sequence[str], one: float) -> dict[str, Any]:
        options, [*others, victim] = self.arguments, urls
        going = asyncio.ensure_future(load.run())
        begun = await passed(options.warm + options.window)
        stopped = await self._stopped(victim)
        again = await passed(options.warm + options.window)
        killed, found = await self._killed(load, victim)
        await passed(options.window)
        load.over = True
        await going
        all_of_them = load.rate(begun - options.window, begun, urls)
        before = [load.rate(end - options.window, end, others) for end in (begun, again)]
        after = [answer.ended for answer in load.answers if answer.server in others and answer.ended > again]
        ends = sorted(end for end in after if end < killed + options.window)
        return {
            "tokens_per_second_1": round(one),
            f"tokens_per_second_{len(urls)}": round(all_of_them),
            "ratio": round(all_of_them / one, 3),
            "by_server": [round(load.rate(begun - options.window, begun, [url])) for url in urls],
            "others_while_stopped": round(load.rate(*stopped, others) / before[0], 3),
            "others_after_stop": round(before[1] / before[0], 3),
            "others_after_kill": round(load.rate(killed, killed + options.window, others) / before[1], 3),
            **found,
            "longest_pause_seconds": round(max(later - earlier for earlier, later in pairwise(ends)), 3),
        }

    async def _stopped(self, url: str) -> tuple[float, float]:
        """Stop a server's processes for a while; from when to when."""
        since, family = time.monotonic(), self._processes(url)
        for process in family:
            process.send_signal(signal.SIGSTOP)
        until = await passed(self.arguments.stopped)
        for process in reversed(family):
            process.send_signal(signal.SIGCONT)
        return since, until

    async def _killed(self, load: Load, url: str) -> tuple[float, dict[str, Any]]:
        """Kill a server's processes; when, and what the client did about it."""
        [victim] = [server for server in load.client.servers if server.url == url]
        lost, killed = victim.load, time.monotonic()
        for process in self._processes(url):
            process.kill()
        while victim.load:
            await asyncio.sleep(LOOK_SECONDS)
        evicted, known = time.monotonic(), len(load.answers)
        while len(load.answers) == known:
            await asyncio.sleep(LOOK_SECONDS)
        seconds = {"evicted_seconds": evicted - killed, "answered_seconds": time.monotonic() - killed}
        return killed, {"samples_lost": lost} | {name: round(value, 3) for name, value in seconds.items()}

    def _processes(self, url: str) -> list[psutil.Process]:
        """Of the server at an address, the service's own first."""
        supervisor = self.engines.supervisor
        handle = supervisor.services[supervisor.name_at(url)].handle
        assert isinstance(handle, LocalHandle)
        leader = psutil.Process(handle.process.pid)
        return [leader, *leader.children(recursive=True)]


async def measured_alone(load: Load) -> float:
    """Tokens a second of the only server of a client."""
    options, going = load.arguments, asyncio.ensure_future(load.run())
    until = await passed(options.warm + options.window)
    load.over = True
    await going
    return load.rate(until - options.window, until, load.client.healthy())


async def passed(seconds: float) -> float:
    """Wait; the monotonic clock afterwards."""
    await asyncio.sleep(seconds)
    return time.monotonic()


def overrides(arguments: argparse.Namespace) -> list[str]:
    """Of benchmarks/gpu/iteration.yaml."""
    gpus = ",".join(map(str, range(arguments.servers)))
    sizes = [f"inference.servers={arguments.servers}", f"inference.max_concurrent_requests={arguments.groups}"]
    own = [*SMALL, *sizes, *([] if arguments.cpu else [f"inference.gpus=[{gpus}]", "inference.memory_fraction=0.5"])]
    slots = [f"inference.slots={arguments.groups * arguments.size}"]
    return [*own, *([*ON_CPU, *slots, "trainer.gpus=[]"] if arguments.cpu else []), *arguments.overrides]


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of one start of the services."""
    started = time.monotonic()
    arguments.overrides = overrides(arguments)
    recipe = recipe_of(arguments)
    run = open_run(open_store(recipe.store.url), f"servers-{datetime.now(UTC):%m%d-%H%M%S}", recipe)
    logs = Path(os.environ.get("AREALFLOW_HOME", "/tmp/gpu-bench/home")) / "logs" / run.name
    with Engines(run, recipe, logs) as engines:
        bench = Bench(engines, arguments)
        try:
            Loop(run, recipe, engines, bench.execute, lambda result: None)()
        except Over:
            return bench.found | {"seconds_in_all": round(time.monotonic() - started, 1)}
    raise AssertionError("unreachable: the first iteration is published")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("overrides", nargs="*", help="of the recipe, as section.field=value")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--groups", type=int, default=64, help="at once on each server")
    parser.add_argument("--size", type=int, default=8, help="samples of a group")
    parser.add_argument("--new", type=int, default=400, help="tokens of a sample, at most")
    parser.add_argument("--warm", type=float, default=10.0, help="seconds before each window")
    parser.add_argument("--window", type=float, default=20.0, help="seconds that a speed is measured over")
    parser.add_argument("--stopped", type=float, default=20.0, help="seconds that a server is stopped for")
    parser.add_argument("--cpu", action="store_true", help="embedded servers; choose small sizes")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/gpu-bench"), help="models, prompts, store")
    parser.set_defaults(prompt_tokens=64, raw_rounds="")
    add_results_option(parser)
    arguments = parser.parse_intermixed_args()
    size = {name: getattr(arguments, name) for name in ("shape", "servers", "groups", "size", "new", "window")}
    record(arguments.results, "servers", **size, **measured(arguments))


if __name__ == "__main__":
    main()
