"""Checks of GPUs, ports, and SGLang flags that a recipe must not set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from schemas.recipe.recipe import EvaluateRecipe, RlhfRecipe, SftRecipe

SERVICE: Final = "the service sets it"
ONE_PROCESS: Final = "the bearer token protects a single HTTP process, which the service starts"
SAMPLING: Final = "the recipe's sections rollout and evaluation set sampling parameters"

#: Flags of SGLang that a recipe must not set, and the reason or the field to use instead.
RESERVED_FLAGS: Final = {
    **dict.fromkeys(("model", "model-path"), "model.path"),
    **dict.fromkeys(("tp", "tp-size", "tensor-parallel-size"), "inference.tensor_parallel"),
    "mem-fraction-static": "inference.memory_fraction",
    "port": "inference.first_port",
    "enable-memory-saver": "inference.release_memory",
    "dtype": "model.dtype",
    "context-length": "model.max_length",
    "random-seed": "seed",
    **dict.fromkeys(("host", "weight-version", "skip-server-warmup", "config", "base-gpu-id", "gpu-id-step"), SERVICE),
    **dict.fromkeys(("api-key", "admin-api-key", "tokenizer-worker-num", "grpc-mode", "smg-grpc-mode"), ONE_PROCESS),
    **dict.fromkeys(("grpc-port", "use-ray", "encoder-only"), ONE_PROCESS),
    **dict.fromkeys(("nnodes", "node-rank", "dist-init-addr", "nccl-init-addr"), "a server is on one machine"),
    **dict.fromkeys(("dp", "dp-size", "data-parallel-size"), "inference.servers"),
    **dict.fromkeys(("pp-size", "pipeline-parallel-size"), "inference.tensor_parallel"),
    **dict.fromkeys(("ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "ssl-keyfile-password"), SERVICE),
    "enable-ssl-refresh": SERVICE,
    "skip-tokenizer-init": "responses contain text",
    "preferred-sampling-params": SAMPLING,
}

#: Flags that are allowed on loopback only.
OPENING_FLAGS: Final = dict.fromkeys(
    (
        *("disaggregation-mode", "language-only", "kv-events-config", "enable-elastic-expert-backup"),
        "remote-instance-weight-loader-start-seed-via-transfer-engine",
    ),
    "SGLang would listen there at a port that no token protects",
)


def check_flags(r: RlhfRecipe | EvaluateRecipe) -> Iterator[str]:
    """SGLang's flags are written as the recipe needs them, and none is the service's own."""
    for key, value in r.inference.flags.items():
        name = key.strip("-").replace("_", "-")
        if r.launcher.network and (reason := OPENING_FLAGS.get(name)):
            yield f"inference.flags: a recipe cannot set {key} with launcher.network; leave it out, since {reason}"
        elif reason := RESERVED_FLAGS.get(name):
            hint = f"set {reason} instead" if "." in reason or reason == "seed" else f"leave it out, since {reason}"
            yield f"inference.flags: a recipe cannot set {key}; {hint}"
        elif key != key.strip("-"):
            yield f"inference.flags: write {key.strip('-')} without the dashes"
        elif value is False or value is None:
            yield f"inference.flags: {key}: {str(value).lower()} has no effect; leave it out"


def check_servers(r: RlhfRecipe | EvaluateRecipe) -> Iterator[str]:
    """Each server has its GPUs, a port and a process."""
    gpus, width, servers = r.inference.gpus, r.inference.tensor_parallel, r.inference.servers
    if gpus and len(gpus) != servers * width:
        yield (
            f"inference.gpus: names {len(gpus)}, but {servers} servers of {width} "
            f"GPUs each need {servers * width}; name one for each, or leave it out"
        )
    if any(len(set(group)) < len(group) for group in (gpus[at : at + width] for at in range(0, len(gpus), width))):
        yield "inference.gpus: one server's GPUs must differ; only different servers may share a GPU"
    if r.inference.first_port and (last := r.inference.first_port + servers - 1) > 65535:
        yield f"inference.first_port: {servers} servers from {r.inference.first_port} need ports to {last}"
    if r.inference.engine == "sglang" and r.launcher.type == "inline":
        yield "launcher.type: inline runs services in threads, and SGLang needs processes; use local"


def check_trainer_gpus(r: RlhfRecipe | SftRecipe) -> Iterator[str]:
    """Each rank has a GPU."""
    if (gpus := len(set(r.trainer.gpus))) and gpus != r.trainer.ranks:
        yield f"trainer.gpus: names {gpus} GPUs for {r.trainer.ranks} ranks; name one for each rank, or leave it out"


def check_shared_memory(r: RlhfRecipe) -> Iterator[str]:
    """Servers that release their memory share a GPU with the trainer."""
    servers, trainer = set(r.inference.gpus), set(r.trainer.gpus)
    if r.inference.release_memory and servers and trainer and not servers & trainer:
        yield (
            "inference.release_memory: has no effect, since inference.gpus and trainer.gpus have none in common; "
            "leave it out, or name the trainer's GPUs in inference.gpus"
        )


INFERENCE_CHECKS: Final = (check_flags, check_servers)
