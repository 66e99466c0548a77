"""Whether it is noticed that SGLang skips tensors, which it does without a word."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from waiting import wait_until

from areal_tasks.engines import server_pool
from areal_tasks.engines.proof import COMPUTED, Proof
from areal_tasks.engines.server import BadRequest
from areal_tasks.engines.session import Engines
from areal_tasks.engines.trainer.commands import Command, Publish, Send, Sent, Written
from areal_tasks.engines.trainer_client import TrainerDown
from areal_tasks.store.backend import open_store
from areal_tasks.store.objects.files import upload
from areal_tasks.store.opening import open_run
from schemas.errors import UserError
from schemas.manifest import WeightsRef
from schemas.recipe.load import load_recipe
from tests.inference.fake_server import Fake, serve
from tests.inference.fake_supervisor import FakeSupervisor, publish, supervise

LAYER = "model.layers.0"
#: A server's tensors, and which of the checkpoint's are put into each.
LAYOUT = {
    f"{LAYER}.self_attn.qkv_proj.weight": [f"{LAYER}.self_attn.{part}_proj.weight" for part in "qkv"],
    f"{LAYER}.mlp.experts.w13_weight": [
        f"{LAYER}.mlp.experts.{expert}.{part}_proj.weight" for expert in range(3) for part in ("gate", "up")
    ],
    f"{LAYER}.mlp.experts.w2_weight": [f"{LAYER}.mlp.experts.{expert}.down_proj.weight" for expert in range(3)],
    "model.norm.weight": ["model.norm.weight"],
}
CHECKPOINT = [name for parts in LAYOUT.values() for name in parts]
EXPERTS = [name for name in CHECKPOINT if ".experts." in name]
#: As transformers names the experts, and as earlier versions of this program published them.
FUSED = [f"{LAYER}.mlp.experts.gate_up_proj", f"{LAYER}.mlp.experts.down_proj"]
WITHOUT_EXPERTS = [name for name in CHECKPOINT if name not in EXPERTS] + FUSED


class Tensors:
    """What SGLang makes of weights: each of its tensors is put together of several; unknown names are left out."""

    def __init__(self, *computed: str) -> None:
        self.source = random.Random(0)
        self.parts = {name: self.source.random() for name in CHECKPOINT}
        self.computed = dict.fromkeys(computed, 0.5)
        self.overwritten = 0

    def load(self, weights: dict[str, float]) -> None:
        self.parts |= {name: value for name, value in weights.items() if name in self.parts}

    def overwrite(self) -> None:
        self.overwritten += 1
        for held in (self.parts, self.computed):
            held.update({name: self.source.random() for name in held})

    def checksums(self) -> dict[str, str]:
        made = {name: str([self.parts[part] for part in parts]) for name, parts in LAYOUT.items()}
        return made | {name: str(value) for name, value in self.computed.items()}


def valued(names: list[str], value: float) -> dict[str, float]:
    return {name: value + 0.01 * i for i, name in enumerate(names)}


# ── the proof by itself ─────────────────────────────────────────────────────────────────────────────────────────────


class Stub:
    """A client of servers that hold `Tensors`."""

    def __init__(self, *servers: Tensors) -> None:
        self.servers = servers
        self.paused = False
        self.refuses = ""

    async def pause(self) -> None:
        self.paused = True

    async def resume(self) -> None:
        self.paused = False

    async def checksums(self) -> dict[str, list[dict[str, str]]]:
        if self.refuses == "checksum":
            raise BadRequest("http://a/weights_checker answered 404: Not Found")
        return {f"http://{i}": [server.checksums()] for i, server in enumerate(self.servers)}

    async def overwrite_weights(self) -> None:
        assert self.paused, "nothing may be generated with what is there now"
        if self.refuses == "reset_tensors":
            raise BadRequest("http://a/weights_checker answered 400: out of memory")
        for server in self.servers:
            server.overwrite()

    def give(self, weights: dict[str, float]) -> list[float]:
        for server in self.servers:
            server.load(weights)
        return [0.1] * len(self.servers)


def prove(stub: Stub, names: list[str], proof: Proof | None = None) -> list[float]:
    proof = proof or Proof(asyncio.run, due=True)
    return proof.of(stub, lambda: stub.give(valued(names, 7.0)))  # type: ignore[arg-type]


@given(st.sets(st.sampled_from(CHECKPOINT)))
def test_a_tensor_that_is_left_out_in_part_or_whole_is_named_and_no_other_is(left_out: set[str]) -> None:
    stub = Stub(Tensors(), Tensors())
    affected = sorted(name for name, parts in LAYOUT.items() if left_out & set(parts))
    given_names = [name for name in CHECKPOINT if name not in left_out]
    if not affected:
        assert prove(stub, given_names) == [0.1, 0.1]
        assert all(server.parts == valued(CHECKPOINT, 7.0) for server in stub.servers)
        return
    with pytest.raises(UserError) as caught:
        prove(stub, given_names)
    assert f"these have changed: {', '.join(affected[:3])}" in str(caught.value)
    assert "SGLang skips" in str(caught.value) and "model.path" in str(caught.value)
    assert not stub.paused


def test_a_tensor_that_did_not_change_may_have_arrived() -> None:
    """In bfloat16 many weights are the same after a step: that alone proves nothing."""
    stub = Stub(Tensors())
    stub.give(valued(CHECKPOINT, 7.0))
    prove(stub, CHECKPOINT)
    assert stub.servers[0].parts == valued(CHECKPOINT, 7.0)


def test_it_is_proven_once(caplog: pytest.LogCaptureFixture) -> None:
    stub, proof = Stub(Tensors()), Proof(asyncio.run, due=True)
    caplog.set_level("INFO")
    for _ in range(3):
        prove(stub, CHECKPOINT, proof)
    assert stub.servers[0].overwritten == 1
    assert caplog.text.count("new weights reach all 4 tensors") == 1


def test_what_failed_is_proven_again() -> None:
    stub, proof = Stub(Tensors()), Proof(asyncio.run, due=True)
    with pytest.raises(UserError):
        prove(stub, WITHOUT_EXPERTS, proof)
    prove(stub, CHECKPOINT, proof)
    assert stub.servers[0].overwritten == 2


@pytest.mark.parametrize("leaf", sorted(COMPUTED))
def test_tensors_that_a_server_computes_are_not_overwritten(leaf: str, caplog: pytest.LogCaptureFixture) -> None:
    stub = Stub(Tensors(f"model.{leaf}"))
    prove(stub, CHECKPOINT)
    assert stub.servers[0].overwritten == 0 and stub.servers[0].computed == {f"model.{leaf}": 0.5}
    assert f"the servers compute model.{leaf}" in caplog.text


@pytest.mark.parametrize("action", ["checksum", "reset_tensors"])
def test_a_server_that_cannot_be_asked_is_named_with_the_remedy(action: str) -> None:
    stub = Stub(Tensors())
    stub.refuses = action
    with pytest.raises(UserError, match=r"weights_checker answered 40\d: .*; inference\.prove_weights=false continues"):
        prove(stub, CHECKPOINT)
    assert not stub.paused


# ── with servers ────────────────────────────────────────────────────────────────────────────────────────────────────


class Server(Fake):
    """A server with such tensors, which loads safetensors."""

    def __init__(self) -> None:
        super().__init__(version=0)
        self.tensors = Tensors()
        self.fails_when_overwritten = False
        self.orders: list[str] = []

    async def update(self, request: web.Request) -> web.Response:
        answer = await super().update(request)
        files = Path(self.updates[-1]).glob("*.safetensors")
        self.tensors.load({name: float(t) for file in files for name, t in load_file(file).items()})
        return answer

    async def command(self, request: web.Request) -> web.Response:
        self.orders.append(request.path)
        return await super().command(request)

    async def check_weights(self, request: web.Request) -> web.Response:
        action = (await request.json())["action"]
        assert self.orders[-1:] == ["/pause_generation"]
        if action == "reset_tensors":
            self.tensors.overwrite()
            if self.fails_when_overwritten:
                return web.json_response({"error": "out of order"}, status=500)
            return web.json_response({"success": True, "message": "Success."})
        rank = {"checksums": self.tensors.checksums(), "per_gpu_checksum": "", "parallelism_info": {}}
        return web.json_response({"success": True, "message": "Success.", "ranks": [rank], "per_engine_checksum": ""})


class Trainer:
    """Publishes tensors of these names: each is the version."""

    def __init__(self, engines: Engines, folder: Path, servers: list[Server]) -> None:
        self.engines, self.folder, self.servers = engines, folder, {server.url: server for server in servers}
        self.names = CHECKPOINT
        self.sent = 0
        self.dies_at = 0

    def run(self, command: Command, answer: Any) -> Any:
        """As `TrainerClient.run`."""
        return getattr(self, command.name)(command)

    def publish(self, command: Publish) -> Written:
        self.folder.mkdir(exist_ok=True)
        values = valued(self.names, command.version)
        tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
        save_file(tensors, self.folder / "model.safetensors")
        files = upload(self.engines.run.store, command.prefix, self.folder)
        return Written(files=files)

    def send(self, command: Send) -> Sent:
        self.sent += 1
        if self.sent == self.dies_at:
            raise TrainerDown("it ended")
        for receiver in command.receivers:
            self.servers[receiver.url].tensors.load(valued(self.names, command.version))
            self.servers[receiver.url].version = command.version
        return Sent()


Scene = tuple[Engines, list[Server], Any]


@pytest.fixture
def scene(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """Engines, two servers that hold version 0, and a trainer; a recipe's overrides may be the parameter."""
    monkeypatch.setattr(server_pool, "PROBE_SECONDS", (0.01, 0.01))
    recipe = load_recipe("gsm8k", ["inference.servers=2", *getattr(request, "param", ())])
    run = open_run(open_store(f"file://{tmp_path}/store"), "r", recipe)
    with Engines(run, recipe, tmp_path / "logs") as engines:
        servers = [Server(), Server()]
        runners = [engines.servers.call(serve(server)) for server in servers]
        supervise(engines, FakeSupervisor(*(server.url for server in servers)))
        trainer = Trainer(engines, tmp_path / "written", servers)
        monkeypatch.setattr(engines.actor, "at", lambda _version: trainer)
        yield engines, servers, trainer
        for runner in runners:
            engines.servers.call(runner.cleanup())


UNWRITTEN = WeightsRef(version=3, attempt="", path="", sha256="", digest="what made them")


def test_the_first_weights_through_the_store_are_loaded_twice_and_later_ones_once(scene: Scene) -> None:
    engines, servers, trainer = scene
    for version, loads in ((1, 2), (2, 3)):
        publish(engines, trainer, version)
        assert [len(server.updates) for server in servers] == [loads] * 2
        assert all(server.tensors.parts == valued(CHECKPOINT, version) for server in servers)
        assert all(server.orders == ["/pause_generation", "/continue_generation"] for server in servers)
    assert engines.servers.inference().version == 2


def test_weights_that_do_not_arrive_are_never_in_force(scene: Scene) -> None:
    engines, _, trainer = scene
    trainer.names = WITHOUT_EXPERTS
    with pytest.raises(
        UserError, match=rf"these have changed: {LAYER}\.mlp\.experts\.w13_weight, .*w2_weight\. SGLang"
    ):
        publish(engines, trainer, 1)
    with pytest.raises(UserError, match="these have changed"):
        engines.servers.inference()


def test_weights_that_are_handed_over_are_proven_too(scene: Scene) -> None:
    engines, servers, trainer = scene
    engines.servers.transport, trainer.names = "nccl", WITHOUT_EXPERTS
    with pytest.raises(UserError, match=r"experts\.w13_weight"):
        engines.servers.serve(UNWRITTEN, trainer)
    trainer.names = CHECKPOINT
    assert len(engines.servers.serve(UNWRITTEN, trainer)) == 2
    assert trainer.sent == 4 and all(server.tensors.parts == valued(CHECKPOINT, 3) for server in servers)


def test_servers_whose_tensors_are_overwritten_are_given_weights_before_they_generate(scene: Scene) -> None:
    """The trainer dies between the two hand-overs: the servers say that they hold version 3, and hold none."""
    engines, servers, trainer = scene
    engines.servers.transport, trainer.dies_at = "tensor", 2
    with pytest.raises(TrainerDown):
        engines.servers.serve(UNWRITTEN, trainer)
    assert [server.version for server in servers] == [3, 3]
    engines.servers.inference()
    assert all(server.tensors.parts == valued(CHECKPOINT, 3) for server in servers)


def test_a_server_that_fails_while_it_holds_no_weights_is_not_let_in_without_them(scene: Scene) -> None:
    engines, servers, trainer = scene
    servers[0].fails_when_overwritten = True
    publish(engines, trainer, 1)
    wait_until(lambda: len(engines.servers.inference().healthy()) == 2)
    assert all(server.tensors.parts == valued(CHECKPOINT, 1) for server in servers)


@pytest.mark.parametrize("scene", [["inference.prove_weights=false"]], indirect=True)
def test_a_recipe_may_do_without(scene: Scene) -> None:
    engines, servers, trainer = scene
    trainer.names = WITHOUT_EXPERTS
    publish(engines, trainer, 1)
    assert [len(server.updates) for server in servers] == [1, 1] and not servers[0].tensors.overwritten
