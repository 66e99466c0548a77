"""`arealflow plan --placement`: a proposal never exceeds a machine, and every service is placed or explained."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stage_driver import store_in, tiny

from areal_tasks.engines.starting import NO_MACHINE
from areal_tasks.launchers import slurm_nodes
from areal_tasks.launchers.cluster import Machine, Resources
from areal_tasks.launchers.placement import KINDS, propose, service_needs
from areal_tasks.store import paths
from areal_tasks.store.history.journal import append_log
from areal_tasks.store.opening import open_run
from areal_tasks.store.runs import Run
from areal_tasks.store.waits import waits_record, write_waits
from flows.cli import main, placement
from schemas.errors import UserError
from schemas.manifest import Change, NodeRecord, ServiceRecord, Wait
from schemas.recipe.load import load_recipe

amount = st.integers(0, 8)
resources = st.builds(Resources, amount, amount, amount)


@st.composite
def machines(draw: st.DrawFn) -> list[Machine]:
    found = []
    for number in range(draw(st.integers(0, 4))):
        total = draw(resources)
        free = Resources(*(draw(st.integers(0, getattr(total, kind))) for kind in ("cpus", "gpus", "memory_mb")))
        found.append(Machine(f"n{number}", total, free, draw(st.sampled_from(["", "", "", "in state down"]))))
    return found


services = st.lists(resources, max_size=8).map(lambda all_: {f"rollout-{i}": needs for i, needs in enumerate(all_)})


@given(services, machines(), st.booleans())
def test_no_machine_is_over_its_resources_and_every_service_is_placed_or_explained(
    asked: dict[str, Resources], nodes: list[Machine], autoscales: bool
) -> None:
    found = propose(asked, nodes, autoscales)
    assert [(one.service, one.needs) for one in found] == list(asked.items())
    for node in nodes:
        placed = [one.needs for one in found if one.machine == node.name]
        assert not (placed and node.state)
        assert all(sum(getattr(one, kind) for one in placed) <= getattr(node.free, kind) for kind in KINDS)
    for one in found:
        assert (one.state == "fits") == bool(one.machine) == (not one.why)
        able = [n for n in nodes if not n.state and all(getattr(one.needs, k) <= getattr(n.free, k) for k in KINDS)]
        assert able or not one.machine
        alone = any(all(getattr(one.needs, kind) <= getattr(node.total, kind) for kind in KINDS) for node in nodes)
        assert alone or one.state == ("waits" if autoscales else "refused")


@given(services, machines())
def test_what_fits_when_everything_is_free_is_never_refused(asked: dict[str, Resources], nodes: list[Machine]) -> None:
    empty = [Machine(node.name, node.total, node.total) for node in nodes]
    if all(one.state == "fits" for one in propose(dict(sorted_by_size(asked)), empty)):
        assert "refused" not in [one.state for one in propose(asked, nodes)]


def sorted_by_size(asked: dict[str, Resources]) -> list[tuple[str, Resources]]:
    return sorted(asked.items(), key=lambda one: [getattr(one[1], kind) for kind in KINDS], reverse=True)


def node(name: str, gpus: int, free: int, state: str = "") -> Machine:
    return Machine(name, Resources(8, gpus, 1000), Resources(8, free, 1000), state)


def why(asked: dict[str, Resources], *nodes: Machine) -> list[tuple[str, str]]:
    return [(one.state, one.machine or one.why) for one in propose(asked, nodes)]


def test_the_reasons() -> None:
    eight = {"trainer": Resources(1, 8)}
    assert why(eight, node("n2", 4, 4), node("n3", 8, 3)) == [
        ("waits", "needs 8 GPUs on one node; n3 has 8 GPUs, 5 of them in use")
    ]
    assert why(eight, node("n1", 8, 8, "in state down")) == [
        ("waits", "needs 8 GPUs, 1 CPU on one node; n1 has as much, but is in state down")
    ]
    refusal = "no node has 8 GPUs; the largest has 4 GPUs: lower trainer.ranks, raise trainer.nodes, or set launcher"
    [(state, text)] = why(eight, node("n1", 4, 4))
    assert state == "refused" and text.startswith(refusal)
    assert why({"rollout-0": Resources(9)}, node("n1", 0, 0)) == [
        ("refused", "no node has 9 CPUs; the largest has 8 CPUs: lower launcher.resources.rollout.cpus")
    ]
    assert why(eight)[0][1].startswith("the cluster has no node that may run it")


def test_a_server_over_machines_needs_its_gpus_on_each() -> None:
    split = ["inference.tensor_parallel=4", "inference.nodes=2", "inference.servers=2"]
    needs = service_needs(load_recipe("gsm8k", split), external=False)
    servers = {name: asked.gpus for name, asked in needs.items() if name.startswith("inference")}
    assert servers == dict.fromkeys(("inference-0", "inference-0.1", "inference-1", "inference-1.1"), 2)
    assert why({"inference-0.1": Resources(1, 2)}, node("n1", 1, 1)) == [
        (
            "refused",
            "no node has 2 GPUs; the largest has 1 GPU: lower inference.tensor_parallel, raise inference.nodes, or set "
            "launcher.resources.inference.gpus",
        )
    ]


@pytest.mark.parametrize("recipe", ["gsm8k", "sft-gsm8k", "quickstart"])
def test_a_trainer_needs_a_cpu_for_each_of_its_ranks_there(recipe: str) -> None:
    def cpus(*changes: str) -> dict[str, int]:
        own = ("launcher.type=slurm", "launcher.network=10.0.0.0/24", "launcher.trust_network=true")
        needs = service_needs(load_recipe(recipe, [*own, "trainer.backend=fsdp2", *changes]), external=False)
        return {name: asked.cpus for name, asked in needs.items() if name.startswith("trainer")}

    ranks = ("trainer.ranks=8", "trainer.nodes=2")
    assert cpus(*ranks) == dict.fromkeys(("trainer", "trainer-1"), 4)
    for stated, asked in ((3, 4), (16, 16)):
        assert cpus(*ranks, f"launcher.resources.trainer.cpus={stated}") == dict.fromkeys(
            ("trainer", "trainer-1"), asked
        )
    assert cpus("trainer.ranks=1") == {"trainer": 1}
    assert why({"trainer": Resources(16)}, node("n1", 0, 0))[0][1].endswith(
        "the largest has 8 CPUs: lower launcher.resources.trainer.cpus or trainer.ranks, or raise trainer.nodes"
    )


def test_a_service_that_waits_for_another_of_its_run_would_wait_for_ever() -> None:
    asked = {"trainer": Resources(1, 3), "inference-0": Resources(1, 2)}
    [first, (state, text)] = why(asked, node("n1", 4, 4))
    assert first == ("fits", "n1") and state == "refused"
    assert text.startswith(
        "no room even if nothing else ran: needs 2 GPUs on one node; n1 has 4 GPUs, 3 of them in use"
    )
    assert "inference.tensor_parallel" in text and text.endswith("or add a machine")
    assert why(asked, node("n1", 4, 4), node("n2", 4, 1))[1] == (
        "waits",
        "needs 2 GPUs on one node; n1 has 4 GPUs, 3 of them in use (3 by this run)",
    )


# ── Slurm's words ───────────────────────────────────────────────────────────────────────────────────────────────────

#: Printed by Slurm 22.05, GPUs added.
SINFO = """\
node1|main|4/4/0/8|8192|3000|gpu:a100:4(S:0-1)|gpu:a100:1(IDX:0)|mix|main*|
node1|short|4/4/0/8|8192|3000|gpu:a100:4(S:0-1)|gpu:a100:1(IDX:0)|mix|short|
node2|short|0/8/0/8|8192|0|(null)|(null)|idle|short|
node3|main|0/0/8/8|8192|0|(null)|(null)|down*|main*|
"""
JOB = (
    "JobId=1 Features=(null) NodeList=node[1-2] JOB_GRES=gpu:2   "
    "Nodes=node1 CPU_IDs=0-3,6 Mem=3000 GRES=gpu:2(IDX:0-1)   Nodes=node2 CPU_IDs=2 Mem=500 GRES= MinCPUsNode=4"
)
STEPS = """\
StepId=1.batch UserId=0 State=RUNNING NodeList=node1 Nodes=1 CPUs=3 TRES=cpu=5,mem=3000M,node=1 ResvPorts=(null)
StepId=1.0 UserId=0 State=RUNNING NodeList=node1 Nodes=1 CPUs=3 TRES=cpu=3,mem=1G,node=1,gres/gpu=1 ResvPorts=(null)
StepId=1.1 UserId=0 State=PENDING NodeList=node1 Nodes=1 CPUs=3 TRES=cpu=3,mem=500M,node=1 ResvPorts=(null)
"""


def ask(command: Sequence[str]) -> str:
    return SINFO if command[0] == "sinfo" else {"job": JOB, "step": STEPS}[command[-2]]


def test_the_nodes_of_a_partition() -> None:
    has = Resources(8, 4, 8192)
    default = slurm_nodes.partition_nodes(ask, "")
    assert default[0] == Machine("node1", has, Resources(4, 3, 5192))
    assert [(one.name, one.state) for one in default] == [("node1", ""), ("node3", "in state down*")]
    assert [one.name for one in slurm_nodes.partition_nodes(ask, "main,short")] == ["node1", "node2", "node3"]


def test_the_nodes_of_an_allocation() -> None:
    first, second = slurm_nodes.allocated_nodes(ask, "1")
    assert first == Machine("node1", Resources(5, 2, 3000), Resources(2, 1, 1976))
    assert second == Machine("node2", Resources(1, 0, 500), Resources(1, 0, 500))


# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Fake:
    """A user's cluster that can list its machines."""

    closed = False

    def __init__(self, settings: object) -> None:
        self.settings = settings

    def machines(self) -> list[Machine]:
        return [Machine("n1", Resources(4, 0, 4000), Resources(2, 0, 4000))]

    def submit(self, task: object) -> None:
        raise AssertionError("a plan starts nothing")

    def close(self) -> None:
        Fake.closed = True


class Silent(Fake):
    machines = None  # type: ignore[assignment]


def plan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str, recipe: str = "quickstart"
) -> tuple[Any, str]:
    """The rows that are printed, and the error, with which it exits with 1."""
    monkeypatch.setattr(sys, "argv", ["arealflow", "plan", recipe, "--placement", "--json", *words])
    with pytest.raises(SystemExit) as ended:
        main.main()
    printed = capsys.readouterr()
    assert bool(ended.value.code) == bool(printed.err)
    return json.loads(printed.out or "null"), printed.err


CLUSTER = (f"launcher.type={__name__}:Fake", "launcher.network=10.0.0.0/24")


def test_a_proposal_for_a_cluster(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rows, error = plan(capsys, monkeypatch, *CLUSTER)
    assert Fake.closed and not error
    assert [(row["service"], row["state"], row["node"]) for row in rows] == [
        ("trainer", "fits", "n1"),
        ("rollout-0", "fits", "n1"),
        ("inference-0", "waits", ""),
        ("rollout-evaluation", "waits", ""),
    ]
    assert rows[2]["why"] == "needs 1 CPU on one node; n1 has 4 CPUs, 4 of them in use (2 by this run)"


def test_what_cannot_fit_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rows, error = plan(capsys, monkeypatch, *CLUSTER, "launcher.resources.trainer.cpus=5")
    assert [row["state"] for row in rows] == ["refused", "fits", "fits", "waits"]
    assert "does not fit the cluster: trainer: no node has 5 CPUs; the largest has 4 CPUs: lower" in error


def test_a_cluster_that_lists_no_machines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _, error = plan(capsys, monkeypatch, f"launcher.type={__name__}:Silent", CLUSTER[1])
    assert "has no method machines()" in error


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = ["trainer.ranks=1", "inference.servers=2"]
    recipe = load_recipe("gsm8k", changes)
    rows = placement.local_rows(recipe, ("0", "1", "2"))
    here = socket.gethostname()
    assert [(row["service"], row["node"], row["gpus"]) for row in rows] == [
        ("trainer", here, "0"),
        *((f"rollout-{i}", here, "") for i in range(recipe.rollout.workers)),  # type: ignore[union-attr]
        ("inference-0", here, "1"),
        ("inference-1", here, "2"),
        ("rollout-evaluation", here, ""),
    ]
    with pytest.raises(UserError, match=r"trainer\.ranks: 4 ranks need a GPU each"):
        placement.local_rows(load_recipe("gsm8k", ["trainer.ranks=4"]), ("0", "1"))
    monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", "gpu9:30000")
    assert placement.local_rows(recipe, ("0",))[-1]["service"] == "http://gpu9:30000"


def test_this_machine_without_gpus(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def planned(recipe: str, *words: str) -> tuple[dict[str, tuple[str, str]], str]:
        rows, error = plan(capsys, monkeypatch, *words, recipe=recipe)
        return {
            row["service"]: (row["state"], row["why"]) for row in rows if row["state"] != "fits" or row["why"]
        }, error

    found, error = planned("gsm8k", "inference.servers=2")
    assert found == dict.fromkeys(("inference-0", "inference-1"), ("refused", placement.NO_GPU)) | {
        "trainer": ("fits", placement.ON_CPUS)
    }
    assert f"this recipe does not fit this machine: inference-0 (and 1 more): {placement.NO_GPU}" in error
    assert planned("gsm8k", "launcher.resources.inference.gpus=0") == ({"trainer": ("fits", placement.ON_CPUS)}, "")
    assert planned("sft-gsm8k") == ({"trainer": ("fits", placement.ON_CPUS)}, "")
    for recipe in ("quickstart", "gsm8k-cpu"):
        assert planned(recipe) == ({}, "")
    assert planned("quickstart", "launcher.type=inline") == ({}, "")


# ── a run ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return open_run(store_in(tmp_path), "r", tiny(rollout={"workers": 2}))


def service(run: Run, name: str, restart: int) -> None:
    record = ServiceRecord(name=name, restart=restart, url="http://x", host="n1", pid=1, started="")
    run.store.create(path := paths.service("r", run.owner, name, restart), record.encode(path))


def test_a_run_that_is_under_way(run: Run) -> None:
    for restart in (0, 11, 2):
        service(run, "trainer", restart)
    for name in ("trainer-meeting", "inference-0-meeting"):
        service(run, name, 0)
    service(run, "inference-0.1", 3)
    for restart in (0, 1):
        service(run, "rollout-evaluation", restart)
    node_record = NodeRecord(url="https://x", host="n2", pid=1, certificate="", software={})
    run.store.create(path := paths.node("r", run.owner, "inference-0", 0), node_record.encode(path))
    append_log(run.store, "r", "placed", {"owner": run.owner, "trainer": "0+1"})
    waits = [Wait(at="rollout-1", what="its start", since="", limit="", says="Resources")]
    waits += [Wait(at="inference-0.1", what="generation", since="", limit=NO_MACHINE, says="needs a GPU")]
    write_waits(run, 1, waits_record(waits, 60))
    rows = placement.running_rows(run, placement.next_recipe(run, []), run.owner)
    assert [tuple(row.values()) for row in rows] == [
        ("inference-0", "starts", "n2", "", 0, ""),
        ("inference-0.1", "waits", "", "", 3, "needs a GPU"),
        ("rollout-0", "waits", "", "", 0, ""),
        ("rollout-1", "waits", "", "", 0, "Resources"),
        ("rollout-evaluation", "runs", "n1", "", 1, ""),
        ("trainer", "runs", "n1", "0+1", 11, ""),
    ]


@pytest.mark.parametrize(("workers", "shown"), [(0, ["rollout-0", "rollout-1", "rollout-2"]), (1, ["rollout-0"])])
def test_services_that_have_left_a_run_are_not_shown(run: Run, workers: int, shown: list[str]) -> None:
    """Unless `arealflow set` has changed their number: this start may have more than the recipe in the store."""
    for name in ("rollout-0", "rollout-1", "rollout-2"):
        service(run, name, 0)
    if workers:
        fewer = Change(n=1, values={"rollout.workers": workers}, user="ann", host="n1", time="")
        run = run.with_change(fewer, 0, tiny(rollout={"workers": workers}))
    rows = placement.running_rows(run, placement.next_recipe(run, []), run.owner)
    assert [row["service"] for row in rows if row["service"].startswith("rollout-") and row["node"]] == shown


def test_a_run_whose_flow_has_ended(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    placement.run_placement(run, [], True)
    assert "state" in json.loads(capsys.readouterr().out)[0]
    append_log(run.store, "r", "finished", {"owner": run.owner})
    placement.run_placement(run, [], True)
    [first, *_] = json.loads(capsys.readouterr().out)
    assert list(first.values()) == ["trainer", "fits", socket.gethostname(), "", ""]
