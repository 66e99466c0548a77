"""`make demo`: runs the quickstart's deployment, follows it to its end, and queries the run."""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from areal_tasks.report.cost import Cost, cost_of
from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.paths import iteration_commit
from areal_tasks.store.query import Session, run_sql
from flows.cli.machine import start
from flows.cli.output import show
from flows.cli.processes import environment, running, ui_url
from schemas.errors import UserError
from schemas.recipe.load import load_recipe

DEPLOYMENT = "rlhf/quickstart"
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
QUERIES = {
    "Reward and length as training goes on": (
        "SELECT iteration // 50 * 50 AS from_iteration, count(*) AS samples, round(avg(reward), 3) AS reward, "
        "round(avg(num_generated), 2) AS tokens FROM samples GROUP BY 1 ORDER BY 1"
    ),
    "The prompts that stay hardest": (
        "SELECT prompt, answer, count(*) AS samples, round(avg(reward), 2) AS reward, mode(completion) AS usual_answer "
        "FROM samples WHERE iteration >= 200 GROUP BY ALL HAVING count(*) >= 8 ORDER BY reward, prompt LIMIT 5"
    ),
    "Tokens the policy was least sure of, and what they cost": (
        "SELECT iteration, sample_id, position, round(logprob, 2) AS logprob, round(advantage, 2) AS advantage "
        "FROM tokens WHERE loss_mask ORDER BY logprob LIMIT 5"
    ),
}
console = Console(highlight=False)


def main() -> None:
    """Run the demo; UserErrors are printed without a traceback."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", default="", help="folder or URL of the store")
    parser.add_argument("--iterations", type=int, default=0, help="fewer iterations than the recipe's")
    parser.add_argument("--stops", action="store_true", help="the caller stops server and store at the end")
    options = parser.parse_args()
    try:
        demo(options.store, options.iterations, options.stops)
    except KeyboardInterrupt:
        console.print(interrupted(running(), options.stops), soft_wrap=True, markup=False)
        sys.exit(130)
    except UserError as error:
        console.print(f"error: {error}", style="red", markup=False)
        sys.exit(1)


def interrupted(api_url: str, stops: bool) -> str:
    """The message after Ctrl-C: what keeps running, and how to stop it."""
    if not api_url or stops:
        return "\ninterrupted"
    return (
        "\ninterrupted; the Prefect server, the worker and a run that has begun keep running: see "
        f"{ui_url(api_url)}/runs. Stop everything: make down"
    )


def demo(store_url: str, iterations: int, stops: bool) -> None:
    """Start what is needed, run, follow and query; print next steps, unless the caller then `stops` everything."""
    began = time.monotonic()
    api_url = start()
    store = open_store(store_url)
    run = f"quickstart-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    overrides = f"store.url={store.url}" + (f" schedule.iterations={iterations}" if iterations else "")
    flow_run = deploy_run(api_url, run, overrides)
    console.print(f"follow it in the Prefect UI: {ui_url(api_url)}/runs/flow-run/{flow_run}", soft_wrap=True)
    follow(api_url, store, run, flow_run, iterations)
    answer(store, run)
    print_cost(store, f"{run}-sft", run)
    console.print(f"\nParquet: {store.uri(run)}", soft_wrap=True, markup=False)
    if not stops:
        console.print(f"Prefect UI: {ui_url(api_url)}")
        console.print(f'Ask more: .venv/bin/arealflow sql {run} "SHOW TABLES"')
        console.print("Stop everything: make down")
    console.print(f"{time.monotonic() - began:.0f} s in all")


def deploy_run(api_url: str, run: str, overrides: str) -> str:
    """Call `prefect deployment run rlhf/quickstart`; returns the id of the flow run."""
    command = ["deployment", "run", DEPLOYMENT, "--param", f"run={run}", "--param", f"overrides={overrides}"]
    console.print(f"$ prefect {' '.join(command)}", soft_wrap=True, markup=False)
    done = subprocess.run(
        [sys.executable, "-m", "prefect", *command], env=environment(api_url), capture_output=True, text=True
    )
    found = re.search(r"UUID: (\S+)", done.stdout)
    if done.returncode or found is None:
        raise UserError(f"the flow run could not be created:\n{done.stdout}{done.stderr}")
    return found[1]


def follow(api_url: str, store: Store, run: str, flow_run: str, iterations: int) -> None:
    """Show progress bars of the SFT run and the RL run until the flow run ends. UserError unless it completed."""
    totals = {f"{run}-sft": _planned("quickstart-sft"), run: iterations or _planned("quickstart")}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bars = {
            name: progress.add_task("sft" if name.endswith("-sft") else "rlhf", total=n, start=False)
            for name, n in totals.items()
        }
        for state in states(api_url, flow_run):
            for name, bar in bars.items():
                advance(progress, bar, store, name)
            if state in ENDED:
                break
    if state != "COMPLETED":
        raise UserError(
            f"the flow run ended {state}; its log is in the Prefect UI at {ui_url(api_url)}/runs/flow-run/{flow_run}"
        )


def advance(progress: Progress, bar: TaskID, store: Store, run: str) -> None:
    """Advance a bar to the number of committed iterations."""
    done = int(progress.tasks[bar].completed)
    while store.exists(iteration_commit(run, done)):
        done += 1
    if done or store.exists(f"{run}/run.json"):
        progress.start_task(bar)
    progress.update(bar, completed=done)


def states(api_url: str, flow_run: str) -> Iterator[str]:
    """The type of the flow run's state, polled every second; polls without an answer are skipped."""
    while True:
        with contextlib.suppress(httpx.TransportError):
            yield httpx.get(f"{api_url}/flow_runs/{flow_run}", timeout=30).json()["state_type"]
        time.sleep(1.0)


def answer(store: Store, run: str) -> None:
    """Print how rewards and accuracy changed, and the answers to three SQL queries."""
    rewards = run_sql(
        store,
        run,
        "WITH s AS (SELECT iteration, reward FROM samples), e AS (SELECT max(iteration) AS last FROM s) "
        "SELECT round(avg(reward) FILTER (iteration < 25), 3) AS first_25, "
        "round(avg(reward) FILTER (iteration > last - 25), 3) AS last_25 FROM s, e",
    ).to_pylist()[0]
    accuracy = run_sql(
        store,
        run,
        "SELECT weights_version AS version, round(avg(reward), 3) AS accuracy, count(*) AS prompts "
        "FROM evaluate GROUP BY 1 ORDER BY 1",
    ).to_pylist()
    first, last = rewards["first_25"], rewards["last_25"]
    console.print(f"\nmean reward: {first} in the first 25 iterations, {last} in the last 25")
    console.print(f"greedy accuracy: {accuracy[0]['accuracy']} before, {accuracy[-1]['accuracy']} after")
    for title, query in QUERIES.items():
        console.print(f"\n[bold]{title}[/bold]\n{query}", soft_wrap=True)
        show(run_sql(store, run, query).to_pylist(), as_json=False)


def print_cost(store: Store, *runs: str) -> None:
    """Print the total cost of these runs in one line."""
    total = Cost()
    for run in runs:
        with Session(store, run) as session:
            total += session.ask(partial(cost_of, run=run))
    console.print(f"\ncost, supervised fine-tuning included: {total}", soft_wrap=True)


def _planned(recipe: str) -> int:
    return load_recipe(recipe).schedule.iterations  # type: ignore[union-attr]


if __name__ == "__main__":
    main()
