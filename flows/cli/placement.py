"""`arealflow plan --placement`: which service runs on which machine and GPUs, and what waits for resources and why."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from areal_tasks.engines.external import external_servers
from areal_tasks.engines.starting import NO_MACHINE
from areal_tasks.launchers.choice import make_cluster, on_this_machine
from areal_tasks.launchers.cluster import Listing, Machine, Resources
from areal_tasks.launchers.gpus import assigned, place_recipe, visible_gpus
from areal_tasks.launchers.placement import Proposal, propose, service_needs
from areal_tasks.store import paths
from areal_tasks.store.changes import changed_fields
from areal_tasks.store.commit import find_record
from areal_tasks.store.history.journal import read_log
from areal_tasks.store.parallel import parallel
from areal_tasks.store.record_tables import running_start
from areal_tasks.store.runs import Run
from areal_tasks.store.waits import current_waits
from flows.cli.inspect import next_recipe
from flows.cli.output import show
from schemas.errors import UserError
from schemas.manifest import NodeRecord, ServiceRecord
from schemas.recipe.recipe import Recipe

#: A record of a service's start: its name, and the number of the start.
_RECORD: Final = re.compile(r"(trainer|rollout-evaluation|(?:trainer|inference|rollout)-\d+(?:\.\d+)?)-(\d+)\.json")
#: The fields that `arealflow set` changes as services leave, by the first word of their names.
_COUNTS: Final = {"trainer": "trainer.nodes", "inference": "inference.servers", "rollout": "rollout.workers"}
#: Why a service of a recipe for GPUs does not run here, or where it computes, if none is visible.
NO_GPU: Final = (
    "SGLang needs a GPU, and none is visible (CUDA_VISIBLE_DEVICES, nvidia-smi): use a machine that has one, servers "
    "that run already (AREAL_LLM_SERVER_ADDRS), or a recipe with inference.engine embedded, such as gsm8k-cpu"
)
ON_CPUS: Final = "no GPU is visible: it computes on CPUs, which takes far longer"


def plan_placement(recipe: Recipe, as_json: bool) -> None:
    """Print where the services of a recipe would run now. Raises UserError, after that, if some can run nowhere."""
    title = f"{recipe.flow} · {recipe.name} · launcher {recipe.launcher.type}"
    if on_this_machine(recipe.launcher):
        gpus, where = visible_gpus(), "this machine"
        rows, title = local_rows(recipe, gpus), f"{title} · visible GPUs: {', '.join(gpus) or 'none'}"
    else:
        needs, where = service_needs(recipe, bool(external_servers())), "the cluster"
        found = propose(needs, machines_of(recipe), recipe.launcher.ray.autoscaling)
        rows, title = list(map(cluster_row, found)), f"{title}: a proposal; the cluster system decides in the end"
    show(rows, as_json, title)
    if refused := [row for row in rows if row["state"] == "refused"]:
        more = f" (and {len(refused) - 1} more)" if refused[1:] else ""
        raise UserError(f"this recipe does not fit {where}: {refused[0]['service']}{more}: {refused[0]['why']}")


def cluster_row(one: Proposal) -> dict[str, Any]:
    return {"service": one.service, "state": one.state, "node": one.machine, **asdict(one.needs), "why": one.why}


def local_rows(recipe: Recipe, visible: Sequence[str]) -> list[dict[str, Any]]:
    """The services of a recipe on this machine, with their GPUs. Raises UserError as `place_recipe`."""
    external = external_servers()
    gpus, here = assigned(place_recipe(recipe, visible, bool(external))), socket.gethostname()

    def row(service: str, needs: Resources) -> dict[str, Any]:
        missing = bool(needs.gpus) and not visible
        refused = missing and service.startswith("inference")  # a trainer computes on CPUs instead
        return {
            "service": service,
            "state": "refused" if refused else "fits",
            "node": "" if refused else here,
            "gpus": gpus.get(service, ""),
            "why": (NO_GPU if refused else ON_CPUS) if missing else "",
        }

    rows = [row(*one) for one in service_needs(recipe, bool(external)).items()]
    running = {"state": "runs", "node": "runs already", "gpus": "", "why": ""}
    return rows + [{"service": url, **running} for url in external]


def machines_of(recipe: Recipe) -> list[Machine]:
    """The machines of the recipe's cluster. Raises UserError if it cannot list them."""
    cluster = make_cluster(recipe.launcher)
    try:
        if isinstance(cluster, Listing):
            return cluster.machines()
    finally:
        cluster.close()
    raise UserError(
        f"launcher.type: {recipe.launcher.type} has no method machines(), so where services would run is not known "
        "before they do (docs/guides/machines.md)"
    )


# ── a run ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def run_placement(run: Run, changes: Sequence[str], as_json: bool) -> None:
    """Print where the services of a run are; if its flow has ended, where they would run if it began again."""
    recipe = next_recipe(run, changes)
    if (owner := running_start(run)) is None:
        plan_placement(recipe, as_json)
        return
    title = f"run {run.name}, start {owner.n} of its flow, on {owner.host} since {owner.started[:19]} UTC"
    show(running_rows(run, recipe, owner.n), as_json, title)


def running_rows(run: Run, recipe: Recipe, owner: int) -> list[dict[str, Any]]:
    """The services of a start of the flow: on which machine each runs, starts, or what it waits for."""
    waits = record.waits if (record := current_waits(run)) else ()
    why, gpus = {wait.at: wait.says for wait in waits}, placed_gpus(run, owner)
    asked = dict.fromkeys(service_needs(recipe, bool(external_servers())), 0)
    changed = changed_fields(run.segments)  # others may have other values in this start than in the store
    newest = newest_starts(run, owner)
    left = [name for name in newest if name not in asked and _COUNTS[name.partition("-")[0]] in changed]
    lost = {wait.at for wait in waits if wait.limit == NO_MACHINE}  # the newest recorded start of these has ended

    def row(start: tuple[str, int]) -> dict[str, Any]:
        name, restart = start
        begun, placed = (path(run.name, owner, name, restart) for path in (paths.service, paths.node))
        service = None if name in lost else find_record(run.store, begun, ServiceRecord)
        node = None if name in lost else find_record(run.store, placed, NodeRecord)
        where = service or node
        return {
            "service": name,
            "state": "runs" if service else "starts" if node else "waits",
            "node": where.host if where else "",
            "gpus": gpus.get(name, ""),
            "restarts": restart,
            "why": "" if service else why.get(name, ""),
        }

    return parallel(row, sorted((name, start) for name, start in (asked | newest).items() if name not in left))


def newest_starts(run: Run, owner: int) -> dict[str, int]:
    """The number of the newest recorded start of each service."""
    folders = {path(run.name, owner, "", 0).rpartition("/")[0] for path in (paths.node, paths.service)}
    found = [match for folder in folders for name in run.store.children(folder) if (match := _RECORD.fullmatch(name))]
    return {match[1]: int(match[2]) for match in sorted(found, key=lambda match: int(match[2]))}


def placed_gpus(run: Run, owner: int) -> dict[str, str]:
    """The GPUs of services on one machine, which the run's log names; a cluster system gives services theirs."""
    lines = [line for line in read_log(run.store, run.name) if line.action == "placed"]
    return {name: str(gpus) for line in lines if line.details["owner"] == owner for name, gpus in line.details.items()}
