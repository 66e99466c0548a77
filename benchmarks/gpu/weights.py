"""New weights on the servers, by each way: seconds from the last optimizer step to an answer under its version.

    python -m benchmarks.gpu.weights 1.5b [--transports tensor,store] [--store file:///dev/shm/… | s3://bucket/…]

The services and stages of a run (benchmarks/gpu/iteration.yaml, with very small rollouts), driven in one process
**without Prefect**; `benchmarks.gpu.iteration` measures the same in a whole run with it, up to the servers' holding the
weights. The clock starts where `train` began plus its `step_seconds`: since nothing says when the last step ended, the
reading of the stage's (small) tables counts, as do writing and committing its own afterwards.

One start of the services measures all transports that one store and placement allow; S3 is a second call. The first
iteration of each transport is left out: it opens connections and page-locks memory. Only with `store` the store gets
the weights here; with the others, recipes have them written now and then.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, cast

from areal_tasks.engines.client import GenerateRequest
from areal_tasks.engines.handover import Transport
from areal_tasks.engines.session import Engines
from areal_tasks.stages.build import Built
from areal_tasks.stages.jobs import IterationResult, Job, run_directly
from areal_tasks.stages.loop import Loop
from areal_tasks.store.backend import open_store
from areal_tasks.store.opening import open_run
from areal_tasks.store.shards import read_table
from benchmarks.gpu.iteration import recipe_of
from benchmarks.gpu.results import add_results_option, record
from benchmarks.gpu.shapes import SHAPES
from schemas.recipe.recipe import RlhfRecipe

SMALL: Final = (
    "rollout.groups=4",
    "rollout.group_size=4",
    "rollout.max_new_tokens=16",
    "trainer.weights_every=1",
    "trainer.recover_within_seconds=86400",
    "trainer.compile=false",
    "launcher.type=local",
)
NEVER: Final = 10**6


class Stopwatch:
    """Runs the stages of a run; of `publish`, how long it was until a server answered under the new version."""

    def __init__(self, engines: Engines, transports: Sequence[str], repeats: int) -> None:
        self.engines = engines
        self.transports = transports
        self.repeats = repeats
        self.rows: list[dict[str, Any]] = []

    def execute(self, jobs: Sequence[Job]) -> list[Built]:
        """As the flow runs them, but for the clock."""
        if [job.stage.name for job in jobs] != ["publish"]:
            return run_directly(jobs)
        [job] = jobs
        used = self.transports[job.context.iteration // self.repeats]
        self.engines.servers.transport = cast(Transport, used)
        stepped, began = last_step(job), time.time()
        built = run_directly([writing(job, 1 if used == "store" else NEVER)])
        published = time.time()
        self._ask(job.context.iteration + 1)
        times = {"tables": began - stepped, "published": published - began, "answered": time.time() - stepped}
        [row] = read_table(job.context.store, built[0].manifest.tables["publish"]).to_pylist()
        self.rows.append(row | {"used": used} | times)
        return built

    def _ask(self, version: int) -> None:
        client = self.engines.servers.inference()
        [answer] = self.engines.servers.call(client.generate([GenerateRequest([5, 6, 7], 1)]))
        if answer.versions != [version]:
            raise SystemExit(f"the server answered with weights {answer.versions}, not {version}")

    def tell(self, result: IterationResult) -> None:
        """A line for each iteration."""
        row = self.rows[result.iteration]
        loads = ", ".join(f"{seconds:.3f}" for seconds in row["load_seconds"])
        print(
            f"{row['used']:7} answered {row['answered']:.3f} s after the step; tables {row['tables']:.3f}, published "
            f"{row['published']:.3f}, written {row['write_seconds']:.3f}, loaded {loads}",
            flush=True,
        )


def last_step(job: Job) -> float:
    """When the optimizer steps that made a publication's weights had ended, at the earliest: seconds since 1970."""
    train = job.inputs["train"].manifest
    steps = read_table(job.context.store, train.tables["train_steps"], ("step_seconds",))["step_seconds"].to_pylist()
    return datetime.fromisoformat(train.provenance.started).timestamp() + float(sum(steps))


def writing(job: Job, every: int) -> Job:
    """The job of a run that writes each `every`-th version of its weights."""
    recipe = cast(RlhfRecipe, job.context.recipe)
    trainer = recipe.trainer.model_copy(update={"weights_every": every})
    return replace(job, context=replace(job.context, recipe=recipe.model_copy(update={"trainer": trainer})))


def timed(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each publication."""
    transports = arguments.transports.split(",")
    iterations = len(transports) * arguments.repeats + 1  # the last one's weights are written in any case
    arguments.overrides = [*SMALL, f"schedule.iterations={iterations}", *arguments.overrides]
    recipe = recipe_of(arguments)
    run = open_run(open_store(recipe.store.url), f"weights-{datetime.now(UTC):%m%d-%H%M%S}", recipe)
    logs = Path(os.environ.get("AREALFLOW_HOME", "/tmp/gpu-bench/home")) / "logs" / run.name
    with Engines(run, recipe, logs) as engines:
        watch = Stopwatch(engines, [*transports, transports[-1]], arguments.repeats)
        Loop(run, recipe, engines, watch.execute, watch.tell)()
    return watch.rows[:-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("overrides", nargs="*", help="of the recipe, as section.field=value")
    parser.add_argument("--transports", default="tensor,store", help="of tensor, nccl, store, in the order tried")
    parser.add_argument("--store", default="", help="URL; the folder's own otherwise, which is memory-backed")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/gpu-bench"), help="models, prompts, store")
    parser.add_argument("--repeats", type=int, default=4, help="versions by each transport, the first left out")
    parser.set_defaults(prompt_tokens=64, raw_rounds="")
    add_results_option(parser)
    arguments = parser.parse_intermixed_args()
    if arguments.store:
        arguments.overrides = [f"store.url={arguments.store}", *arguments.overrides]
    if arguments.repeats < 2:
        parser.error("--repeats: at least 2, since the first of each transport is left out")
    rows = timed(arguments)
    for transport in dict.fromkeys(row["used"] for row in rows):
        steady = [row for row in rows if row["used"] == transport][1:]
        record(
            arguments.results,
            "weights",
            shape=arguments.shape,
            transport=transport,
            through="S3" if arguments.store.startswith("s3://") else "memory",
            since="last optimizer step",
            prefect=False,
            answered_seconds=round(statistics.median(row["answered"] for row in steady), 4),
            answered=[round(row["answered"], 4) for row in steady],
            tables=[round(row["tables"], 4) for row in steady],
            published=[round(row["published"], 4) for row in steady],
            written=[round(row["write_seconds"], 4) for row in steady],
            loaded=[round(max(row["load_seconds"]), 4) for row in steady],
            bytes=max(row["bytes"] for row in rows),
        )


if __name__ == "__main__":
    main()
