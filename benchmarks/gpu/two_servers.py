"""Two inference servers beside one, and one of two that is killed: rollouts, their split, and publication.

    python -m benchmarks.gpu.two_servers [135m] [key=value …]         (a host with two GPUs; less than four minutes)
    python -m benchmarks.gpu.two_servers tiny --cpu                   (embedded servers, to try the script itself)

The services and stages of a run (benchmarks/gpu/iteration.yaml), driven in one process without Prefect. After some
iterations with two servers one of them is killed in the middle of a rollout (`kill -9` of its service's process); the
iterations until it has come back have one server, so one start measures both. The trainer has the first GPU, the
servers the second one and the first: their weights go through the store there.

A server is to be full with half of a rollout: it generates at most half of the samples at once
(`max-running-requests`), also where it is alone.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from areal_tasks.engines.session import Engines
from areal_tasks.launchers.local import LocalHandle
from areal_tasks.stages.build import Built
from areal_tasks.stages.loop import IterationResult, Job, Loop, run_directly
from areal_tasks.store.backend import open_store
from areal_tasks.store.runs import open_run
from areal_tasks.store.shards import read_table
from benchmarks.gpu.iteration import recipe_of
from benchmarks.gpu.results import add_results_option, record
from benchmarks.gpu.shapes import SHAPES

WARM: Final = 2  # iterations that are left out
LOOK_SECONDS: Final = 0.002
COLUMNS: Final = ("server", "num_generated", "seconds")
ON_CPU: Final = (
    "model.dtype=float32",
    "inference.engine=embedded",
    "inference.flags={}",
    "inference.memory_fraction=0",
    "inference.threads=1",
    "trainer.backend=local",
    "trainer.threads=1",
)


@dataclass(frozen=True)
class Rollout:
    """What one rollout was: how many servers there were at its end, and what each has done."""

    iteration: int
    servers: int
    samples: dict[str, int]
    tokens: int
    seconds: float  # from the first request to the last answer

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


@dataclass
class Death:
    """When a server was killed and what followed, in seconds of the monotonic clock; 0: not yet."""

    killed: float = 0.0
    under_way: int = 0  # samples that it had
    moved: float = 0.0  # all of these were under way elsewhere
    answered: float = 0.0  # the next request after that was
    back: float = 0.0  # it was let in again


class Over(Exception):
    """Everything is measured, or the time is over."""


@dataclass
class Bench:
    """Runs the stages; kills a server in one rollout, and goes on until it has come back and some more have run."""

    engines: Engines
    kill_at: int
    deadline: float
    rollouts: list[Rollout] = field(default_factory=list)
    publications: list[tuple[int, float]] = field(default_factory=list)  # servers that loaded, seconds
    death: Death = field(default_factory=Death)

    def execute(self, jobs: Sequence[Job]) -> list[Built]:
        """As the flow runs them, but for the kill and what is noted."""
        [job] = jobs if len(jobs) == 1 else [None]
        if job is None or job.stage.name not in ("rollout", "publish"):
            return run_directly(jobs)
        if job.stage.name == "rollout" and job.context.iteration == self.kill_at:
            threading.Thread(target=self._kill, daemon=True).start()
        built = run_directly(jobs)
        tables = built[0].manifest.tables
        if job.stage.name == "publish":
            [row] = read_table(job.context.store, tables["publish"]).to_pylist()
            self.publications.append((len(row["load_seconds"]), built[0].manifest.metrics["publish_seconds"]))
        else:
            table = read_table(job.context.store, tables["rollout"], COLUMNS)
            self.rollouts.append(rollout_of(job.context.iteration, len(self._healthy()), table))
        return built

    def tell(self, result: IterationResult) -> None:
        """A line for each iteration. Raises Over when there is nothing more to measure."""
        rollout, (servers, seconds) = self.rollouts[-1], self.publications[-1]
        split = ":".join(str(count) for count in sorted(rollout.samples.values()))
        print(
            f"iteration {result.iteration}: {rollout.servers} servers, {rollout.speed:,.0f} tokens/s in "
            f"{rollout.seconds:.2f} s, split {split}; published to {servers} in {seconds:.3f} s",
            flush=True,
        )
        again = [r for r in self.rollouts if r.iteration > self.kill_at and r.servers == 2 and len(r.samples) == 2]
        if len(again) >= WARM or time.monotonic() > self.deadline:
            raise Over

    def _healthy(self) -> list[str]:
        assert self.engines.servers._client is not None
        return self.engines.servers._client.healthy()

    def _kill(self) -> None:
        """Kill the first server when a third of the usual time is over, and watch what follows."""
        client = self.engines.servers._client
        assert client is not None
        handle = self.engines.supervisor.services["inference-0"].handle
        assert isinstance(handle, LocalHandle)
        url = self.engines.supervisor.services["inference-0"].url
        [victim] = [server for server in client.servers if server.url == url]
        until(lambda: victim.load > 0)
        time.sleep(min(rollout.seconds for rollout in self.rollouts) / 3)
        death = self.death
        death.under_way, death.killed = victim.load, time.monotonic()
        os.kill(handle.process.pid, signal.SIGKILL)
        until(lambda: victim.load == 0)
        death.moved, done = time.monotonic(), client.finished
        until(lambda: client.finished > done)
        death.answered = time.monotonic()
        until(lambda: url not in client.healthy() and len(client.healthy()) == 2)
        death.back = time.monotonic()
        print(f"the server is back {death.back - death.killed:.1f} s after it was killed", flush=True)


def until(holds: Any) -> None:
    """Wait for it."""
    while not holds():
        time.sleep(LOOK_SECONDS)


def rollout_of(iteration: int, servers: int, table: pa.Table) -> Rollout:
    """What a table `rollout` says of who generated it."""
    samples = Counter(table["server"].to_pylist())
    tokens, seconds = sum(table["num_generated"].to_pylist()), max(table["seconds"].to_pylist())
    return Rollout(iteration, servers, dict(samples), tokens, seconds)


def summary(bench: Bench) -> dict[str, Any]:
    """The figures: medians over the iterations with two servers and with one."""
    steady = [r for r in bench.rollouts if r.iteration >= WARM and r.iteration != bench.kill_at]
    speed = {count: [r.speed for r in steady if len(r.samples) == r.servers == count] for count in (1, 2)}
    shares = [min(r.samples.values()) / sum(r.samples.values()) for r in steady if len(r.samples) == r.servers == 2]
    published = {count: [seconds for n, seconds in bench.publications[WARM:] if n == count] for count in (1, 2)}
    death = bench.death
    found: dict[str, Any] = {f"tokens_per_second_{count}": median(speed[count], 0) for count in (1, 2)}
    found["ratio"] = round(median(speed[2], 0) / median(speed[1], 0), 3) if speed[1] and speed[2] else None
    found["smaller_share"] = median(shares, 3)
    found |= {f"publish_seconds_{count}": median(published[count], 3) for count in (1, 2)}
    found["killed_rollout_seconds"] = median([r.seconds for r in bench.rollouts if r.iteration == bench.kill_at], 2)
    found["samples_lost"] = death.under_way
    for name in ("moved", "answered", "back"):
        found[f"{name}_seconds"] = round(getattr(death, name) - death.killed, 3) if getattr(death, name) else None
    return found | {"iterations": len(bench.rollouts)}


def median(values: Sequence[float], digits: int) -> Any:
    """None without values."""
    return round(statistics.median(values), digits) if values else None


def overrides(arguments: argparse.Namespace) -> list[str]:
    """Of benchmarks/gpu/iteration.yaml."""
    samples = arguments.groups * arguments.size
    own = [
        f"rollout.groups={arguments.groups}",
        f"rollout.group_size={arguments.size}",
        f"rollout.max_new_tokens={arguments.new}",
        "inference.servers=2",
        f"inference.max_concurrent_requests={arguments.groups}",
        "trainer.compile=false",
        "trainer.weights_every=1",
        "trainer.recover_within_seconds=86400",
        "launcher.type=local",
        "launcher.startup_seconds=240",
        "schedule.iterations=1000",
    ]
    full = [f"inference.slots={samples // 2}", *ON_CPU] if arguments.cpu else []
    return [*own, *full, *arguments.overrides]


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run until everything is measured, or the time is over."""
    started = time.monotonic()
    arguments.overrides = overrides(arguments)
    recipe = recipe_of(arguments)
    if not arguments.cpu:
        flags = {**recipe.inference.flags, "max-running-requests": arguments.groups * arguments.size // 2}
        recipe = recipe.model_copy(update={"inference": recipe.inference.model_copy(update={"flags": flags})})
    run = open_run(open_store(recipe.store.url), f"servers-{datetime.now(UTC):%m%d-%H%M%S}", recipe.flow, recipe)
    logs = Path(os.environ.get("AREALFLOW_HOME", "/tmp/gpu-bench/home")) / "logs" / run.name
    with Engines(run, recipe, logs) as engines:
        bench = Bench(engines, WARM + arguments.repeats, started + arguments.seconds)
        try:
            Loop(run, recipe, engines, bench.execute, bench.tell)()
        except Over:
            return summary(bench) | {"seconds_in_all": round(time.monotonic() - started, 1)}
    raise AssertionError("unreachable: the run has more iterations than there is time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES, nargs="?", default="135m")
    parser.add_argument("overrides", nargs="*", help="of the recipe, as section.field=value")
    parser.add_argument("--groups", type=int, default=128)
    parser.add_argument("--size", type=int, default=8, help="samples of a group")
    parser.add_argument("--new", type=int, default=400, help="tokens of a sample")
    parser.add_argument("--repeats", type=int, default=3, help="iterations with two servers, after the first two")
    parser.add_argument("--seconds", type=float, default=225, help="end after the iteration that is under way then")
    parser.add_argument("--cpu", action="store_true", help="embedded servers; choose small sizes")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/gpu-bench"), help="models, prompts, store")
    parser.set_defaults(prompt_tokens=64, raw_rounds="")
    add_results_option(parser)
    arguments = parser.parse_intermixed_args()
    size = {name: getattr(arguments, name) for name in ("shape", "groups", "size", "new")}
    record(arguments.results, "two_servers", **size, **measured(arguments))


if __name__ == "__main__":
    main()
