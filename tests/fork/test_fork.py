"""Forks: what comes before is shared, what follows is the child's own, and a kill at any instant changes no bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from stage_driver import digests, drive, finished, start_driver, store_in, tiny, tiny_evaluation, tiny_sft
from store_listing import listed

from areal_tasks.store.backend import Store
from areal_tasks.store.fork import Origin, find_reference, inherit_model, read_fork, write_reference
from areal_tasks.store.history.audit import audit
from areal_tasks.store.history.journal import read_log
from areal_tasks.store.opening import open_run
from areal_tasks.store.query import run_sql
from areal_tasks.store.run_list import RunSummary, list_runs
from areal_tasks.store.runs import load_run
from schemas.errors import UserError

AT = 1
ORIGIN = Origin("whole", AT)
#: Everything that an optimizer or a loss reads is another from here on.
OTHER: dict[str, dict[str, Any]] = {
    "algorithm": {"minibatches": 4, "kl": "loss", "kl_coef": 0.5, "clip_ratio": 0.1},
    "trainer": {"lr": 3e-3, "weight_decay": 0.1, "beta1": 0.5, "beta2": 0.9, "max_grad_norm": 0.01},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose store holds the run `whole`, and `other`, its fork with other settings."""
    folder = tmp_path_factory.mktemp("whole")
    finished(folder, "whole", tiny())
    drive(folder, "other", tiny(**OTHER), origin=ORIGIN)
    return folder


@pytest.fixture
def store(whole: Path) -> Store:
    return store_in(whole)


def test_an_unchanged_fork_repeats_its_parent_to_the_bit(whole: Path, store: Store) -> None:
    before = set(listed(store, "whole"))
    child = drive(whole, "same", tiny(), origin=ORIGIN)
    assert digests(whole, "same") == digests(whole, "whole")
    assert [child.commit(k).run for k in range(3)] == ["whole", "same", "same"]
    assert {path.split("/")[1] for path in set(listed(store, "whole")) - before} == {"references", "log"}
    own = listed(store, "same")
    assert not [
        path for path in own if "iteration=000000" in path or "stage=prompts" in path or "version=000000" in path
    ]


def test_a_changed_fork_goes_its_own_way_from_where_its_parent_stood(whole: Path, tmp_path: Path) -> None:
    """Its trainer is brought there by its parent's recipe: whether a checkpoint spares that makes no difference."""
    finished(tmp_path, "whole", tiny(trainer={"recover_within_seconds": 1e-6}))
    drive(tmp_path, "other", tiny(**OTHER), origin=ORIGIN)
    found = digests(whole, "other")
    assert digests(tmp_path, "other") == found
    assert found[:AT] == digests(whole, "whole")[:AT]
    changed, original = dict(found[AT]), dict(digests(whole, "whole")[AT])
    assert changed["rollout"] == original["rollout"] and changed["weights"] != original["weights"]


def test_killed_at_any_write_a_fork_goes_on_to_the_same_bits(whole: Path, tmp_path: Path) -> None:
    finished(tmp_path, "whole", tiny())
    instants = [random.randint(1, 5), random.randint(1, 45)]
    for instant in instants:
        start_driver(tmp_path, "other", tiny(**OTHER), instant, ORIGIN).join()
    drive(tmp_path, "other", tiny(**OTHER), origin=ORIGIN)
    assert digests(tmp_path, "other") == digests(whole, "other"), f"killed at the writes {instants}"


def test_a_fork_of_a_fork_at_its_end_and_the_weights_it_makes(whole: Path) -> None:
    longer = tiny(**OTHER, schedule={"iterations": 4})
    drive(whole, "grandchild", longer, origin=Origin("other", 3))
    drive(whole, "grandchild", longer)  # who continues it need not say where it comes from
    assert digests(whole, "grandchild")[:2] == digests(whole, "other")[:2]
    assert [load_run(store_in(whole), "grandchild").commit(k).run for k in range(4)] == [
        "whole",
        "other",
        "other",
        "grandchild",
    ]
    drive(whole, "evaluated", tiny_evaluation("run://grandchild"))
    reference = find_reference(store_in(whole), "grandchild", "evaluated")
    assert reference is not None and (reference.kind, reference.iteration) == ("weights", 4)
    query = "SELECT completion FROM evaluate {} ORDER BY sample_id"
    own = run_sql(store_in(whole), "grandchild", query.format("WHERE weights_version = 4")).to_pylist()
    assert run_sql(store_in(whole), "evaluated", query.format("")).to_pylist() == own


def test_a_fork_of_a_fork_from_before_its_parent_began_is_sound(whole: Path, store: Store) -> None:
    """Its history leaves that of its grandparent before its parent's history does."""
    drive(whole, "earlier", tiny(), origin=Origin("other", AT - 1))
    report = audit(store, "earlier")
    assert report.defects == () and report.iterations == 3


def test_what_lists_and_logs_say_of_a_fork(store: Store) -> None:
    [summary] = [s for s in list_runs(store) if s.name == "other"]
    assert summary == RunSummary(
        "other", "rlhf", summary.created, 3, 3, kind="fork", parent="whole", forked_at=AT, counterfactual=False
    )
    for name in ("whole", "other"):
        told = [line.details for line in read_log(store, name) if line.action == "forked"]
        assert {"parent": "whole", "child": "other", "at": AT} in told


def test_a_query_sees_the_parents_iterations(store: Store) -> None:
    query = (
        "SELECT iteration, count(*) AS n, any_value(commits.run) AS made_by FROM samples JOIN commits USING (iteration)"
    )
    rows = run_sql(store, "other", f"{query} GROUP BY ALL ORDER BY 1").to_pylist()
    assert [tuple(row.values()) for row in rows] == [(0, 16, "whole"), (1, 16, "other"), (2, 16, "other")]


def test_supervised_fine_tuning_forks_too(tmp_path: Path) -> None:
    finished(tmp_path, "whole", tiny_sft())
    drive(tmp_path, "same", tiny_sft(), origin=Origin("whole", 2))
    assert digests(tmp_path, "same") == digests(tmp_path, "whole")


@pytest.mark.slow("several runs with an SFT before them")
def test_a_fork_at_0_begins_with_its_parents_weights_whatever_became_of_their_source(tmp_path: Path) -> None:
    drive(tmp_path, "source", tiny(schedule={"iterations": 1}))
    recipe = tiny(model={"path": "run://source", "scratch": None}, schedule={"iterations": 2})
    drive(tmp_path, "whole", recipe)
    drive(tmp_path, "source", tiny(schedule={"iterations": 2}))
    drive(tmp_path, "same", recipe, origin=Origin("whole", 0))
    drive(tmp_path, "same-again", recipe, origin=Origin("same", 0))
    assert digests(tmp_path, "same") == digests(tmp_path, "same-again") == digests(tmp_path, "whole")
    assert not [path for path in listed(store_in(tmp_path), "same") if "stage=initialise" in path]
    assert audit(store_in(tmp_path), "same").sound
    drive(tmp_path, "afresh", recipe)
    assert dict(digests(tmp_path, "afresh")[0])["initialise"] != dict(digests(tmp_path, "same")[0])["initialise"]


def test_a_fork_at_0_of_a_run_that_has_committed_nothing_makes_its_own_beginning(tmp_path: Path) -> None:
    open_run(store_in(tmp_path), "empty", tiny())
    child = drive(tmp_path, "child", tiny(schedule={"iterations": 1}), origin=Origin("empty", 0))
    assert {ref.path.split("/")[0] for ref in child.commit(0).stages} == {"child"}


def test_another_seed_generates_otherwise_and_begins_with_the_parents_weights(whole: Path, tmp_path: Path) -> None:
    finished(tmp_path, "whole", tiny())
    drive(tmp_path, "seed", tiny(seed=2), origin=ORIGIN)
    there, here = (dict(digests(tmp_path, name)[AT]) for name in ("whole", "seed"))
    assert here["initialise"] == there["initialise"] and here["rollout"] != there["rollout"]


@pytest.mark.parametrize(
    ("name", "origin", "message"),
    [
        ("new", Origin("whole", 4), r"'whole' has committed 3 iterations: fork it at 0 to 3, not at 4"),
        ("new", Origin("gone", 1), r"There is no run 'gone'"),
        ("other", Origin("whole", 2), r"'other' exists and is a fork of 'whole' at iteration 1, not a fork of .* 2"),
        ("whole", Origin("other", 2), r"'whole' exists and is no derived run, not a fork of 'other'"),
    ],
)
def test_forks_that_cannot_be(store: Store, name: str, origin: Origin, message: str) -> None:
    before = listed(store, "")
    with pytest.raises(UserError, match=message):
        open_run(store, name, tiny(), origin=origin)
    assert listed(store, "") == before


def test_a_child_cannot_begin_with_other_weights(store: Store) -> None:
    parent = load_run(store, "whole")
    with pytest.raises(UserError, match=r"model.path, model.scratch: a derived run begins .* its parent 'whole'"):
        inherit_model(parent, AT, tiny(model={"scratch": None, "path": "run://other"}))
    with pytest.raises(UserError, match="belongs to the flow 'rlhf', not 'sft'"):
        inherit_model(parent, AT, tiny_sft())


def test_a_reference_left_by_a_child_that_never_began(store: Store) -> None:
    assert write_reference(store, "whole", "unborn", 1, "fork").iteration == 1
    assert write_reference(store, "whole", "unborn", 0, "fork").iteration == 1
    with pytest.raises(UserError, match="keeps only the iterations before 1 for a derived run 'unborn'"):
        write_reference(store, "whole", "unborn", 2, "fork")


@pytest.mark.parametrize("text", ["whole", "whole@", "@3", "whole@-1", "whole@x"])
def test_what_names_no_fork(text: str) -> None:
    with pytest.raises(UserError, match="should look like PARENT@ITERATION"):
        read_fork(text)
