"""What gc, audit, SQL and a fork make of a run's spool."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from store_builders import commit_stage, iteration_commit, manifest, recipe, table

from areal_tasks.engines.servers import Servers
from areal_tasks.rollout.group_tracker import GroupTracker
from areal_tasks.rollout.made_with import made_with
from areal_tasks.rollout.orders import Failed
from areal_tasks.rollout.rollouts import Rollouts
from areal_tasks.rollout.settled import settled_after
from areal_tasks.rollout.spooling import Spool, Writer
from areal_tasks.rollout.staleness import Staleness
from areal_tasks.stages.generation import Generation
from areal_tasks.store import paths
from areal_tasks.store.backend import Store
from areal_tasks.store.commit import new_attempt
from areal_tasks.store.fork import Origin
from areal_tasks.store.history.audit import audit
from areal_tasks.store.history.journal import append_log as log
from areal_tasks.store.objects.inventory import entries
from areal_tasks.store.opening import open_run
from areal_tasks.store.query import run_sql
from areal_tasks.store.retention.gc import RetentionRule, plan_removals
from areal_tasks.store.retention.gc_remove import plan_run_removal, remove_planned, remove_run
from areal_tasks.store.runs import Run
from areal_tasks.store.shards import write_table
from areal_tasks.store.spool import append_groups, close_start, open_start, read_spool
from schemas.manifest import RejectedGroup, SpooledGroup
from schemas.recipe.recipe import RlhfRecipe
from schemas.tables import ROLLOUT

AT_ONCE = RetentionRule(older_than=0.0)


def rows(*groups: int) -> pa.Table:
    """Two samples of each group."""
    whole = table("rollout", 2 * len(groups))
    ids = pa.array([group for group in groups for _ in range(2)], pa.int64())
    return whole.set_column(ROLLOUT.get_field_index("group_id"), ROLLOUT.field("group_id"), ids)


def spool(store: Store, start: int, n: int, *groups: int, version: int = 0, rejected: tuple[int, ...] = ()) -> str:
    """Record `n` of a start of the run `run`; the folder of its shards."""
    prefix = paths.spool_attempt("run", start, attempt := new_attempt())
    append_groups(
        store,
        "run",
        start,
        n,
        1,
        attempt=attempt,
        finished=tuple(SpooledGroup(index=i, version=version, samples=2, tokens=8) for i in groups),
        rejected=tuple(RejectedGroup(index=i, reason="failed: it") for i in rejected),
        tables={"rollout": write_table(store, prefix, "rollout", rows(*groups))} if groups else {},
    )
    return prefix


def commit(run: Run, k: int, taken: tuple[int, ...], prefix: int, *beyond: int) -> None:
    """Iteration `k` trains on `taken`, and counts these groups as settled."""
    ref = commit_stage(run.store, manifest(run.store, run.name, k, "rollout", {"rollout": rows(*taken)}))
    state = {"next_group": prefix, "settled": list(beyond), "spool": [0, 1]}
    run.commit_iteration(iteration_commit(run, k, [ref]).model_copy(update={"state": state}))


@pytest.fixture
def run(local_store: Store) -> Run:
    """0 and 1 were consumed from memory, 2 was rejected, 3 and 4 consumed from the spool; 5 and 6 wait."""
    made = open_run(local_store, "run", recipe())
    start = open_start(local_store, "run", 1, "made")
    spool(local_store, start, 1, 3, 4)
    spool(local_store, start, 2, 5, 3, version=1, rejected=(2,))
    spool(local_store, start, 3, 6, version=1)
    commit(made, 0, (0, 1), 2)
    commit(made, 1, (3, 4), 5)
    return made


def attempts(store: Store) -> set[str]:
    return {e.path.rsplit("/", 1)[0] for e in entries(store, "run/spool") if "/attempt=" in e.path}


def defects(store: Store, name: str = "run") -> dict[str, str]:
    return {defect.path: defect.what for defect in audit(store, name).defects}


# ── gc ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_gc_removes_rows_that_are_settled_and_nothing_else(run: Run) -> None:
    before = read_spool(run.store, "run")
    assert plan_removals(run.store, RetentionRule(older_than=3600.0)) == []
    [item] = plan_removals(run.store, AT_ONCE)
    assert (item.kind, item.path) == ("spool", paths.spool_attempt("run", 0, before[1].attempt))
    assert remove_planned(run.store, [item], AT_ONCE) == [item]
    assert read_spool(run.store, "run") == before
    assert attempts(run.store) == {paths.spool_attempt("run", 0, record.attempt) for record in before[2:]}
    assert defects(run.store) == {} and plan_removals(run.store, AT_ONCE) == []


def test_rows_that_were_never_recorded_go_once_their_writer_has_ended(run: Run) -> None:
    run.store.put("run/spool/0/attempt=dead/rollout-00000.parquet", b"lost")
    assert [item.kind for item in plan_removals(run.store, AT_ONCE)] == ["spool"], "the run may be at work"
    log(run.store, "run", "finished", {"owner": 1})
    found = [item for item in plan_removals(run.store, AT_ONCE) if item.kind == "attempt"]
    assert [item.path for item in found] == ["run/spool/0/attempt=dead"]
    append_groups(run.store, "run", 0, 4, 1, attempt="dead")  # its writer was believed dead
    assert remove_planned(run.store, found, AT_ONCE) == []


def test_a_run_is_removed_with_its_spool(run: Run) -> None:
    log(run.store, "run", "finished", {"owner": 1})
    remove_run(run.store, plan_run_removal(run.store, "run", 0.0), 0.0)
    assert entries(run.store, "run/spool") == []


# ── audit ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_sound_spool_belongs_to_the_run(run: Run) -> None:
    close_start(run.store, "run", 0, 1)
    report = audit(run.store, "run")
    assert report.defects == () and report.unselected_files == 0
    assert report.files == len(entries(run.store, "run"))


def test_an_altered_or_missing_file_of_the_spool_is_named(run: Run) -> None:
    for entry in entries(run.store, "run/spool"):
        path = Path(run.store.uri(entry.path))
        whole = path.read_bytes()
        path.write_bytes(whole[:9] + bytes([whole[9] ^ 1]) + whole[10:])
        assert list(defects(run.store)) == [entry.path]
        path.unlink()
        settled = (
            "/attempt=" in entry.path
            and entry.path.startswith(paths.spool_attempt("run", 0, read_spool(run.store, "run")[1].attempt))
            if entry.path.endswith(".parquet")
            else entry.path.endswith("/3.json")
        )  # the last record: nothing follows it
        assert defects(run.store) == ({} if settled else {entry.path: "missing"})
        path.write_bytes(whole)


def test_records_after_the_end_of_a_start_or_of_another_are_defects(run: Run) -> None:
    closed = close_start(run.store, "run", 0, 1)[-1]
    others = {"0/5": {"n": 5, "kind": "groups"}, "1/0": {"n": 0, "start": 1}, "2/0": {"n": 0, "kind": "opened"}}
    for name, update in others.items():
        run.store.put(path := f"run/spool/{name}.json", closed.model_copy(update=update).encode(path))
    assert defects(run.store) == {
        "run/spool/0/5.json": "comes after record 4, which has closed the start",
        "run/spool/1/0.json": "is of the kind 'closed', as record 0 of its start",
        "run/spool/2/0.json": "holds a record of start 0, not 2",
    }


def test_a_record_that_names_other_groups_than_its_shards_hold_is_a_defect(run: Run) -> None:
    last = read_spool(run.store, "run")[-1]
    lying = last.model_copy(update={"n": 4, "finished": (last.finished[0].model_copy(update={"index": 9}),)})
    run.store.put("run/spool/0/4.json", lying.encode("run/spool/0/4.json"))
    assert defects(run.store) == {"run/spool/0/4.json": "names these samples of groups: 2 of 9; its shards hold 2 of 6"}


@pytest.mark.parametrize(
    ("taken", "prefix", "beyond", "what"),
    [
        ((5, 6), 7, (), None),
        ((6,), 5, (6,), None),
        ((4, 5), 6, (), "trains on groups that were settled before: 4"),
        ((5, 6), 6, (), "does not count as settled groups that are: 6"),
        (
            (5, 6),
            7,
            (9,),
            "counts as settled groups that no iteration has trained on and the spool has not rejected: 9",
        ),
    ],
)
def test_settled_groups_are_computed_again(
    run: Run, taken: tuple[int, ...], prefix: int, beyond: tuple[int, ...], what: str | None
) -> None:
    commit(run, 2, taken, prefix, *beyond)
    assert defects(run.store) == ({paths.iteration_commit("run", 2): what} if what else {})


# ── SQL ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_sql_shows_what_waits_how_long_and_how_stale(run: Run) -> None:
    query = "SELECT group_id, state, version, lag, samples, reason, start, record FROM spool ORDER BY group_id"
    assert [tuple(row.values()) for row in run_sql(run.store, "run", query).to_pylist()] == [
        (2, "rejected", None, None, None, "failed: it", 0, 2),
        (3, "consumed", 1, None, 2, None, 0, 2),
        (4, "consumed", 0, None, 2, None, 0, 1),
        (5, "waiting", 1, 1, 2, None, 0, 2),
        (6, "waiting", 1, 1, 2, None, 0, 3),
    ]
    query = "SELECT count(*) AS n FROM spool WHERE waiting_seconds >= 0 AND written <= now()::TIMESTAMP"
    assert run_sql(run.store, "run", query).to_pylist() == [{"n": 2}]


def test_sql_says_which_groups_are_dropped_since_other_settings_made_them(local_store: Store) -> None:
    """As the next start of the run finds it."""
    run = open_run(local_store, "run", recipe())
    prompts = commit_stage(local_store, manifest(local_store, "run", 0, "prompts", {"prompts": table("prompts")}))
    made = made_with(cast(RlhfRecipe, recipe()), run.read_stage(prompts).tables["prompts"].digest, {})
    spool(local_store, open_start(local_store, "run", 1, "other"), 1, 0, 1, 2, rejected=(3,))
    spool(local_store, open_start(local_store, "run", 1, made), 1, 2, 4)
    query = "SELECT group_id, state, lag, waiting_seconds >= 0 AS waits, reason FROM spool ORDER BY group_id"
    states = [row["state"] for row in run_sql(local_store, "run", query).to_pylist()]
    assert states == ["waiting", "waiting", "waiting", "rejected", "waiting"], "nothing is committed: it is unknown"
    rollout = commit_stage(local_store, manifest(local_store, "run", 0, "rollout", {"rollout": rows(0)}))
    state = {"next_group": 1, "spool": [[0, 1]]}
    run.commit_iteration(iteration_commit(run, 0, [prompts, rollout]).model_copy(update={"state": state}))
    why = "made with other settings: it begins again"
    assert [tuple(row.values()) for row in run_sql(local_store, "run", query).to_pylist()] == [
        (0, "consumed", None, None, None),
        (1, "dropped", None, None, why),
        (2, "waiting", 1, True, None),
        (3, "dropped", None, None, why),
        (4, "waiting", 1, True, None),
    ]
    assert list(Spool(local_store, "run", 2, made).recover(settled_after(run.head()))[0]) == [2, 4]


def test_a_group_waits_that_was_also_made_with_other_settings(local_store: Store) -> None:
    """The settings were changed, and changed back: what the first start wrote is used again."""
    run = open_run(local_store, "run", recipe())
    prompts = commit_stage(local_store, manifest(local_store, "run", 0, "prompts", {"prompts": table("prompts")}))
    made = made_with(cast(RlhfRecipe, recipe()), run.read_stage(prompts).tables["prompts"].digest, {})
    spool(local_store, open_start(local_store, "run", 1, made), 1, 0, 1)
    spool(local_store, open_start(local_store, "run", 1, "other"), 1, 0, 1, 2)
    rollout = commit_stage(local_store, manifest(local_store, "run", 0, "rollout", {"rollout": rows(0)}))
    state = {"next_group": 1, "spool": [[0, 1]]}
    run.commit_iteration(iteration_commit(run, 0, [prompts, rollout]).model_copy(update={"state": state}))
    found = run_sql(local_store, "run", "SELECT group_id, state, start FROM spool ORDER BY group_id").to_pylist()
    assert [tuple(row.values()) for row in found] == [(0, "consumed", 1), (1, "waiting", 0), (2, "dropped", 1)]
    assert list(Spool(local_store, "run", 2, made).recover(settled_after(run.head()))[0]) == [1]


# ── children ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_fork_begins_with_its_parents_settled_groups_and_an_empty_spool(run: Run) -> None:
    child = open_run(run.store, "child", recipe(), origin=Origin("run", 2))
    head = child.head()
    generation = Generation(child, head, 9, lambda k: recipe(), cast(Servers, None))
    assert generation.tracker.settled == settled_after(head) and generation.tracker.settled.prefix == 5
    assert generation.state() == {"next_group": 5}
    assert Spool(child.store, child.name, child.owner, "made").recover(generation.tracker.settled) == ({}, [])
    assert run_sql(run.store, "child", "SELECT count(*) AS n FROM spool").to_pylist() == [{"n": 0}]
    commit(child, 2, (5, 6), 7)
    assert defects(run.store, "child") == {}
    commit(child, 3, (8, 9), 7, 8, 9, 11)
    assert "no iteration has trained on" in defects(run.store, "child")[paths.iteration_commit("child", 3)]


# ── rejections ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_rejection_is_recorded_before_a_commit_counts_it(local_store: Store) -> None:
    run = open_run(local_store, "run", recipe())
    limits = recipe("rollout.group_attempts=1").rollout  # type: ignore[union-attr]
    nothing: Any = None
    rollouts = Rollouts(
        GroupTracker(Staleness(lambda k: 0, 9, lambda k: 2), 0), nothing, nothing, nothing, limits,
        Spool(run.store, run.name, run.owner, "made"), Writer(run.store, run.name, run.owner, "made"),
    )  # fmt: skip
    generation = Generation(run, None, 9, lambda k: recipe(), cast(Servers, None))
    generation.tracker = rollouts.tracker
    generation._rollouts = rollouts

    async def reject_and_commit(loop: asyncio.AbstractEventLoop) -> dict[str, Any]:
        rollouts.tracker.lease(0)
        rollouts._fail(Failed(number=0, index=0, reason="RuntimeError: no", cause="workflow"))

        def call(work: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(work, loop).result()

        generation._servers = SimpleNamespace(call=call)  # type: ignore[assignment]
        return await asyncio.to_thread(generation.state)

    async def main() -> dict[str, Any]:
        return await reject_and_commit(asyncio.get_running_loop())

    assert asyncio.run(main()) == {"next_group": 1, "spool": [[0, 2]]}
    assert [group.reason for record in read_spool(run.store, "run") for group in record.rejected] == [
        "failed: RuntimeError: no"
    ]
