"""Which way new weights take, and what records say of weights that were handed over and not written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from stage_driver import ITERATIONS, digests_of, drive, store_in, tiny
from waiting import LIMIT

from areal_tasks.engines import session
from areal_tasks.engines.handover import choose_transport, sending_ranks
from areal_tasks.engines.service import ServiceSpec, server_of
from areal_tasks.engines.session import Engines
from areal_tasks.engines.trainer.commands import Command, Publish, Send, Sent, Written
from areal_tasks.engines.trainer_client import TrainerClient
from areal_tasks.launchers.gpus import Placement
from areal_tasks.stages.build import Built
from areal_tasks.stages.jobs import Execute, Job, run_directly
from areal_tasks.stages.publish import is_written
from areal_tasks.store.backend import Store
from areal_tasks.store.commit import new_attempt
from areal_tasks.store.objects.files import commit_weights
from areal_tasks.store.opening import open_run
from areal_tasks.store.paths import weights_attempt
from areal_tasks.store.provenance import make_provenance, now
from areal_tasks.store.runs import Run
from schemas.errors import UserError
from schemas.manifest import WeightsRef
from schemas.recipe.checks import check_weights_every
from schemas.recipe.load import load_recipe
from schemas.recipe.recipe import Recipe, RlhfRecipe

SHARED = Placement(("0",), (("0",), ("0",)))
APART = Placement(("0",), (("1",), ("2", "3")))
MIXED = Placement(("0",), (("0",), ("1",)))
EACH = Placement(("2", "0"), (("0",), ("2",), ("0",)))
ONE_OVER_BOTH = Placement(("0", "1"), (("0", "1"),))
SECOND = Placement(("0", "1"), (("1",),))


@pytest.mark.parametrize(
    ("placement", "external", "expected"),
    [
        (SHARED, False, "tensor"),
        (EACH, False, "tensor"),
        (SECOND, False, "tensor"),
        (APART, False, "nccl"),
        (MIXED, False, "store"),
        (ONE_OVER_BOTH, False, "store"),
        (EACH, True, "store"),
        (Placement(), True, "store"),
    ],
)
def test_auto_takes_the_fastest_that_the_placement_allows(placement: Placement, external: bool, expected: str) -> None:
    assert choose_transport(load_recipe("gsm8k"), placement, external) == expected


def test_a_server_gets_weights_of_the_rank_on_its_gpu() -> None:
    assert sending_ranks("tensor", EACH) == (1, 0, 1)
    assert sending_ranks("tensor", SHARED) == (0, 0)
    assert sending_ranks("store", EACH) == sending_ranks("nccl", APART) == ()


def test_a_transport_that_the_placement_forbids_is_refused_with_the_reason() -> None:
    recipe = load_recipe("gsm8k", ["inference.transport=nccl"])
    with pytest.raises(UserError, match=r"nccl is not possible here.*possible: tensor, store"):
        choose_transport(recipe, SHARED, False)


def test_between_machines_weights_are_broadcast_only_if_the_recipe_says_so() -> None:
    """A broadcast is not encrypted. It needs GPUs at both ends."""
    elsewhere = ["launcher.type=ray", "launcher.network=10.0.0.0/24"]
    assert choose_transport(load_recipe("gsm8k", elsewhere), Placement(), False) == "store"
    named = load_recipe("gsm8k", [*elsewhere, "launcher.trust_network=true", "inference.transport=nccl"])
    assert choose_transport(named, Placement(), False) == "nccl"
    with pytest.raises(UserError, match="nccl is not possible here"):
        choose_transport(named, Placement(), external=True)


def test_the_embedded_engine_reads_the_store() -> None:
    assert choose_transport(load_recipe("quickstart"), SHARED, False) == "store"


def test_versions_are_written_at_the_interval_at_the_end_and_where_they_are_evaluated() -> None:
    changes = ["trainer.weights_every=4", "evaluation.every=6", "schedule.iterations=11"]
    recipe = load_recipe("gsm8k", changes)
    assert [v for v in range(1, 12) if is_written(recipe, v)] == [4, 6, 8, 11]


PLACEMENTS = [
    ("0", "", "tensor"),
    ("0,1", "", "nccl"),
    ("0,1", "trainer.ranks=2 inference.servers=2 inference.gpus=[0,1]", "tensor"),
    ("0,1,2,3", "trainer.ranks=2 inference.servers=2", "nccl"),
    ("0,1,2,3", "trainer.ranks=2 inference.tensor_parallel=2", "nccl"),
    ("0,1,2,3", "trainer.ranks=2 inference.tensor_parallel=2 inference.nodes=2", "nccl"),
    ("0,1,2,3,4,5,6,7", "trainer.ranks=4 inference.servers=4", "nccl"),
    ("0,1", "inference.tensor_parallel=2", "store"),
]


@pytest.mark.parametrize(("gpus", "changes", "transport"), PLACEMENTS)
def test_each_placement_that_the_guide_names_has_a_way_for_every_version(
    gpus: str, changes: str, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of docs/guides/gpus.md, and one server over all GPUs; the recipe as it is writes each tenth version."""
    recipe = load_recipe("gsm8k", changes.split())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    run = open_run(store_in(tmp_path), "r", recipe)
    with Engines(run, recipe, tmp_path / "logs") as engines:
        specs: dict[str, ServiceSpec] = {}
        groups: dict[str, str] = {}

        def start(_: str, spec: ServiceSpec, *__: Any, group: str = "") -> None:
            specs[spec.name], groups[spec.name] = spec, group

        monkeypatch.setattr(engines.supervisor, "start", start)
        nothing = WeightsRef(version=0, attempt="", path="", sha256="", digest="")
        engines.begin()
        engines.start(nothing, nothing, nothing)
        assert (engines.servers.transport, engines.servers.store_only) == (transport, transport == "store")
        trainer = specs["trainer"]
        shared = {trainer.gpus[rank] for rank in trainer.sending}
        servers = {gpu for name, spec in specs.items() if name.startswith("inference") for gpu in spec.gpus}
        assert shared == (servers if transport == "tensor" else set())
        names = [name for name in specs if name.startswith("inference")]
        assert [specs[name].node for name in names] == [*range(recipe.inference.nodes)] * recipe.inference.servers
        assert all(groups[name] == server_of(name) for name in names), "a server's services end and start together"
        assert {len(specs[name].gpus) * recipe.inference.nodes for name in names} == {recipe.inference.tensor_parallel}
        if transport != "store":
            [receiver] = engines.servers._send_command(1, ["http://server"], []).receivers
            assert receiver.ranks == recipe.inference.tensor_parallel, "all ranks of a server join the group"


class Stopped(Exception):
    """The flow was stopped."""


def stop_at(label: str) -> Execute:
    def execute(jobs: Sequence[Job]) -> list[Built]:
        if jobs[0].label == label:
            raise Stopped
        return run_directly(jobs)

    return execute


@pytest.fixture
def rarely(monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """A recipe that writes each tenth version, as none with the embedded engine may."""
    allowed = tuple(check for check in RlhfRecipe.CHECKS if check is not check_weights_every)
    monkeypatch.setattr(RlhfRecipe, "CHECKS", allowed)
    return tiny(trainer={"weights_every": 10}, evaluation={"every": 10})


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Until it is undone, trainers hand weights to the embedded servers in a way that leaves no record."""

    run = TrainerClient.run

    def send(trainer: TrainerClient, command: Command, answer: Any) -> Any:
        if not isinstance(command, Send):
            return run(trainer, command, answer)
        store, attempt = store_in(tmp_path), new_attempt()
        prefix = weights_attempt("other", command.version, attempt)
        files = trainer.run(Publish(owner=command.owner, version=command.version, prefix=prefix), Written).files
        ref = commit_weights(store, "other", command.version, attempt, "weights", files, make_provenance(1, now()))
        body = {"model_path": store.uri(ref.path), "weight_version": str(command.version), "flush_cache": True}
        for receiver in command.receivers:
            headers = {"Authorization": f"Bearer {command.token}"}
            url = f"{receiver.url}/update_weights_from_disk"
            httpx.post(url, json=body, headers=headers, timeout=LIMIT).raise_for_status()
        return Sent()

    patch = pytest.MonkeyPatch()
    patch.setattr(session, "choose_transport", lambda *_: "tensor")
    patch.setattr(TrainerClient, "run", send)
    return patch


def written(run: Run) -> list[bool]:
    return [run.commit(k).weights.written for k in range(ITERATIONS)]


def made(store: Store, run: str) -> list[list[tuple[str, str]]]:
    """What every iteration made, but for where its weights lie."""
    return [
        [found for found in digests if found[0] not in ("publish", "weights")] for digests in digests_of(store, run)
    ]


def test_a_run_whose_servers_have_only_the_store_writes_every_version(tmp_path: Path, rarely: Recipe) -> None:
    assert written(drive(tmp_path, "r", rarely)) == [True, True, True]


@pytest.mark.parametrize(
    "label", [pytest.param("rollout 1", marks=pytest.mark.slow("the other instant shows more")), "train 1"]
)
def test_a_run_goes_on_with_another_transport_from_a_version_that_is_not_written(
    label: str, tmp_path: Path, rarely: Recipe, by_hand: pytest.MonkeyPatch
) -> None:
    try:
        with pytest.raises(Stopped):
            drive(tmp_path, "r", rarely, stop_at(label))
    finally:
        by_hand.undo()
    run = drive(tmp_path, "r", rarely)
    assert written(run) == [False, True, True]
    drive(tmp_path, "whole", rarely)
    assert made(run.store, "r") == made(run.store, "whole")
