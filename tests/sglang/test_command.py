"""The command line and the environment of a server: pure functions of its specification."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areal_tasks.engines.service import ServiceSpec
from areal_tasks.engines.sglang.command import arguments, environment, memory_fraction, random_seed
from schemas.manifest import WeightsRef
from schemas.recipe.sections import Inference

WEIGHTS = WeightsRef(version=7, attempt="a", path="r/weights/w.json", sha256="00", digest="11")


def spec(name: str = "inference-0", restart: int = 0, gpu_users: int = 1, **inference: Any) -> ServiceSpec:
    recipe = {
        "seed": 1,
        "model": {"path": "m", "max_length": 512, "dtype": "bfloat16"},
        "inference": {"engine": "sglang", **inference},
    }
    return ServiceSpec(
        name=name, restart=restart, store_url="file:///s", run="r", owner=1, recipe=recipe, weights=WEIGHTS,
        gpu_users=gpu_users,
    )  # fmt: skip


def test_the_recipe_becomes_flags() -> None:
    given = {"attention-backend": "triton", "disable_radix_cache": True, "cuda-graph-bs": [1, 8], "override": {"a": 1}}
    found = arguments(spec(tensor_parallel=2, memory_fraction=0.6, flags=given), Path("/w"), 30001)
    seed = str(random_seed(spec()))
    assert found == [
        *("--model-path", "/w", "--host", "127.0.0.1", "--port", "30001", "--dtype", "bfloat16"),
        *("--context-length", "520", "--tp-size", "2", "--random-seed", seed, "--weight-version", "7"),
        *("--skip-server-warmup", "--mem-fraction-static", "0.6", "--attention-backend", "triton"),
        *("--disable-radix-cache", "--cuda-graph-bs", "1", "8", "--override", '{"a": 1}'),
    ]
    assert "--enable-memory-saver" in arguments(spec(release_memory=True), Path("/w"), 1)


@pytest.mark.parametrize(
    ("lag", "chosen", "together"), [(0, {}, False), (4, {}, True), (4, {"min_free_slots_delay": False}, False)]
)
def test_samples_that_wait_begin_together_unless_the_recipe_says_otherwise(
    lag: int, chosen: dict[str, Any], together: bool
) -> None:
    given = spec(flags=chosen)
    asynchronous = given.model_copy(update={"recipe": given.recipe | {"rollout": {"max_head_offpolicyness": lag}}})
    assert ("--min-free-slots-delay" in arguments(asynchronous, Path("/w"), 1)) is together


def test_on_a_network_it_listens_at_one_address_with_tls() -> None:
    placed = spec().model_copy(update={"address": "10.0.0.5", "tls": "/tls"})
    found = " ".join(arguments(placed, Path("/w"), 1))
    assert "--host 10.0.0.5 " in found
    assert "--ssl-keyfile /tls/key.pem --ssl-certfile /tls/certificate.pem" in found


def test_the_parts_of_a_server_meet_at_one_address() -> None:
    part = spec("inference-0.1", tensor_parallel=4, nodes=2).model_copy(update={"node": 1})
    found = " ".join(arguments(part, Path("/w"), 1, "10.0.0.5:4000"))
    assert "--tp-size 4 " in found and "--disable-custom-all-reduce" in found
    assert "--nnodes 2 --node-rank 1 --dist-init-addr 10.0.0.5:4000" in found
    assert f"--random-seed {random_seed(spec())} " in found, "that of the first part"
    own = environment({}, Path("/own"), meeting="10.0.0.5:4000")
    assert own["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] == "tcp://10.0.0.5:4000"
    assert own["TORCHELASTIC_USE_AGENT_STORE"] == "True", "else the first rank would serve another store there"


@pytest.mark.parametrize(
    ("settings", "users", "expected"),
    [
        ({}, 1, 0.0),  # SGLang's own choice
        ({}, 2, 0.425),
        ({"memory_fraction": 0.3}, 2, 0.3),
        ({"release_memory": True}, 2, 0.0),  # the trainer works when the server does not
    ],
)
def test_a_shared_gpu_is_divided(settings: dict[str, Any], users: int, expected: float) -> None:
    assert memory_fraction(Inference(engine="sglang", **settings), users) == expected


def test_no_two_servers_nor_starts_sample_alike() -> None:
    seeds = {random_seed(spec(name, restart)) for name in ("inference-0", "inference-1") for restart in (0, 1)}
    assert len(seeds) == 4 and all(0 <= seed < 2**31 for seed in seeds)
    assert random_seed(spec()) == random_seed(spec())


def test_the_environment_undoes_what_is_relied_on() -> None:
    inherited = {
        "PATH": "/bin",
        "OMP_NUM_THREADS": "2",
        "AREAL_SERVICE_SPEC": "{}",
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
    }
    assert environment(inherited, Path("/own")) == {
        "PATH": "/bin",
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": "file:///own/rendezvous",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "SGLANG_TIMEOUT_KEEP_ALIVE": "120",
    }
    assert environment({"NCCL_SOCKET_IFNAME": "ib0"}, Path("/own"))["NCCL_SOCKET_IFNAME"] == "ib0"
