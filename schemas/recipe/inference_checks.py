"""Checks of GPUs, ports, and SGLang flags that a recipe must not set."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from schemas.recipe.recipe import EvaluateRecipe, RlhfRecipe, SftRecipe

Message = str | None

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


def flags_allowed(r: RlhfRecipe | EvaluateRecipe) -> Message:
    for key, value in r.inference.flags.items():
        name = key.strip("-").replace("_", "-")
        if r.launcher.network and (reason := OPENING_FLAGS.get(name)):
            return f"inference.flags: a recipe cannot set {key} with launcher.network; leave it out, since {reason}"
        if reason := RESERVED_FLAGS.get(name):
            hint = f"set {reason} instead" if "." in reason or reason == "seed" else f"leave it out, since {reason}"
            return f"inference.flags: a recipe cannot set {key}; {hint}"
        if key != key.strip("-"):
            return f"inference.flags: write {key.strip('-')} without the dashes"
        if value is False or value is None:
            return f"inference.flags: {key}: {str(value).lower()} has no effect; leave it out"
    return None


def gpus_suffice(r: RlhfRecipe | EvaluateRecipe) -> Message:
    needed, gpus = r.inference.servers * r.inference.tensor_parallel, r.inference.gpus
    if gpus and len(gpus) != needed:
        return (
            f"inference.gpus: names {len(gpus)}, but {r.inference.servers} servers of {r.inference.tensor_parallel} "
            f"GPUs each need {needed}; name one for each, or leave it out"
        )
    return None


def gpus_differ(r: RlhfRecipe | EvaluateRecipe) -> Message:
    gpus, width = r.inference.gpus, r.inference.tensor_parallel
    groups = [gpus[at : at + width] for at in range(0, len(gpus), width)]
    if any(len(set(group)) < len(group) for group in groups):
        return "inference.gpus: one server's GPUs must differ; only different servers may share a GPU"
    return None


def trainer_gpus_suffice(r: RlhfRecipe | SftRecipe | EvaluateRecipe) -> Message:
    if r.flow != "evaluate" and r.trainer.gpus and len(set(r.trainer.gpus)) != r.trainer.ranks:
        return (
            f"trainer.gpus: names {len(set(r.trainer.gpus))} GPUs for {r.trainer.ranks} ranks; "
            "name one for each rank, or leave it out"
        )
    return None


def memory_is_shared(r: RlhfRecipe | EvaluateRecipe) -> Message:
    if r.flow != "rlhf" or not (r.inference.release_memory and r.inference.gpus and r.trainer.gpus):
        return None
    if set(r.inference.gpus) & set(r.trainer.gpus):
        return None
    return (
        "inference.release_memory: has no effect, since inference.gpus and trainer.gpus have none in common; "
        "leave it out, or name the trainer's GPUs in inference.gpus"
    )


def ports_exist(r: RlhfRecipe | EvaluateRecipe) -> Message:
    last = r.inference.first_port + r.inference.servers - 1
    if r.inference.first_port and last > 65535:
        return f"inference.first_port: {r.inference.servers} servers from {r.inference.first_port} need ports to {last}"
    return None


def sglang_is_a_process(r: RlhfRecipe | EvaluateRecipe) -> Message:
    if r.inference.engine == "sglang" and r.launcher.type == "inline":
        return "launcher.type: inline runs services in threads, and SGLang needs processes; use local"
    return None


INFERENCE_CHECKS: Final[tuple[Callable[[Any], Message], ...]] = (
    flags_allowed,
    gpus_suffice,
    gpus_differ,
    trainer_gpus_suffice,
    memory_is_shared,
    ports_exist,
    sglang_is_a_process,
)
