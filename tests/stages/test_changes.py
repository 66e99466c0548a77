"""Runs that `arealflow set` changes while they go on: what is in force when, and what the store has of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from stage_driver import (
    GROUPS,
    _die_at_write,
    drive,
    left_over,
    start_marked,
    store_in,
    tiny,
)
from waiting import wait_until

from areal_tasks.engines.session import Engines
from areal_tasks.engines.sharing import Serving
from areal_tasks.rollout.rollouts import Rollouts
from areal_tasks.rollout.settled import settled_after
from areal_tasks.stages.build import Built
from areal_tasks.stages.generation import Generation, groups_of, no_room
from areal_tasks.stages.jobs import Execute, Job, run_directly
from areal_tasks.stages.replay import replay_segments
from areal_tasks.store import paths
from areal_tasks.store.backend import Store
from areal_tasks.store.fork import Origin
from areal_tasks.store.history.audit import audit
from areal_tasks.store.history.journal import read_log
from areal_tasks.store.opening import open_run
from areal_tasks.store.query import run_sql
from areal_tasks.store.runs import Run, load_run
from areal_tasks.store.shards import read_table
from areal_tasks.store.spool import read_spool
from flows.cli.change import change, request
from schemas.errors import UserError
from schemas.recipe.recipe import Recipe, RlhfRecipe

OTHERS = pytest.mark.slow("another instant of the same kill: two whole runs")


def ahead(**changes: Any) -> Recipe:
    sections: dict[str, Any] = {
        "rollout": {"max_head_offpolicyness": 2},
        "schedule": {"iterations": 9},
        "algorithm": {"max_logprob_gap": 9.0},
    }
    return tiny(**{**sections, **{name: sections.get(name, {}) | value for name, value in changes.items()}})


def asking(name: str, at: dict[str, Sequence[str]], store: Callable[[], Store]) -> Execute:
    """Runs jobs; before those of these labels it asks for changes, once everything is generated that may be."""

    def execute(jobs: Sequence[Job]) -> list[Built]:
        for job in [job for job in jobs if job.label in at]:
            generation = job.context.generation
            if generation is not None and generation.tracker.rule.eta(0):
                wait_until(partial(all_ready, generation), "all that may begin")
            request(load_run(store(), name), at.pop(job.label))
        return run_directly(jobs)

    return execute


def all_ready(generation: Generation) -> bool:
    return generation.tracker.ready() > 0 and generation.tracker.ready() == generation.tracker.live()


def recipes(run: Run, iterations: int) -> list[RlhfRecipe]:
    return [RlhfRecipe.model_validate(run.recipe_at(k)) for k in range(iterations)]


def rollout_of(run: Run, k: int) -> Any:
    return run.read_stage(next(ref for ref in run.commit(k).stages if ref.stage == "rollout"))


def check(run: Run) -> None:
    """Every group was consumed once, by an iteration whose η allows it, or rejected with a reason that is recorded."""
    run = load_run(run.store, run.name)
    family = [run.name, *([run.parent.name] if run.parent else [])]
    records = [record for name in family for record in read_spool(run.store, name)]
    rejected = {group.index: group.reason for record in records for group in record.rejected}
    assert all(reason.startswith("stale: ") for reason in rejected.values())
    consumed: list[int] = []
    for k, recipe in enumerate(recipes(run, run.committed)):
        manifest = rollout_of(run, k)
        groups, rows = groups_of(run.store, manifest), read_table(run.store, manifest.tables["rollout"])
        assert len(groups) == recipe.rollout.groups and run.commit(k).segment == run.segment_at(k).n
        assert all(0 <= k - v <= recipe.rollout.max_head_offpolicyness for v in rows["version_min"].to_pylist())
        consumed += groups
    assert len(set(consumed)) == len(consumed)
    settled = settled_after(run.head())
    assert all(group in settled for group in consumed)
    assert all(group in consumed or group in rejected for group in range(settled.prefix))
    left = "SELECT group_id, version FROM spool WHERE state = 'waiting'"
    assert run.committed < (run.planned or 0) or run_sql(run.store, run.name, left).to_pylist() == []
    assert audit(run.store, run.name).sound


def test_eta_and_batch_change_while_the_run_goes_on(tmp_path: Path) -> None:
    at = {
        "train 0": ["rollout.max_head_offpolicyness=4", "rollout.pace=10"],
        "train 3": ["rollout.max_head_offpolicyness=1", "rollout.groups=2", "evaluation.every=3"],
    }
    run = drive(tmp_path, "r", ahead(), asking("r", dict(at), lambda: store_in(tmp_path)))
    run = load_run(run.store, "r")
    assert [(s.from_iteration, s.change and s.change.n) for s in run.segments] == [(0, None), (2, 1), (5, 2)]
    assert [r.rollout.max_head_offpolicyness for r in recipes(run, 9)] == [2, 2, 4, 4, 4, 1, 1, 1, 1]
    assert [len(groups_of(run.store, rollout_of(run, k))) for k in range(9)] == [GROUPS] * 5 + [2] * 4
    evaluated = [
        k
        for k in range(9)
        if any(r.stage == "evaluate" and r.path.startswith(f"r/iteration={k:06d}") for r in run.commit(k).stages)
    ]
    assert evaluated == [0, 2, 4, 6, 8]
    check(run)
    stale = [k for k in range(9) if rollout_of(run, k).metrics.get("rejected_stale")]
    assert stale == [5], "what had been generated ahead, when the groups of 4 were taken, no longer fits"
    asked = run_sql(run.store, "r", "SELECT change FROM segments ORDER BY segment")["change"].to_pylist()
    assert asked[0] is None and asked[1].startswith("rollout.max_head_offpolicyness=4, rollout.pace=10 (")
    changed = [line for line in read_log(run.store, "r") if line.action == "changed"]
    assert [line.details["from_iteration"] for line in changed] == [2, 5] and changed[0].details["rollout.pace"] == 10


def test_a_change_that_the_flow_refuses_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(engines: Engines, recipe: Recipe) -> None:
        if cast(RlhfRecipe, recipe).inference.servers > 1:
            raise UserError("no GPU is free for another server")

    monkeypatch.setattr(Engines, "check", full)
    twice = ["inference.servers=2"]  # a GPU may be free for it later
    at = {"train 0": twice, "train 1": twice, "train 2": ["rollout.pace=3"]}
    run = drive(tmp_path, "r", ahead(schedule={"iterations": 5}), asking("r", at, lambda: store_in(tmp_path)))
    assert [s.change and s.change.n for s in load_run(run.store, "r").segments] == [None, 3]
    change("r", store=run.store.url, as_json=True)
    changes = json.loads(capsys.readouterr().out)["changes"]
    assert [row["from iteration"] for row in changes] == [*["refused: no GPU is free for another server"] * 2, "4"]


def test_a_synchronous_run_changes_its_batch_and_stays_reproducible(tmp_path: Path) -> None:
    recipe = tiny(schedule={"iterations": 4})
    run = drive(tmp_path, "r", recipe, asking("r", {"train 0": ["rollout.groups=6"]}, lambda: store_in(tmp_path)))
    assert [len(groups_of(run.store, rollout_of(run, k))) for k in range(4)] == [GROUPS, GROUPS, 6, 6]
    check(run)


@pytest.mark.slow("several starts; changes of running runs are in `make test`")
def test_a_change_of_a_run_that_is_not_running_is_in_force_from_its_next_start_on(tmp_path: Path) -> None:
    drive(tmp_path, "r", ahead(schedule={"iterations": 2}))
    with pytest.raises(UserError, match="no iteration left"):
        change("r", ["rollout.pace=3"], (tmp_path / "store").as_uri())
    request(load_run(store_in(tmp_path), "r"), ["rollout.pace=3", "rollout.groups=2"])
    run = load_run(drive(tmp_path, "r", ahead(schedule={"iterations": 5})).store, "r")
    assert [s.from_iteration for s in run.segments] == [0, 2, 2]
    assert [len(groups_of(run.store, rollout_of(run, k))) for k in range(5)] == [4, 4, 2, 2, 2]
    again = load_run(drive(tmp_path, "r", ahead(schedule={"iterations": 6}, rollout={"pace": 7})).store, "r")
    assert again.recipe_at(5)["rollout"]["pace"] == 3, "what was set stays so, whatever the recipe says"
    check(again)


def test_servers_and_workers_join_and_leave_a_run_that_goes_on(tmp_path: Path) -> None:
    """Each change is in force an iteration later than it is seen; the services are counted once they are ready."""
    seen: dict[str, tuple[int, int]] = {}
    at = {
        "train 0": ["inference.servers=2", "rollout.workers=2", "inference.max_concurrent_requests=2"],
        "train 4": ["inference.servers=1", "rollout.workers=1"],
        "train 8": ["inference.servers=3", "rollout.workers=3"],
    }
    ask = asking("r", at, lambda: store_in(tmp_path))

    def execute(jobs: Sequence[Job]) -> list[Built]:
        label, engines = jobs[0].label, jobs[0].context.engines
        if label in ("train 3", "train 7", "train 11"):
            wanted = {"train 3": 2, "train 7": 1, "train 11": 3}[label]
            wait_until(lambda: services(engines) == (wanted, wanted), "all have joined or left")
            seen[label] = services(engines)
            assert at_once(engines) == {2}
        return ask(jobs)

    apart = {"groups_per_request": 1}  # so that a worker's groups, which begin together, do so on several servers
    run = drive(tmp_path, "r", ahead(schedule={"iterations": 18}, inference=apart), execute)
    assert seen == {"train 3": (2, 2), "train 7": (1, 1), "train 11": (3, 3)}
    check(run)
    servers = {
        when: set(run_sql(run.store, "r", f"SELECT server FROM samples WHERE iteration {when} 0")["server"].to_pylist())
        for when in ("=", ">")
    }
    assert servers[">"] - servers["="], "those that joined generate"


def at_once(engines: Engines) -> set[int]:
    """How many requests the flow, and its workers, may have in flight on a server."""
    client, manager = engines.servers.inference(waits=False), cast(Rollouts, engines.servers.workers._manager)
    return {client.serving.requests, *(cast(Serving, link._serving).requests for link in manager.links.ready())}


def services(engines: Engines) -> tuple[int, int]:
    """Servers that may generate, and workers that get groups."""
    client, manager = engines.servers.inference(waits=False), engines.servers.workers._manager
    links = cast(Rollouts, manager).links
    return sum(server.may_generate for server in client.servers), len(links.ready()) if len(links.by_start) == len(
        links.ready()
    ) else -1


def test_the_trainer_is_resized_at_a_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is retrained: the other number of ranks loads what the one before has written last."""
    trainer = {"backend": "fsdp2", "recover_within_seconds": 3600.0}
    recipe = ahead(trainer=trainer, schedule={"iterations": 6}, launcher={"type": "local"})
    at = {"train 0": ["trainer.ranks=2"], "train 3": ["trainer.ranks=1"]}
    ask = asking("r", at, lambda: store_in(tmp_path))
    with caplog.at_level("INFO", "areal_tasks"):
        run = drive(tmp_path, "r", recipe, ask)
    check(run)
    assert [run.commit(k).checkpoint and run.commit(k).checkpoint.version for k in range(6)] == [None, 2, 2, 2, 5, 5]
    assert not [line for line in caplog.messages if line.startswith("retrained")]


def die(folder: Path, recipe: Recipe, fields: Sequence[str], number: int) -> None:
    """`drive`, killed at so many writes to the store after the change was asked for."""

    def execute(jobs: Sequence[Job]) -> list[Built]:
        if any(job.label == "train 1" for job in jobs):
            request(load_run(store_in(folder), "r"), fields)
            _die_at_write(number)
        return run_directly(jobs)

    drive(folder, "r", recipe, execute)


@pytest.mark.parametrize("number", [4, *(pytest.param(n, marks=OTHERS) for n in (1, 2, 3, 5, 6, 7, 8, 9, 12, 20, 33))])
def test_a_killed_flow_goes_on_with_the_change(tmp_path: Path, number: int) -> None:
    recipe = ahead(rollout={"flush_seconds": 0.0})
    fields = ["rollout.max_head_offpolicyness=1", "rollout.groups=2"]
    start_marked(tmp_path, die, tmp_path, recipe, fields, number).wait()
    wait_until(lambda: not left_over(tmp_path))
    run = load_run(drive(tmp_path, "r", recipe).store, "r")
    assert [s.change.n for s in run.segments if s.change] == [1]
    assert 1 <= run.segments[-1].from_iteration <= 3 and run.committed == 9
    check(run)


def test_what_waits_and_no_longer_fits_when_the_run_goes_on_is_recorded(tmp_path: Path) -> None:
    """The change was asked for while no flow ran, and the spool had groups of each iteration that η allowed.

    They count once, although the start that rejects them ends before the commit, and the next one uses its rollout.
    """
    ends = ["train 1", "train 1"]

    def execute(jobs: Sequence[Job]) -> list[Built]:
        if jobs[0].label == ends[0] and (generation := jobs[0].context.generation) is not None:
            wait_until(partial(all_ready, generation), "all that may begin")
            del ends[0]
            raise UserError("ends here")
        return run_directly(jobs)

    recipe = ahead(rollout={"max_head_offpolicyness": 3}, schedule={"iterations": 6})
    with pytest.raises(UserError, match="ends here"):
        drive(tmp_path, "r", recipe, execute)
    waiting = "SELECT count(*) AS n FROM spool WHERE state = 'waiting'"
    [before] = run_sql(store_in(tmp_path), "r", waiting)["n"].to_pylist()
    request(load_run(store_in(tmp_path), "r"), ["rollout.max_head_offpolicyness=1", "rollout.groups=2"])
    with pytest.raises(UserError, match="ends here"):
        drive(tmp_path, "r", recipe, execute)
    run = load_run(drive(tmp_path, "r", recipe).store, "r")
    first, reason = run.segments[-1].from_iteration, "SELECT reason FROM spool WHERE state = 'rejected'"
    reasons = run_sql(run.store, "r", reason)["reason"].to_pylist()
    assert set(reasons) == {f"stale: {no_room(first)}"} and before - 4 <= len(reasons) < before
    assert [rollout_of(run, k).metrics.get("rejected_stale", 0) for k in range(6)] == [0, len(reasons), 0, 0, 0, 0]
    check(run)


@pytest.mark.slow("four runs; a fork and a replay of other runs are in `make test`")
def test_children_of_a_changed_run(tmp_path: Path) -> None:
    """A fork begins with what is in force there, and a replay has each recipe in turn."""
    ask = asking("r", {"train 0": ["rollout.groups=2"]}, lambda: store_in(tmp_path))
    parent = drive(tmp_path, "r", ahead(schedule={"iterations": 5}), ask)
    fork = ahead(schedule={"iterations": 6}, rollout={"groups": 2})
    check(drive(tmp_path, "fork", fork, origin=Origin("r", 4)))
    origin = Origin("r", 0, "replay", True, "advantage")
    asked = replay_segments(load_run(parent.store, "r"), origin, "again", ["algorithm.clip_ratio=0.1"])
    drive(tmp_path, "again", asked[-1][1], run_directly, origin, asked)
    again = load_run(parent.store, "again")
    assert [len(groups_of(again.store, rollout_of(again, k))) for k in range(5)] == [4, 4, 2, 2, 2]
    assert [s.from_iteration for s in again.segments] == [0, 2]
    assert audit(parent.store, "again").sound


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (["rollout.temperature=0.5"], "rollout.temperature: decides what a group contains"),
        (["trainer.lr=1e-5"], "trainer.lr: changes what is computed from the same groups"),
        (["rollout.flush_seconds=1"], "rollout.flush_seconds: is read when a run starts"),
        (["trainer.ranks=2"], "trainer.ranks: needs a trainer of several processes"),
        (["rollout.max_head_offpolicyness=0"], "cannot change between 0 and more"),
        (["evaluation.every=0"], "evaluation.every: cannot change between 0 and more"),
        (["schedule.iterations=9"], "resume the run with more"),
        (["rollout.groups=3"], "algorithm.minibatches"),
        (["rollout.grups=3"], "did you mean 'groups'"),
        (["rollout.groups=4"], "nothing changes"),
    ],
)
def test_what_cannot_change_is_refused_with_the_reason(tmp_path: Path, fields: list[str], why: str) -> None:
    recipe = ahead(schedule={"iterations": 3}, algorithm={"minibatches": 8})
    run = open_run(store_in(tmp_path), "r", recipe)
    with pytest.raises(UserError, match=why):
        request(run, fields)
    assert not run.store.exists(paths.change("r", 1))
