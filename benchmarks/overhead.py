"""The cost of persistence and orchestration: the quickstart's iterations as a flow, compared to a bare Python loop.

    python -m benchmarks.overhead [--iterations 60] [--rounds 1]

Three ways, one after the other on the same machine: the bare loop of `benchmarks/bare_loop.py`; the loop with its
services and its store, without Prefect; the flow, with a Prefect server of its own. An iteration's time is the
difference between two commits in the store. What the second adds to the first is split by timers in its process.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import httpx

from areal_tasks.engines.session import Engines
from areal_tasks.stages import build, generation, loop, stage
from areal_tasks.stages.loop import Loop
from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.opening import open_run
from areal_tasks.store.query import run_sql
from benchmarks.bare_loop import bare_run, machine
from flows.cli.machine import free_port
from flows.server import SERVER_SETTINGS
from schemas.recipe.load import load_recipe
from schemas.recipe.recipe import RlhfRecipe, SftRecipe

WARM = 5  # iterations left out at the start: services and caches warm up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=1, help="repeat all three ways so often, in turns")
    arguments = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as folder, prefect_server(Path(folder)) as api_url:
        rounds = [measure(Path(folder) / str(n), arguments.iterations, api_url) for n in range(arguments.rounds)]
    medians = {name: statistics.median(r.get(name, 0.0) for r in rounds) for name in rounds[0]}
    print_table(medians)


def measure(folder: Path, iterations: int, api_url: str) -> dict[str, float]:
    """Milliseconds per iteration, by way and by part."""
    store = open_store((folder / "store").as_uri())
    warm_up(store, folder)
    overrides = [f"schedule.iterations={iterations}", "model.warm_start=", "model.path=run://warm", "evaluation={}"]
    recipe = cast(RlhfRecipe, load_recipe("quickstart", overrides))
    sft = cast(SftRecipe, load_recipe("quickstart-sft"))
    bare = 1000 * bare_run(sft, recipe).rl_seconds / iterations
    parts: Counter[str] = Counter()
    with timers(parts):
        run_loop(store, "loop", recipe, folder)
    subprocess.run(
        [sys.executable, "-c", FLOW, *overrides],
        env={**os.environ, "PREFECT_API_URL": api_url, "AREALFLOW_HOME": str(folder), "AREALFLOW_STORE": store.url},
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return {
        "bare": bare,
        "loop": per_iteration(store, "loop"),
        "flow": per_iteration(store, "flow"),
        **{name: 1000 * seconds / iterations for name, seconds in parts.items()},
    }


FLOW = """
import sys
from flows.rlhf import rlhf
from schemas.recipe.load import load_recipe
rlhf(load_recipe("quickstart", sys.argv[1:]), run="flow")
"""


def warm_up(store: Store, folder: Path) -> None:
    """The SFT run that all three ways start from."""
    recipe = load_recipe("quickstart-sft")
    run = open_run(store, "warm", recipe)
    with Engines(run, recipe, folder / "logs") as engines:
        Loop(run, recipe, engines)()


def run_loop(store: Store, name: str, recipe: RlhfRecipe, folder: Path) -> None:
    run = open_run(store, name, recipe)
    with Engines(run, recipe, folder / "logs") as engines:
        Loop(run, recipe, engines)()


def per_iteration(store: Store, run: str) -> float:
    """Mean milliseconds between two commits, without the first few."""
    rows = run_sql(store, run, "SELECT committed FROM commits ORDER BY iteration").to_pylist()
    times = [row["committed"].timestamp() for row in rows][WARM:]
    return 1000 * (times[-1] - times[0]) / (len(times) - 1)


@contextlib.contextmanager
def timers(parts: Counter[str]) -> Iterator[None]:
    """Add up, in this process, the seconds spent in the store and waiting for each service."""
    from areal_tasks.engines import servers, trainer_client
    from areal_tasks.rewards import pool

    targets: list[tuple[Any, str, str]] = [
        (build, "write_table", "store: tables written"),
        (stage, "read_table", "store: tables read"),
        (build, "commit_once", "store: stage manifests"),
        (loop.Loop, "_commit", "store: iteration commits"),
        (generation.Generation, "take", "service: generation"),
        (trainer_client.TrainerClient, "run", ""),
        (servers.Servers, "_load", "service: weights loaded"),
        (pool.VerifierPool, "verify", "verifier processes"),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in targets]
    for owner, name, part in targets:
        setattr(owner, name, timed(getattr(owner, name), parts, part))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


#: What the time of a trainer's command counts as, or of none; that of others counts as OTHER.
TRAINER = {
    "": "HTTP: an empty request",
    "train": "service: training",
    "publish": "service: weights written",
    "load": "service: model loaded",
}
OTHER = "service: other commands of the trainer"


def timed(function: Callable[..., Any], parts: Counter[str], part: str) -> Callable[..., Any]:
    def wrapper(*args: Any, **options: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            found = part or TRAINER.get(args[1].name if args[1] else "", OTHER)
            parts[found] += time.perf_counter() - started  # type: ignore[assignment]

    return wrapper


@contextlib.contextmanager
def prefect_server(folder: Path) -> Iterator[str]:
    """A Prefect server with a database of its own; its API's address."""
    port = free_port(4300)
    url = f"http://127.0.0.1:{port}/api"
    environment = {**os.environ, **SERVER_SETTINGS, "PREFECT_HOME": str(folder / "prefect")}
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        wait_for(url, server)
        yield url
    finally:
        server.terminate()
        server.wait()


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    """Wait for the Prefect server. RuntimeError if it does not start within a minute."""
    for _ in range(300):
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=2).is_success:
                return
        if server.poll() is not None:
            break
        time.sleep(0.2)
    raise RuntimeError("the Prefect server did not start")


def print_table(medians: dict[str, float]) -> None:
    """Print milliseconds per iteration, and the ratios of loop and flow to the bare loop."""
    bare, loop_ms, flow_ms = (medians.pop(name) for name in ("bare", "loop", "flow"))
    print(f"{'an iteration as':34s} {'ms':>8s} {'÷ bare':>8s}")
    for name, value in (("bare Python loop", bare), ("services + store", loop_ms), ("the flow, with Prefect", flow_ms)):
        print(f"{name:34s} {value:8.1f} {value / bare:8.2f}")
    print(f"\n{'of services + store':34s} {'ms':>8s}")
    for name, value in sorted(medians.items()):
        print(f"{name:34s} {value:8.1f}")
    print(f"{'Prefect (flow less services + store)':34s} {flow_ms - loop_ms:6.1f}")


if __name__ == "__main__":
    main()
