"""Samples of a run's services: what each works on or waits for, its queues, and what it uses of its machine.

`observe` is cheap and asks no service: it notes what the flow knows. `sample` gives a row per service for the time
since the last sample, and asks servers and workers for their queues.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from areal_tasks.engines.service import server_of
from areal_tasks.engines.session import Engines
from areal_tasks.engines.trainer.commands import KEPT
from areal_tasks.engines.workers import Backlog
from areal_tasks.launchers.supervisor import Service
from areal_tasks.launchers.usage import Usage, measure
from areal_tasks.store.in_flight import LEDGER
from schemas.recipe.recipe import SftRecipe

Row = dict[str, Any]

FLOW: Final = "flow"
#: The run counts as waiting for the store if an operation takes longer.
STORE_SECONDS: Final = 0.5
#: What a wait of the run is for, by the first word of its name; names with other first words are stages or commands.
CAUSES: Final = {
    "to": "a person",
    "its": "start",
    "generation": "groups",
    "verdicts": "verdicts",
    "weights": "servers",
    "a": "servers",
    "an": "servers",
}


class State(NamedTuple):
    """What a service does, or what it waits for; the other one is empty."""

    doing: str = ""
    waits_for: str = ""


@dataclass(frozen=True)
class Flow:
    """What the flow knows at one time. `works`: see `Watchdog.registered`; `server_waits`: see `ServerPool.states`.

    `store`: whether an operation of the store takes longer than `STORE_SECONDS`.
    """

    works: Sequence[str]
    store: bool = False
    backlog: Backlog | None = None
    server_waits: Mapping[str, str] = field(default_factory=dict)


def first_word(work: str) -> str:
    """`train` of `train 3`; `/train` of `/train of version 3`."""
    return work.partition(" ")[0]


def stages(flow: Flow) -> list[str]:
    """The stages that are being built, the one that began first before the others."""
    return [word for word in map(first_word, flow.works) if word not in CAUSES and not word.startswith("/")]


def causes(flow: Flow) -> list[str]:
    """What the flow waits for, except commands of the trainer; a slow store first, unless it waits for groups."""
    found = [CAUSES[word] for word in map(first_word, flow.works) if word in CAUSES]
    if "rollout" not in stages(flow):
        other = "evaluation" if "evaluate" in stages(flow) else "servers"  # updated servers score part of the batch
        found = [other if cause == "groups" else cause for cause in found]
    return ["store", *found] if flow.store and "groups" not in found else found


def flow_state(flow: Flow) -> State:
    """The stages that the flow builds, unless it waits for something other than the trainer."""
    if waits := causes(flow):
        return State(waits_for=waits[0])
    return State(" + ".join(stages(flow)) or "between stages")


def trainer_state(flow: Flow) -> State:
    """The command that the trainer runs, else what the flow does or waits for instead."""
    commands = [word[1:] for word in map(first_word, flow.works) if word.startswith("/") and word != "/health"]
    waits = causes(flow)
    now = [name for name in commands if name not in KEPT] or ([] if "groups" in waits else commands)
    return State(now[0]) if now else State(waits_for=[*waits, *stages(flow), FLOW][0])


def server_state(flow: Flow, url: str) -> State:
    """A server works while any groups are generated; else it waits for weights, verdicts, or groups that may begin.

    If one server is held for an evaluation, the others do not evaluate.
    """
    waits_for, held = flow.server_waits.get(url, "answers"), "release" in flow.server_waits.values()
    if waits_for == "release" or ("evaluate" in stages(flow) and not waits_for and not held):
        return State("evaluate")
    return State(waits_for=waits_for) if waits_for else worker_state(flow, None)


def worker_state(flow: Flow, worker: str | None) -> State:
    """What a worker does with its groups; None: with the groups of all workers."""
    if flow.backlog is None:
        return State(waits_for="requests")
    generating, verifying = (
        sum(groups.values()) if worker is None else groups.get(worker, 0)
        for groups in (flow.backlog.generating, flow.backlog.verifying)
    )
    if generating:
        return State("generate")
    return State("verify") if verifying and worker else State(waits_for="verdicts" if verifying else "rule")


@dataclass
class Observations:
    """The states of one service as observed since the last sample; `state` is the last one, which began at `since`."""

    state: State = field(default_factory=State)
    since: float = 0.0
    counts: Counter[State] = field(default_factory=Counter)

    def observe(self, state: State, now: float) -> None:
        if state != self.state:
            self.state, self.since = state, now
        self.counts[state] += 1

    def row(self, now: float) -> Row:
        """The columns of states, for the observations since the last row."""
        shares = {state: count / self.counts.total() for state, count in self.counts.items()}
        self.counts.clear()
        works = {state.doing: share for state, share in shares.items() if state.doing}
        waits = {state.waits_for: share for state, share in shares.items() if state.waits_for}
        return {
            "busy": sum(works.values()) if shares else None,
            "works": list(works.items()),
            "waits": list(waits.items()),
            "doing": self.state.doing,
            "waits_for": self.state.waits_for,
            "state_seconds": now - self.since,
        }


class Sampler:
    """Samples the services of one start of a run's flow. Use within one thread."""

    def __init__(self, engines: Engines) -> None:
        self.engines = engines
        self._seen: dict[str, Observations] = {}
        self._usages: dict[str, tuple[int, Usage]] = {}  # by service: the number of its start, and its last usage
        self._sampled = time.monotonic()

    @property
    def services(self) -> dict[str, Service | None]:
        """The services by name; None for the flow and for servers that the run has not started."""
        return {
            FLOW: None,
            **dict.fromkeys(self.engines.servers.external),
            **dict(list(self.engines.supervisor.services.items())),
        }

    def observe(self) -> None:
        """Note what each service does or waits for now."""
        servers, asked = self.engines.servers, LEDGER.clock()
        store = any(asked - one.since > STORE_SECONDS for one in LEDGER.in_flight())
        flow = Flow(self.engines.watchdog.registered(), store, servers.workers.backlog(), servers.states())
        now = time.monotonic()
        for name, service in self.services.items():
            self._seen.setdefault(name, Observations()).observe(self._state(flow, name, service), now)

    def _state(self, flow: Flow, name: str, service: Service | None) -> State:
        if name == FLOW:
            return flow_state(flow)
        if service is not None and not service.url:
            return State(waits_for="a machine" if service.handle.waiting() else "start")
        if service is not None and service.handle.exit_code() is not None:
            return State(waits_for="restart")
        for role, trainer in self.engines.trainers.items():
            if name in trainer.names:
                return trainer_state(replace(flow, works=self.engines.watchdog.registered(role)))
        url = service.url if service else name
        for workers in self.engines.servers.all_workers:
            if name in workers.names:
                return worker_state(replace(flow, backlog=workers.backlog()), url)
        first = self.engines.supervisor.services.get(server_of(name))  # of a server's services it alone answers
        return server_state(flow, first.url if first else url)

    def sample(self) -> list[Row]:
        """A row per service, for the time since the last sample."""
        queues, now, time_of_day = self._queues(), time.monotonic(), datetime.now(UTC).replace(tzinfo=None)
        shared = {"time": time_of_day, "owner": self.engines.run.owner, "seconds": now - self._sampled}
        self._sampled = now
        return [
            {
                **shared,
                "service": name,
                "restart": service.spec.restart if service else 0,
                **self._seen.setdefault(name, Observations()).row(now),
                **self._used(name, service),
                **queues.get(service.url if service else name, {}),
            }
            for name, service in self.services.items()
        ]

    def _queues(self) -> dict[str, Row]:
        """The columns of queues, by the service's address; those of the flow by its name."""
        servers, backlog = self.engines.servers, self.engines.servers.workers.backlog()
        recipe, at_once = self.engines.recipe, None
        if not isinstance(recipe, SftRecipe):  # samples in the embedded engine, requests in SGLang
            settings = recipe.inference
            at_once = settings.slots if settings.engine == "embedded" else settings.max_concurrent_requests
        found = {url: _queue(*queue, at_once) for url, queue in servers.queues().items()}
        for each in filter(None, (backlog, servers.evaluators.backlog())):
            for url in {*each.generating, *each.verifying, *each.held}:
                under_way = each.generating.get(url, 0) + each.verifying.get(url, 0)
                found[url] = _queue(under_way, each.held.get(url, 0), None)
        if backlog is not None:
            found[FLOW] = _queue(sum(backlog.generating.values()), backlog.spooled, backlog.room)
        return found

    def _used(self, name: str, service: Service | None) -> Row:
        """The columns of CPU, memory and GPUs; CPU time as the mean number of cores since the last sample."""
        if service is not None:
            usage = service.handle.usage()
        else:
            usage = measure(os.getpid(), descendants=False) if name == FLOW else None
        if usage is None:
            self._usages.pop(name, None)
            return {"host": ""}
        start = service.spec.restart if service else 0
        known, before = self._usages.get(name, (start, None))
        self._usages[name] = (start, usage)
        columns = usage.model_dump(include={"host", "cores", "memory", "gpu", "gpu_memory"})
        return columns | {"cpu": cores_used(before, usage) if known == start else None}


def _queue(running: int, waiting: int | None, at_once: int | None) -> Row:
    return {"running": running, "waiting": waiting, "at_once": at_once}


def cores_used(before: Usage | None, after: Usage) -> float | None:
    """CPU seconds per second between two measurements of the same processes; None if that is not known."""
    if before is None or before.cpu_seconds is None or after.cpu_seconds is None or after.at <= before.at:
        return None
    return max(0.0, after.cpu_seconds - before.cpu_seconds) / (after.at - before.at)
