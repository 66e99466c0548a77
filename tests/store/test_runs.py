"""Runs: segments, owners, the chain of commits, forks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_builders import build, iteration_commit, recipe

from areal_tasks.store import opening, paths
from areal_tasks.store.backend import Store, StoreError, Unavailable
from areal_tasks.store.commit import append_record, last_present
from areal_tasks.store.fork import Origin
from areal_tasks.store.opening import StoredRun, open_run, read_stored_run
from areal_tasks.store.run_list import list_runs
from areal_tasks.store.runs import HeadMoved, Run, Superseded, load_run
from schemas.errors import UserError
from schemas.manifest import OwnerRecord
from schemas.recipe.load import load_recipe


def opened(store: Store, *overrides: str, name: str = "run") -> Run:
    return open_run(store, name, recipe(*overrides))


@given(st.integers(0, 70), st.integers(0, 5))
def test_the_last_of_a_sequence_is_found_in_logarithmic_time(n: int, first: int) -> None:
    asked: list[int] = []
    assert last_present(lambda k: bool(asked.append(k)) or first <= k < first + n, first) == first + n - 1
    assert len(asked) <= 2 * (n + 1).bit_length() + 1


def test_a_new_run_and_its_commits(store: Store) -> None:
    run = opened(store)
    assert (run.owner, run.head(), run.record.flow, run.record.seed) == (1, None, "rlhf", recipe().seed)
    build(run, range(3), {})
    head = run.head()
    assert head is not None and head.iteration == 2
    assert head.previous == hashlib.sha256(store.read(paths.iteration_commit("run", 1))).hexdigest()
    assert run.commit(0).previous == hashlib.sha256(store.read("run/run.json")).hexdigest()


def test_the_head_is_found_without_listing(local_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run = opened(local_store)
    build(run, range(40), {})
    asked: list[str] = []
    backend = type(local_store)
    size = backend.size
    monkeypatch.setattr(backend, "size", lambda self, path: asked.append(path) or size(self, path))
    for listing in ("arrow", "children"):
        monkeypatch.delattr(backend, listing)
    head = run.head()
    assert head is not None and head.iteration == 39 and len(asked) <= 13


def test_a_start_asks_for_each_record_once(local_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    build(opened(local_store), range(40), {})
    asked: dict[str, list[str]] = {"size": [], "read": []}
    backend = type(local_store)
    for name, paths_asked in asked.items():
        ask = getattr(backend, name)
        monkeypatch.setattr(
            backend, name, lambda self, path, ask=ask, into=paths_asked: into.append(path) or ask(self, path)
        )
    stored = read_stored_run(local_store, "run")
    assert len(asked["read"]) == len(set(asked["read"])) == 6 and len(asked["size"]) <= 28
    head = open_run(local_store, "run", recipe(), stored=stored).head()
    assert head is not None and head.iteration == 39
    assert len(asked["read"]) <= 8 and len(asked["size"]) <= 29, "only what may have been written since"


def test_a_run_opened_again_continues(store: Store) -> None:
    build(opened(store), range(2), {})
    again = opened(store, "launcher.startup_seconds=99")  # operational: the same recipe
    assert again.owner == 2 and len(again.segments) == 1
    head = again.head()
    assert head is not None and head.iteration == 1


def test_more_iterations_are_a_new_segment(local_store: Store) -> None:
    build(opened(local_store, "schedule.iterations=5"), range(2), {})
    longer = opened(local_store, "schedule.iterations=9")
    assert [(s.n, s.from_iteration) for s in longer.segments] == [(0, 0), (1, 2)]
    assert longer.recipe_at(1)["schedule"]["iterations"] == 5
    assert longer.recipe_at(2)["schedule"]["iterations"] == longer.recipe_at(7)["schedule"]["iterations"] == 9
    assert len(opened(local_store, "schedule.iterations=9").segments) == 2


def test_a_child_of_a_name_that_another_start_has_taken_meanwhile_is_refused(local_store: Store) -> None:
    build(open_run(local_store, "parent", recipe()), range(2))
    stored = read_stored_run(local_store, "child", Origin("parent", 1))
    open_run(local_store, "child", recipe())
    with pytest.raises(UserError, match=r"'child' exists and is no derived run, not a fork of 'parent' at iteration 1"):
        open_run(local_store, "child", recipe(), stored=stored)
    assert not local_store.exists(paths.owner("child", 2)), "the other start is not fenced off"


@pytest.mark.parametrize(
    ("overrides", "fields"),
    [
        (["rollout.temperature=0.9"], ["rollout.temperature is 1.0 in the run and 0.9 here"]),
        (["seed=7", "rollout.groups=16"], ["seed is", "rollout.groups is 32 in the run and 16 here"]),
        (["schedule.iterations=1"], ["schedule.iterations is"]),
        (["schedule.iterations=9999", "rollout.groups=16"], ["schedule.iterations is", "rollout.groups is"]),
    ],
)
def test_another_recipe_is_refused_by_name(local_store: Store, overrides: list[str], fields: list[str]) -> None:
    run = opened(local_store)
    with pytest.raises(UserError) as error:
        opened(local_store, *overrides)
    assert all(text in str(error.value) for text in [*fields, "run=NAME", "own values to continue it"])
    assert run.is_current_owner() and len(load_run(local_store, "run").segments) == 1  # the running one goes on


def test_another_flow_is_refused(local_store: Store) -> None:
    opened(local_store)
    with pytest.raises(UserError, match="belongs to the flow 'rlhf', not 'sft'"):
        open_run(local_store, "run", load_recipe("quickstart-sft"))


@pytest.mark.parametrize("name", ["", "Run", "a/b", "../x", ".hidden", "a b"])
def test_names_that_are_no_names(local_store: Store, name: str) -> None:
    for use in (lambda: opened(local_store, name=name), lambda: load_run(local_store, name)):
        with pytest.raises(UserError, match="cannot name a run"):
            use()


def test_an_unknown_run_is_refused_with_those_there_are(local_store: Store) -> None:
    opened(local_store, name="one")
    with pytest.raises(UserError, match=r"no run 'two'.*Runs there: one\."):
        load_run(local_store, "two")


def test_a_lower_owner_is_refused(store: Store) -> None:
    old = opened(store)
    build(old, [0], {})
    commit = iteration_commit(old, 1)
    new = opened(store)
    assert (old.is_current_owner(), new.is_current_owner()) == (False, True)
    with pytest.raises(Superseded, match="owner 1 is no longer the last"):
        old.commit_iteration(commit)
    build(new, [1], {})
    assert new.commit(1).provenance.owner == 2


def test_an_owner_overtaken_between_check_and_commit_learns_of_it(
    local_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = opened(local_store)
    mine = iteration_commit(old, 0)

    def overtake(run: Run) -> None:
        monkeypatch.undo()
        build(opened(local_store), [0], {})

    monkeypatch.setattr(Run, "check_owner", overtake)
    with pytest.raises(Superseded, match="owner 2 has committed iteration 0"):
        old.commit_iteration(mine)


def test_a_start_that_finds_the_last_commit_of_the_one_before_goes_on_from_there(
    local_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = opened(local_store), opened(local_store)
    theirs, mine = iteration_commit(old, 0), iteration_commit(new, 0)
    with monkeypatch.context() as patch:
        patch.setattr(Run, "check_owner", lambda run: None)  # the old one looked before the new one claimed
        old.commit_iteration(theirs)
    with pytest.raises(HeadMoved, match="Iteration 0 of run 'run' was committed by an earlier start"):
        new.commit_iteration(mine)
    assert new.commit(0).attempt == theirs.attempt
    build(opened(local_store), [1], {})


def test_a_process_that_starts_a_run_once_more_leaves_it_to_one_that_has_started_it_meanwhile(
    local_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if both have the same host name and process number, as containers may."""
    mine = set[str]()

    def unanswered(*arguments: Any) -> OwnerRecord:
        append_record(*arguments)
        raise Unavailable("the answer is lost")

    assert reopened(local_store, mine).owner == 1
    with monkeypatch.context() as patch, pytest.raises(Unavailable):
        patch.setattr(opening, "append_record", unanswered)
        reopened(local_store, mine)
    assert reopened(local_store, mine).owner == 3, "the second was its own"
    late = read_stored_run(local_store, "run")
    assert opened(local_store).owner == 4, "a start that takes the run over, as a user asks for"
    for stored in (late, None):
        with pytest.raises(Superseded, match=r"'run' has been started again since \(owner 4 is a process of"):
            reopened(local_store, mine, stored)


def reopened(store: Store, claims: set[str], stored: StoredRun | None = None) -> Run:
    return open_run(store, "run", recipe(), claims=claims, stored=stored)


def test_a_reader_owns_nothing(local_store: Store) -> None:
    run = opened(local_store)
    with pytest.raises(Superseded):
        load_run(local_store, "run").commit_iteration(iteration_commit(run, 0))
    assert run.is_current_owner()


def test_a_commit_must_follow_the_one_before(local_store: Store) -> None:
    run = opened(local_store)
    build(run, range(2), {})
    stray = iteration_commit(run, 2).model_copy(update={"previous": "0" * 64})
    with pytest.raises(ValueError, match="does not name the commit before it"):
        run.commit_iteration(stray)


def test_a_commit_that_was_put_in_the_place_of_the_next_is_no_head_that_moved(local_store: Store) -> None:
    """Or the flow would begin again, and again. Before schema 5, the seal does not cover the path."""
    build(opened(local_store), range(2), {})
    run = opened(local_store)
    mine, copied = iteration_commit(run, 2), run.commit(1).model_copy(update={"schema_version": 4})
    local_store.put(path := paths.iteration_commit("run", 2), copied.encode(path))
    with pytest.raises(StoreError, match=rf"{path} is damaged: it, or what it follows, was replaced") as error:
        run.commit_iteration(mine)
    assert not isinstance(error.value, HeadMoved)


def test_a_repeated_commit_is_recognised(local_store: Store) -> None:
    run = opened(local_store)
    commit = iteration_commit(run, 0)
    assert run.commit_iteration(commit) == run.commit_iteration(commit) == commit


def test_a_fork_shares_what_came_before(store: Store) -> None:
    parent = opened(store, name="parent")
    build(parent, range(3), {"verify": ("verify",)})
    child = open_run(store, "child", recipe("rollout.temperature=0.9"), origin=Origin("parent", 2))
    head = child.head()
    assert head is not None and (head.run, head.iteration) == ("parent", 1)
    key = parent.commit(1).stages[0].key
    assert child.find_stage(1, "verify", key) == parent.find_stage(1, "verify", key) is not None
    assert child.find_stage(2, "verify", parent.commit(2).stages[0].key) is None
    build(child, [2], {"verify": ("verify",)})
    assert child.commit(2).run == "child"
    assert child.commit(2).previous == hashlib.sha256(store.read(paths.iteration_commit("parent", 1))).hexdigest()
    assert child.recipe_at(1)["rollout"]["temperature"] == 1.0 and child.recipe_at(2)["rollout"]["temperature"] == 0.9


def damage_run(root: Path) -> None:
    (root / "bad" / "run.json").write_text("{")


def damage_segment(root: Path) -> None:
    (root / "bad" / "segments" / "0.json").write_text("{")


@pytest.mark.parametrize("damage", [damage_run, damage_segment])
def test_the_list_of_runs(local_store: Store, damage: Callable[[Path], None]) -> None:
    for name in ("good", "bad"):
        build(opened(local_store, "schedule.iterations=7", name=name), range(2), {})
    local_store.put("no-run/file", b"")
    damage(Path(local_store.uri("")))
    bad, good = list_runs(local_store)
    assert (good.name, good.flow, good.iterations, good.planned, good.problem) == ("good", "rlhf", 2, 7, "")
    assert bad.name == "bad" and "is damaged" in bad.problem
    with pytest.raises(UserError, match="is damaged"):
        opened(local_store, name="bad")


def test_a_stage_manifest_changed_after_its_commit_is_named(local_store: Store) -> None:
    run = opened(local_store)
    build(run, [0], {"verify": ("verify",)})
    ref = run.commit(0).stages[0]
    path = Path(local_store.uri(ref.path))
    path.write_bytes(path.read_bytes().replace(b'"rows": 16', b'"rows": 17'))
    with pytest.raises(UserError, match=rf"{ref.key}\.json is damaged"):
        run.read_stage(ref)
