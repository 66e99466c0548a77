"""The cost of each unit of bookkeeping in the flow: a group, a spool record, a request to the store, a Prefect task.

    python -m benchmarks.unit_costs [--store URL] [--tokens 1000] [FILE]

CPU seconds of the flow's process and seconds by the clock, as JSON, which `benchmarks.simulate_scale FILE` reads. A
group has eight samples of `--tokens` tokens. `requests` and `tasks` count the flow's requests to the store and its
Prefect tasks in an iteration of the quickstart; requests of trainers and servers are not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, cast

from prefect import flow, task
from prefect.settings import PREFECT_API_URL, temporary_settings

from areal_tasks.engines.access import Access
from areal_tasks.engines.client import InferenceClient
from areal_tasks.rollout.spooling import Writer
from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.objects.local import LocalBackend
from areal_tasks.store.opening import open_run
from areal_tasks.store.query import run_sql
from areal_tasks.store.shards import write_table
from areal_tasks.workflows import Prompt, Sample, SingleTurn, WorkflowContext, samples_to_table
from benchmarks.bare_loop import machine
from benchmarks.instant import PROMPT_TOKENS, answer, instant_server
from benchmarks.overhead import prefect_server, run_loop, warm_up
from schemas.recipe.load import load_recipe
from schemas.recipe.recipe import RlhfRecipe
from schemas.recipe.sections import Inference

SIZE: Final = 8
GROUPS: Final = 16
TIMES: Final = 50
REQUESTS: Final = ("read", "create", "put", "put_file", "put_pieces", "fetch_file", "size", "children")
ITERATIONS: Final = 6


@dataclass(frozen=True)
class Cost:
    """The cost of one unit: CPU seconds of this process, and seconds by the clock without other work."""

    cpu: float
    seconds: float


@dataclass(frozen=True)
class Units:
    """`requests` and `tasks` are numbers per iteration; the others are costs of one. The record holds one group."""

    group: Cost
    spool_record: Cost
    request: Cost
    task: Cost
    requests: float
    tasks: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--store", help="by default a folder in /dev/shm")
    parser.add_argument("--tokens", type=int, default=1000)
    options = parser.parse_args()
    print(machine(), "load", os.getloadavg()[0])
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        store = open_store(options.store or (Path(folder) / "store").as_uri())
        found = json.dumps(asdict(measure(store, Path(folder), options.tokens)))
    print(found)
    if options.file:
        options.file.write_text(found + "\n")


def measure(store: Store, folder: Path, tokens: int) -> Units:
    requests, tasks = per_iteration(folder)
    with instant_server([[answer(tokens)] * SIZE]) as address:
        samples = asyncio.run(group_samples(address, tokens, 1))[0]
        group = group_cost(store, address, tokens)
    run = open_run(store, f"units-{uuid.uuid4().hex[:8]}", load_recipe("quickstart-async"))
    writer = Writer(store, run.name, run.owner, "units")
    content = b"x" * 2000
    return Units(
        group=group,
        spool_record=cost(lambda n: writer.write({n: (0, samples)})),
        request=cost(lambda n: store.create(f"units/{uuid.uuid4().hex}.json", content)),
        task=task_cost(folder),
        requests=requests,
        tasks=tasks,
    )


def cost(do: Callable[[int], object], times: int = TIMES) -> Cost:
    """The mean CPU seconds, and the median seconds by the clock, of `times` calls after three for warm-up."""
    for n in range(3):
        do(n)
    clocks, cpu = [], time.process_time()
    for n in range(3, times + 3):
        started = time.perf_counter()
        do(n)
        clocks.append(time.perf_counter() - started)
    return Cost((time.process_time() - cpu) / times, statistics.median(clocks))


def group_cost(store: Store, address: str, tokens: int) -> Cost:
    """From the request to the rows in the store, as one of an iteration's groups; generation itself takes no time."""

    def iteration(n: int) -> None:
        groups = asyncio.run(group_samples(address, tokens, GROUPS))
        table = samples_to_table([sample for group in groups for sample in group])
        write_table(store, f"units/{uuid.uuid4().hex}", "rollout", table)

    whole = cost(iteration, times=4)
    return Cost(whole.cpu / GROUPS, whole.seconds / GROUPS)


async def group_samples(address: str, tokens: int, groups: int) -> list[list[Sample]]:
    """`groups` groups by `single_turn`, from a server that answers at once."""
    client = InferenceClient([f"http://{address}"], Access(), Inference(max_concurrent_requests=64))
    context = WorkflowContext(client, 1, SIZE, tokens, 1.0, PROMPT_TOKENS + tokens)
    prompts = [Prompt(n, n, 0, "?", "!", list(range(PROMPT_TOKENS))) for n in range(groups)]
    try:
        return list(await asyncio.gather(*(SingleTurn().run(prompt, context) for prompt in prompts)))
    finally:
        await client.close()


def task_cost(folder: Path) -> Cost:
    """The cost of a task run that does nothing, in a flow with its own server."""

    @task
    def nothing() -> None: ...

    @flow
    def tasks() -> Cost:
        return cost(lambda n: nothing())

    with prefect_server(folder) as address, temporary_settings({PREFECT_API_URL: address}):
        return tasks()


def per_iteration(folder: Path) -> tuple[float, float]:
    """Requests of the flow's process to the store, and stages that become tasks, in an iteration of the quickstart."""
    store = open_store((folder / "counted").as_uri())
    warm_up(store, folder)
    overrides = ["model.warm_start=", "model.path=run://warm", "evaluation={}", f"schedule.iterations={ITERATIONS}"]
    with counted() as count:
        run_loop(store, "run", cast(RlhfRecipe, load_recipe("quickstart-async", overrides)), folder)
    query = "SELECT count(*) / count(DISTINCT iteration) AS n FROM stages WHERE iteration > 0 AND stage <> 'scalars'"
    [row] = run_sql(store, "run", query).to_pylist()
    return count.total() / ITERATIONS, float(row["n"])


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """While inside, count the requests to stores on this disk."""
    count: Counter[str] = Counter()
    originals: Mapping[str, Any] = {name: getattr(LocalBackend, name) for name in REQUESTS}

    def counting(name: str) -> Callable[..., Any]:
        def request(*args: Any, **options: Any) -> Any:
            count[name] += 1
            return originals[name](*args, **options)

        return request

    for name in REQUESTS:
        setattr(LocalBackend, name, counting(name))
    try:
        yield count
    finally:
        for name, original in originals.items():
            setattr(LocalBackend, name, original)


if __name__ == "__main__":
    main()
