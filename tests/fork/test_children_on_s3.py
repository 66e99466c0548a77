"""Forks, replays, comparisons, audits and gc on a real S3 server: bitwise as on a local disk."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from replays import kept, replay
from s3_server import BUCKET, S3Server
from stage_driver import digests, digests_of, drive, finished, tiny
from store_listing import listed

from areal_tasks.store import paths
from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.fork import Origin
from areal_tasks.store.history.audit import audit
from areal_tasks.store.history.diff import diff_runs
from areal_tasks.store.history.diff_curves import compare_replay
from areal_tasks.store.history.journal import append_log
from areal_tasks.store.objects.inventory import entries
from areal_tasks.store.query import run_sql
from areal_tasks.store.retention.gc import RetentionRule, plan_removals
from areal_tasks.store.retention.gc_remove import plan_run_removal, remove_planned, remove_run
from areal_tasks.store.runs import Run, load_run
from areal_tasks.store.weights import find_weights
from schemas.errors import UserError
from schemas.manifest import WeightsRef

OFTEN = {"recover_within_seconds": 1e-6}  # a checkpoint after every iteration
LONG, AT = 3, 1
LR = "trainer.lr=0.003"
pytestmark = pytest.mark.slow("whole runs on S3; the same on a disk is in `make test`")
GREEDY = RetentionRule(keep_weights=1, keep_checkpoints=1, older_than=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For the logs of services."""
    return tmp_path_factory.mktemp("children")


@pytest.fixture(scope="module")
def store(s3: S3Server, folder: Path) -> Store:
    """A store on S3 that holds the run `whole`."""
    store = open_store(f"s3://{BUCKET}/{uuid.uuid4().hex[:8]}")
    ended(drive(folder, "whole", tiny(trainer=OFTEN, schedule={"iterations": LONG}), store=store))
    return store


def ended(run: Run) -> Run:
    """The run, whose log tells that its flow has ended."""
    append_log(run.store, run.name, "finished", {"owner": run.owner})
    return run


def made_by(run: Run, k: int) -> set[str]:
    return {ref.stage for ref in run.commit(k).stages if ref.path.startswith(f"{run.name}/")}


def check_sound(store: Store, *names: str) -> None:
    for name in names:
        report = audit(store, name)
        assert report.sound, report.defects
        assert report.unselected_files == 0 and len(report.root) == 64


def test_a_fork_on_s3_is_the_fork_on_disk(store: Store, folder: Path) -> None:
    """Same bits from the same recipes, whatever the store; what is shared is not copied."""
    changed = tiny(trainer={**OFTEN, "lr": 0.003}, schedule={"iterations": LONG})
    child = ended(drive(folder, "forked", changed, origin=Origin("whole", AT), store=store))
    finished(folder, "whole", tiny(trainer=OFTEN, schedule={"iterations": LONG}))
    drive(folder, "forked", changed, origin=Origin("whole", AT))
    for name in ("whole", "forked"):
        assert digests_of(store, name) == digests(folder, name)
    assert [child.commit(k).run for k in range(LONG)] == ["whole", "forked", "forked"]
    assert not [entry.path for entry in entries(store, "forked") if "iteration=000000" in entry.path]
    check_sound(store, "whole", "forked")
    assert audit(store, "whole").root != audit(store, "forked").root
    assert store.exists(paths.reference("whole", "forked"))
    found = diff_runs(store, "whole", "forked")
    assert (found.shared, [change.field for change in found.fields]) == (AT, ["trainer.lr"])
    assert found.first is not None and (found.first.iteration, found.first.stage) == (AT, "train")
    rows = run_sql(store, "forked", "SELECT iteration, count(*) AS n FROM samples GROUP BY 1 ORDER BY 1").to_pylist()
    assert [(row["iteration"], row["n"]) for row in rows] == [(k, 16) for k in range(LONG)]


@pytest.mark.parametrize(
    ("start", "until", "change", "built"),
    [
        ("verify", "advantage", "reward.verifier=exact", {"verify", "advantage"}),
        ("advantage", "", "algorithm.reward_norm=mean", {"advantage", "train", "publish", "scalars"}),
        ("train", "", LR, {"train", "publish", "scalars"}),
    ],
    ids=["verify", "advantage", "train"],
)
def test_a_replay_on_s3(store: Store, folder: Path, start: str, until: str, change: str, built: set[str]) -> None:
    name = f"from-{start}{until and f'-{until}'}"
    run = replay(folder, name, kept(start, until=until), change, store=store)
    assert made_by(run, 0) == made_by(run, LONG - 1) == built
    assert not [path for path in listed(store, name) if "stage=rollout" in path]
    check_sound(store, name, "whole")
    titles = [section.title for section in compare_replay(store, name)]
    assert any(title.startswith("verdicts") for title in titles) == (start == "verify")
    found = diff_runs(store, "whole", name)
    assert found.shared == 0 and found.first is not None and found.first.stage == start


def test_gc_on_s3_leaves_what_a_fork_refers_to_until_the_fork_is_gone(s3: S3Server, folder: Path) -> None:
    store = open_store(f"s3://{BUCKET}/{uuid.uuid4().hex[:8]}")
    recipe = tiny(trainer=OFTEN, schedule={"iterations": LONG})
    parent = ended(drive(folder, "parent", recipe, store=store, waits=True))
    shorter = tiny(trainer={**OFTEN, "lr": 0.003}, schedule={"iterations": AT + 1})
    ended(drive(folder, "child", shorter, origin=Origin("parent", AT), store=store))
    roots = {name: audit(store, name).root for name in ("parent", "child")}
    before = {entry.path for entry in entries(store, "parent")}

    gone = {path for item in remove_planned(store, plan_removals(store, GREEDY), GREEDY) for path in item.files}
    assert gone and gone <= before
    for name, root in roots.items():
        report = audit(store, name)
        assert report.sound and report.root == root, report.defects
    spared = [files_of(store, ref) for ref in (parent.commit(AT - 1).weights, parent.commit(AT - 1).checkpoint)]
    assert all(spared), "weights and checkpoint of the version that the child began with"
    with pytest.raises(UserError, match="'parent' stays: child would lose"):
        plan_run_removal(store, "parent", 0.0)
    with pytest.raises(UserError, match=r"of version 2 of run 'parent' were removed by .*--keep-"):
        drive(folder, "late", recipe, origin=Origin("parent", AT + 1), store=store)
    drive(folder, "other", recipe, origin=Origin("parent", AT), store=store)
    assert digests_of(store, "other") == digests_of(store, "parent")

    for name in ("other", "child"):
        ended(load_run(store, name))
        remove_run(store, plan_run_removal(store, name, 0.0), 0.0)
    assert find_weights(parent, str(AT)).path == parent.commit(AT - 1).weights.path
    gone = {path for item in remove_planned(store, plan_removals(store, GREEDY), GREEDY) for path in item.files}
    assert {path for files in spared for path in files} <= gone
    assert audit(store, "parent").root == roots["parent"] and audit(store, "parent").sound


def files_of(store: Store, ref: WeightsRef | None) -> list[str]:
    """What lies in the folder of weights or a checkpoint."""
    return [] if ref is None else [entry.path for entry in entries(store, ref.path.removesuffix(".json"))]
