"""Two servers through the product: speed and split at η = 0, and what a killed server or worker costs at η = 2.

    python -m benchmarks.gpu.two_servers 135m                                  (a host with two GPUs; ten minutes)
    python -m benchmarks.gpu.two_servers tiny --cpu --folder /tmp/two-servers  (the same, small, with embedded servers)

Runs of benchmarks/gpu/iteration.yaml by `arealflow run`:

1. `one` and `two`: η = 0 with so many servers: seconds of a rollout, and how its samples are split;
2. `worker`: η = 2, the rollout worker is killed (SIGKILL) `--workers` times: seconds until the next commit;
3. `server`: in the same run one server is, and then the other, `--kills` times, each once the one before is back.

With η = 2 the next iteration needs what one server generates of it alone, so that the samples of these parts are
shorter (`--kills-new`): with 400 tokens one server needs five seconds for an iteration.

Everything is measured from outside: by the runs' commits and tables, and by what their services register. After
`--seconds` it ends with what it has. On a host where SGLang takes half a minute to start, ten kills need a call of
their own: `--parts one,two,worker`, then `--parts server`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import psutil

from areal_tasks.store.backend import open_store
from areal_tasks.store.commit import read_record
from areal_tasks.store.paths import service
from benchmarks.gpu.iteration import paths
from benchmarks.gpu.product import committed, rows
from benchmarks.gpu.results import add_results_option, end_tree, record
from benchmarks.gpu.settings import ON_CPU, RECIPE, words_of
from benchmarks.gpu.shapes import SHAPES
from schemas.manifest import ServiceRecord

LOOK_SECONDS: Final = 0.02
ETA: Final = 2
WARM: Final = 2  # iterations of each number of servers that are left out
ENDLESS: Final = 100_000  # iterations: the measurement ends the run
PARTS: Final = ("one", "two", "worker", "server")
ROLLOUTS: Final = """
    SELECT s.iteration, s.seconds, r.servers FROM stages s JOIN (SELECT iteration, list(n ORDER BY n) AS servers FROM
      (SELECT iteration, server, count(*) AS n FROM rollout GROUP BY 1, 2) GROUP BY 1) r USING (iteration)
    WHERE s.stage = 'rollout' AND s.iteration >= {first} ORDER BY 1"""


class Over(Exception):
    """The time is over, or the run has ended."""


@dataclass
class Product:
    """A run of the product in a process of its own."""

    name: str
    folder: Path  # with the store, and the logs of services
    log: Path  # of the flow
    words: Sequence[str]
    deadline: float
    known: int = 0  # iterations that are committed
    killed: set[int] = field(default_factory=set)  # processes that were killed, the first one of each service

    def __post_init__(self) -> None:
        self.store = open_store((self.folder / "store").as_uri())
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            command = self._command(["run", RECIPE, f"run={self.name}", *self.words])
            self.process = subprocess.Popen(command, env=self._environment(), stdout=log, stderr=log)

    def __enter__(self) -> Product:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            print(*self.log.read_text(errors="replace").splitlines()[-25:], sep="\n", file=sys.stderr)
        end_tree(self.process)

    def _command(self, words: Sequence[str]) -> list[str]:
        return [sys.executable, "-c", "from flows.cli.main import main; main()", *words]

    def _environment(self) -> dict[str, str]:
        return os.environ | {"AREALFLOW_HOME": str(self.folder / "home"), "TOKENIZERS_PARALLELISM": "false"}

    def until(self, condition: Callable[[], object]) -> float:
        """Wait for it; the monotonic clock then. Over: the time is over, or the run has ended."""
        while not condition():
            if time.monotonic() > self.deadline or self.process.poll() is not None:
                raise Over(f"after {self.commits()} iterations; the run has ended with {self.process.poll()}")
            time.sleep(LOOK_SECONDS)
        return time.monotonic()

    def commits(self) -> int:
        """The number of iterations that are committed."""
        self.known = committed(self.store, self.name, self.known)
        return self.known

    def after(self, iterations: int) -> float:
        """Wait for so many further commits; the monotonic clock then."""
        return self.until(partial(self.has, self.commits() + iterations))

    def has(self, iterations: int) -> bool:
        """Whether so many are committed."""
        return self.commits() >= iterations

    def newest(self, name: str) -> ServiceRecord | None:
        """What the last start of a service has registered."""
        owner = max(int(file.stem) for file in (self.folder / "store" / self.name / "owners").glob("*.json"))
        files = Path(service(self.name, owner, name, 0)).parent.joinpath(f"{name}-*.json")
        found = (read_record(self.store, path, ServiceRecord) for path in self._paths(str(files)))
        return max(found, key=lambda record: record.restart, default=None)

    def _paths(self, pattern: str) -> list[str]:
        root = self.folder / "store"
        return [str(path.relative_to(root)) for path in root.glob(pattern)]

    def is_back(self, name: str) -> bool:
        """Whether a start of the service that was not killed has registered."""
        newest = self.newest(name)
        return newest is not None and newest.pid not in self.killed

    def kill(self, name: str) -> float:
        """Kill the processes of a service; the monotonic clock then."""
        newest = self.newest(name)
        assert newest is not None, "it runs"
        self.killed.add(newest.pid)
        leader = psutil.Process(newest.pid)
        family = [leader, *leader.children(recursive=True)]
        began = time.monotonic()
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return began


@dataclass
class Bench:
    """What is measured, one part after another."""

    product: Product
    arguments: argparse.Namespace
    found: dict[str, Any] = field(default_factory=dict)

    def one(self) -> None:
        self._speed("one")

    def two(self) -> None:
        self._speed("two")

    def _speed(self, servers: str) -> None:
        """Seconds of rollouts, and how their samples are split."""
        product = self.product
        product.until(partial(product.has, WARM + self.arguments.iterations))
        rollouts = rows(product.store, product.name, ROLLOUTS.format(first=WARM))
        seconds = [round(row["seconds"], 3) for row in rollouts]
        shares = [[round(n / sum(row["servers"]), 3) for n in row["servers"]] for row in rollouts]
        self.found |= {f"rollout_seconds_{servers}": seconds, f"split_{servers}": shares}

    def undisturbed(self) -> None:
        """Note how long an iteration takes."""
        product = self.product
        product.until(lambda: product.has(1) and product.is_back("inference-1"))
        product.after(2 + ETA)
        began = time.monotonic()
        self.found["iteration_seconds"] = round((product.after(5) - began) / 5, 3)

    def worker(self) -> None:
        for number in range(self.arguments.workers):
            self._kill("rollout-0", "worker_killed", number)
            self.product.after(3)

    def server(self) -> None:
        for number in range(self.arguments.kills):
            name = f"inference-{number % 2}"
            began = self._kill(name, "server_killed", number)
            back = self.product.until(partial(self.product.is_back, name))
            self.found.setdefault("server_back", []).append(round(back - began, 3))
            self.product.after(2)

    def _kill(self, name: str, what: str, number: int) -> float:
        """Kill a service, at another moment of an iteration each time; note the seconds until the next commits."""
        self.product.after(1)
        time.sleep(self.found["iteration_seconds"] * (number * 0.381966 % 1))  # the golden section: spread evenly
        began, before = self.product.kill(name), self.product.commits()
        times = [self.product.until(partial(self.product.has, before + n)) - began for n in (1, 2, 3)]
        self.found.setdefault(what, []).append([round(seconds, 3) for seconds in times])
        print(f"{name} killed: commits after {', '.join(f'{seconds:.2f}' for seconds in times)} s", flush=True)
        return began


def words(arguments: argparse.Namespace) -> list[str]:
    """The overrides of the recipe."""
    model, prompts, store = paths(arguments)
    sizes = [
        f"model.path={model}",
        f"data.source={prompts}",
        f"store.url={store}",
        f"rollout.groups={arguments.groups}",
        f"rollout.group_size={arguments.size}",
        f"rollout.max_new_tokens={arguments.new}",
        f"inference.max_concurrent_requests={arguments.groups}",
        f"schedule.iterations={ENDLESS}",
        "schedule.artifact_every=1000",
        "trainer.recover_within_seconds=86400",
        "trainer.compile=false",
        "trainer.micro_batch_tokens=32768",
        "launcher.type=local",
    ]
    on_gpus = [
        "trainer.gpus=[0]",
        f"inference.flags.cuda-graph-max-bs-decode={most(arguments)}",
    ]
    on_cpu = [*ON_CPU, f"inference.slots={most(arguments)}", "reward.workers=1"]
    return [*words_of(arguments.shape), *sizes, *(on_cpu if arguments.cpu else on_gpus), *arguments.overrides]


def most(arguments: argparse.Namespace) -> int:
    """Samples that a server is given at once, at most: those of an iteration."""
    return int(arguments.groups * arguments.size)


def table(found: dict[str, Any]) -> list[str]:
    """What was measured, and what is required."""
    lines = ["| what | measured | required |", "|---|---|---|"]
    one, two = (found.get(f"rollout_seconds_{n}") for n in ("one", "two"))
    if one and two:
        before, after = statistics.median(one), statistics.median(two)
        shares = [min(split) if len(split) > 1 else 0.0 for split in found["split_two"]]
        lines += [
            f"| a rollout by one server ÷ by two | {before / after:.2f} ({before:.2f} → {after:.2f} s) | ≥ 1.85 |",
            f"| smaller share: least, median | {min(shares):.0%}, {statistics.median(shares):.0%} | ≥ 45% |",
        ]
    if "iteration_seconds" in found:
        lines.append(f"| undisturbed iteration at η = {ETA} | {found['iteration_seconds']:.2f} s | |")
    for what, name in (("server_killed", "one of two servers"), ("worker_killed", "the rollout worker")):
        if kills := found.get(what):
            first = [times[0] for times in kills]
            gaps = [max(b - a for a, b in pairwise([0.0, *times])) for times in kills]
            seconds = f"{min(first):.2f} to {max(first):.2f} s, median {statistics.median(first):.2f}"
            lines += [
                f"| {name} killed {len(kills)} times: the next commit after | {seconds} | ≤ 5 s |",
                f"| … the longest time without a commit, of the next three | {max(gaps):.2f} s | |",
            ]
    return lines


def runs(arguments: argparse.Namespace) -> Iterator[tuple[str, list[str], list[str]]]:
    """The name of each run, its further overrides, and the parts that are measured in it."""
    asked = arguments.parts.split(",")
    gpus = {1: "inference.gpus=[0]", 2: "inference.gpus=[0,1]"}
    ahead = [f"rollout.max_head_offpolicyness={ETA}", f"rollout.max_new_tokens={arguments.kills_new}"]
    for name, servers, more, parts in (
        ("one", 1, [], ["one"]), ("two", 2, [], ["two"]), ("kills", 2, ahead, ["undisturbed", "worker", "server"]),
    ):  # fmt: skip
        if wanted := [part for part in parts if part in asked]:
            own = [f"inference.servers={servers}", *([] if arguments.cpu else [gpus[servers]]), *more]
            yield name, own, ["undisturbed", *wanted] if name == "kills" else wanted


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of the parts that are asked for, as far as the time is enough."""
    started, found = time.monotonic(), dict[str, Any]()
    for name, more, parts in runs(arguments):
        own = f"two-servers-{name}-{datetime.now(UTC):%m%d-%H%M%S}"
        log, until = arguments.results.parent / f"{own}.log", started + arguments.seconds
        overrides = [*words(arguments), *more]
        try:
            with Product(own, arguments.folder.resolve(), log, overrides, until) as product:
                for part in parts:
                    getattr(Bench(product, arguments, found), part)()
        except Over as over:
            print(f"cut off: {over}", file=sys.stderr)
    return found | {"seconds_in_all": round(time.monotonic() - started, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("overrides", nargs="*", help="of the recipe, as section.field=value")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--size", type=int, default=16, help="samples of a group")
    parser.add_argument("--new", type=int, default=400, help="tokens of a sample, at most")
    parser.add_argument("--kills-new", type=int, default=200, help="the same of the run whose services are killed")
    parser.add_argument("--iterations", type=int, default=6, help="that are measured for each number of servers")
    parser.add_argument("--kills", type=int, default=10, help="of servers")
    parser.add_argument("--workers", type=int, default=5, help="kills of the rollout worker")
    parser.add_argument("--seconds", type=float, default=550, help="time limit")
    parser.add_argument("--cpu", action="store_true", help="embedded servers; choose small sizes")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/gpu-bench"), help="models, prompts, store, logs")
    parser.set_defaults(prompt_tokens=64, raw_rounds="")
    add_results_option(parser)
    arguments = parser.parse_intermixed_args()
    size = {name: getattr(arguments, name) for name in ("shape", "groups", "size", "new", "kills_new")}
    found = measured(arguments)
    record(arguments.results, "two_servers", **size, **found)
    print(*table(found), sep="\n")


if __name__ == "__main__":
    main()
