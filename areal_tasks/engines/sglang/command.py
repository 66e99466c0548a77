"""The command line and environment of one SGLang server, from the recipe. Pure functions (SGLang 0.5.17's flags)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from areal_tasks.engines.lifeline import LIFELINE
from areal_tasks.engines.ports import HOST, group_interface
from areal_tasks.engines.service import KEEP_ALIVE_SECONDS, SPEC, ServiceSpec, server_of
from areal_tasks.engines.tls import CERTIFICATE, KEY
from schemas.recipe.sections import Inference, Model

#: SGLang reserves a few positions of its context: it accepts prompts up to `context - 7` and ends at `context - 2`.
CONTEXT_MARGIN: Final = 8
SHARED_FRACTION: Final = 0.85  # of a shared GPU's memory, divided among its users unless the recipe sets it

#: With η > 0 samples wait in SGLang's queue, and begin in batches, whose size `scheduler.py` determines.
BATCHED_STARTS: Final = {"min-free-slots-delay": 2}
#: Allow the margin, which no token reaches, to exceed a model's context; keep connections as long as other services.
SET: Final = {
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    "SGLANG_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_SECONDS),
}
#: Of a server over several machines. torch's store is served by `parts`, not by the first rank, which would listen on
#: every interface; nor do the ranks exchange objects by sockets at an address that SGLang chooses.
PARTS: Final = {"TORCHELASTIC_USE_AGENT_STORE": "True", "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "0"}
#: Settings of the launcher that are not meant for SGLang, and switches that would undo what this service relies on.
DROPPED: Final = (
    *(SPEC, LIFELINE, "OMP_NUM_THREADS", "OMP_WAIT_POLICY"),
    "SGLANG_RUST_SERVER",  # another HTTP server, which checks no token
    "SGLANG_RETURN_ORIGINAL_LOGPROB",  # logprobs before the temperature, where the trainer compares those after it
)


def arguments(spec: ServiceSpec, folder: Path, port: int, meeting: str = "") -> list[str]:
    """The flags of `launch_server`: the weights' folder, the address to listen on, and the recipe's settings.

    `meeting`: where the parts of a server over several machines meet. SGLang's own all-reduce is for GPUs of one.
    """
    settings = Inference.model_validate(spec.recipe["inference"])
    model = Model.model_validate(spec.recipe["model"])
    own: dict[str, Any] = {
        "model-path": str(folder),
        "host": spec.address,
        "port": port,
        "dtype": model.dtype,
        "context-length": model.max_length + CONTEXT_MARGIN,
        "tp-size": settings.tensor_parallel,
        "random-seed": random_seed(spec),
        "weight-version": spec.weights.version if spec.weights else 0,
        "skip-server-warmup": True,  # it would ask without our bearer token; `wait_until_ready` generates too
    }
    if meeting:
        own |= {"nnodes": settings.nodes, "node-rank": spec.node, "dist-init-addr": meeting}
        own |= {"disable-custom-all-reduce": True}
    if spec.tls:
        own |= {"ssl-keyfile": f"{spec.tls}/{KEY}", "ssl-certfile": f"{spec.tls}/{CERTIFICATE}"}
    if fraction := memory_fraction(settings, spec.gpu_users):
        own["mem-fraction-static"] = fraction
    if settings.release_memory:
        own["enable-memory-saver"] = True
    if (spec.recipe.get("rollout") or {}).get("max_head_offpolicyness"):
        own |= BATCHED_STARTS
    return list(flags(own | {name.replace("_", "-"): value for name, value in settings.flags.items()}))


def memory_fraction(settings: Inference, users: int) -> float:
    """The share of a GPU that SGLang may fill with weights and cache; 0 leaves it to SGLang."""
    if settings.memory_fraction or users == 1 or settings.release_memory:
        return settings.memory_fraction
    return round(SHARED_FRACTION / users, 3)


def random_seed(spec: ServiceSpec) -> int:
    """A distinct seed for each server and each of its starts: servers with equal seeds would sample the same tokens.

    The parts of a server have the same.
    """
    weights = spec.weights.version if spec.weights else 0
    text = json.dumps([spec.recipe.get("seed", 0), server_of(spec.name), spec.owner, spec.restart, weights])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def flags(values: Mapping[str, Any]) -> Iterator[str]:
    """`--key value`, `--key` for true, nothing for false, `--key a b` for a list, JSON for a mapping."""
    for key, value in values.items():
        if value is False:
            continue
        yield f"--{key}"
        if isinstance(value, dict):
            yield json.dumps(value)
        elif isinstance(value, list):
            yield from map(str, value)
        elif value is not True:
            yield str(value)


def environment(inherited: Mapping[str, str], private: Path, address: str = HOST, meeting: str = "") -> dict[str, str]:
    """The child's environment: `inherited`, without DROPPED, and with SET.

    Its processes find each other by a file in the folder `private`: torch's TCPStore, SGLang's default, listens on
    every interface. Those of several machines do so at `meeting`. Their collectives stay on the interface of `address`
    unless the environment names another.
    """
    kept = {name: value for name, value in inherited.items() if name not in DROPPED}
    where = f"tcp://{meeting}" if meeting else f"file://{private}/rendezvous"
    rendezvous = {"SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": where} | (PARTS if meeting else {})
    return group_interface(address) | kept | SET | rendezvous
