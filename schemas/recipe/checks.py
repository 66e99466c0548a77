"""Checks that need more than one field of a recipe: contradictions, and settings without effect.

Each function yields a message for every problem that it finds in a recipe. They run in pydantic's validators, so that
the Prefect form is checked too."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from ipaddress import ip_network
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from pydantic_core import PydanticCustomError

from schemas.recipe.no_effect import evaluates, has_splits, settings_without_effect
from schemas.recipe.sources import SPLIT, SUFFIXES, holds_credentials, source_kind

if TYPE_CHECKING:
    from schemas.recipe.recipe import BaseRecipe, EvaluateRecipe, RlhfRecipe, SftRecipe

#: pydantic's error type under which all problems of a recipe are raised at once.
PROBLEMS: Final = "recipe_problems"


def refuse_problems(recipe: BaseRecipe, checks: Iterable[Callable[[Any], Iterable[str]]]) -> None:
    """Raise one pydantic error that lists every problem of `recipe`, if there is any."""
    secrets = list(credentials(recipe))  # other messages might repeat them
    problems = secrets or [message for check in (*checks, settings_without_effect) for message in check(recipe)]
    if problems:
        raise PydanticCustomError(PROBLEMS, "{text}", {"text": "\n".join(problems), "problems": problems})


# ── every flow ──────────────────────────────────────────────────────────────────────────────────────────────────────


def credentials(r: BaseRecipe) -> Iterator[str]:
    """A recipe is stored with its run and shown by Prefect, so it must contain no secret."""
    for field, url in (("store.url", r.store.url), ("data.source", r.data.source)):
        if holds_credentials(url):
            yield f"{field}: holds credentials; replace them, and put them into the environment (AWS_ACCESS_KEY_ID, …)"


def check_model(r: BaseRecipe) -> Iterator[str]:
    """The initial weights are named once; a scratch model can be built and fits its data."""
    given, spec = [name for name in ("path", "scratch", "warm_start") if getattr(r.model, name)], r.model.scratch
    if len(given) != 1:
        found = f"both {' and '.join(given)} are given; clear one" if given else "none is given"
        yield f"model: exactly one of path, scratch and warm_start is needed; {found}"
    if r.model.warm_start and r.flow != "rlhf":
        yield f"model.warm_start: only an rlhf recipe can start warm; a {r.flow} recipe needs path or scratch"
    if r.model.path.startswith("run://") and not re.fullmatch(r"run://[a-z0-9][a-z0-9._-]*(@\d+)?", r.model.path):
        yield f"model.path: '{r.model.path}' should look like run://NAME or run://NAME@VERSION"
    if spec and spec.hidden % (2 * spec.heads):
        yield (
            f"model.scratch: hidden {spec.hidden} should be an even multiple of heads {spec.heads}, "
            "since rotary embeddings rotate pairs of a head's dimensions"
        )
    if spec and len(set(spec.alphabet)) < len(spec.alphabet):
        yield "model.scratch.alphabet: a character occurs twice; name each once"
    if spec and source_kind(r.data.source) == "sums" and (missing := set("0123456789+=") - set(spec.alphabet)):
        yield f"model.scratch.alphabet: sums need the characters {''.join(sorted(missing))} too"
    if spec and r.data.chat:
        yield "data.chat: a scratch model has no chat template; set data.chat to false"


def check_data(r: BaseRecipe) -> Iterator[str]:
    """The source can be read, and the template has a place for the prompt."""
    source, kind = r.data.source, source_kind(r.data.source)
    if "{prompt}" not in r.data.template:
        yield "data.template: must contain {prompt}, where the row's prompt goes"
    if not source:
        yield "data.source: is empty; name a data set, a file, a URL or sums://TERMS"
    elif kind == "file" and PurePosixPath(source).suffix not in SUFFIXES:
        yield f"data.source: '{source}' should end with {', '.join(SUFFIXES)}"
    if kind != "file" and SPLIT in source:
        yield f"data.source: {SPLIT} is for files; a data set's splits are named by train_split and eval_split"


def check_network(r: BaseRecipe) -> Iterator[str]:
    """Services of several machines need a network; those of one use loopback."""
    here = r.launcher.type in ("local", "inline")
    if here and r.launcher.network:
        yield f"launcher.network: has no effect with launcher.type {r.launcher.type}, whose services use loopback"
    if not here and not r.launcher.network:
        yield (
            f"launcher.network: launcher.type {r.launcher.type} needs the network in which services listen, such as "
            "10.0.0.0/24 (`ip -brief address` lists this machine's)"
        )
    try:
        ip_network(r.launcher.network or "::", strict=False)
    except ValueError:
        yield f"launcher.network: '{r.launcher.network}' is no network; write it by its address, such as 10.0.0.0/24"


#: What services exchange between machines that cannot be encrypted, by the field that has them do so.
UNENCRYPTED: Final = {
    "trainer.nodes": "between the machines of a trainer gloo and NCCL encrypt nothing: rows, gradients and weights",
    "inference.nodes": "between the machines of a server SGLang encrypts nothing, prompts included, and runs what "
    "anyone sends who reaches its ports",
    "inference.transport": "NCCL encrypts nothing: weights",
}


def check_trusted(r: BaseRecipe) -> Iterator[str]:
    """What cannot be encrypted is sent only in a network that the recipe trusts."""
    if r.launcher.trust_network and not r.launcher.network:
        yield "launcher.trust_network: has no effect without launcher.network: services of one machine use loopback"
    if not r.launcher.network or r.launcher.trust_network:
        return
    for field, why in UNENCRYPTED.items():
        section, _, name = field.partition(".")
        if getattr(getattr(r, section, None), name, 1) not in (1, "auto", "store", "tensor"):
            yield f"{field}: {why}; set launcher.trust_network=true if launcher.network is safe"


# ── training ────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_ranks(r: RlhfRecipe | SftRecipe) -> Iterator[str]:
    """Ranks can be split over machines and copies of the weights, and each has a GPU."""
    trainer = r.trainer
    if trainer.ranks % trainer.nodes:
        yield f"trainer.nodes: {trainer.ranks} ranks cannot be split evenly over {trainer.nodes} machines"
    elif trainer.nodes > 1 and not r.launcher.network:
        yield f"trainer.nodes: {trainer.nodes} machines need a launcher.type of several, such as slurm or ray"
    split = trainer.replicas > 1 and trainer.backend == "fsdp2"
    if split and trainer.ranks % trainer.replicas:
        yield f"trainer.replicas: {trainer.ranks} ranks cannot be split evenly over {trainer.replicas} copies"
    elif split and trainer.replicas % trainer.nodes:
        yield (
            f"trainer.replicas: {trainer.replicas} copies would be split across {trainer.nodes} machines; make it a "
            "multiple of trainer.nodes, so that each copy is inside one machine"
        )
    if (gpus := len(set(trainer.gpus))) and gpus != trainer.ranks:
        yield f"trainer.gpus: names {gpus} GPUs for {trainer.ranks} ranks; name one for each rank, or leave it out"


def check_training(r: RlhfRecipe | SftRecipe) -> Iterator[str]:
    """A sample fits into a pass, and the learning rate's schedule into the run."""
    trainer = r.trainer
    if trainer.micro_batch_tokens < r.model.max_length:
        yield (
            f"trainer.micro_batch_tokens: {trainer.micro_batch_tokens} holds no sample of model.max_length "
            f"{r.model.max_length} tokens; raise it or shorten the samples"
        )
    if trainer.lr_schedule != "constant" and trainer.lr_final == 1:
        yield f"trainer.lr_schedule: {trainer.lr_schedule} has no effect with lr_final 1; set lr_final below 1"
    steps = r.schedule.iterations * (r.algorithm.minibatches if r.flow == "rlhf" else r.algorithm.steps)
    if trainer.warmup_steps >= steps:
        yield f"trainer.warmup_steps: {trainer.warmup_steps} is not over within the run's {steps} steps; lower it"
    elif trainer.warmup_steps == steps - 1 > 0 and trainer.lr_schedule != "constant":
        yield (
            f"trainer.warmup_steps: {trainer.warmup_steps} leaves one of the run's {steps} steps, at the peak: the "
            f"{trainer.lr_schedule} decay needs two; lower it, or set trainer.lr_schedule to constant"
        )


def check_weights_every(r: RlhfRecipe) -> Iterator[str]:
    """Servers that get weights only through the store need every version there."""
    if r.trainer.weights_every > 1 and (r.inference.engine == "embedded" or r.inference.transport == "store"):
        yield (
            f"trainer.weights_every: {r.trainer.weights_every} would keep new weights from the servers, which get them "
            "only through the store; set it to 1, or inference.engine to sglang and inference.transport to auto"
        )


# ── generation ──────────────────────────────────────────────────────────────────────────────────────────────────────


def check_sampling(part: str, r: RlhfRecipe | EvaluateRecipe) -> Iterator[str]:
    """Completions of the section `part` fit into the model's context and can have a length."""
    settings, length = getattr(r, part), r.model.max_length
    if settings.max_new_tokens >= length and (part == "rollout" or evaluates(r)):
        yield (
            f"{part}.max_new_tokens: {settings.max_new_tokens} leaves no room for a prompt in model.max_length "
            f"{length}; lower one or raise the other"
        )
    if "" in settings.stop:
        yield f"{part}.stop: an empty string ends every completion; remove it"


def check_evaluation(r: RlhfRecipe | EvaluateRecipe) -> Iterator[str]:
    """Evaluated completions differ, and a verifier's two limits agree."""
    yield from check_sampling("evaluation", r)
    if r.evaluation.samples > 1 and r.evaluation.temperature == 0:
        yield "evaluation.samples: several greedy completions are all the same; set evaluation.temperature above 0"
    cpu, wall = r.reward.timeout_seconds, r.reward.wall_seconds
    if 0 < wall < cpu:
        yield (
            f"reward.wall_seconds: {wall:g} ends a verifier before it can use reward.timeout_seconds {cpu:g} of CPU; "
            "raise one or lower the other"
        )


def check_held_out(r: RlhfRecipe) -> Iterator[str]:
    """A run evaluates on rows that it does not train on."""
    if evaluates(r) and not has_splits(r):
        yield (
            f"evaluation.every: data.source '{r.data.source}' is one file, so that evaluation would read the training "
            f"data; use {SPLIT} in its name or set every to 0"
        )
    elif evaluates(r) and r.data.train_split == r.data.eval_split:
        yield (
            f"data.eval_split: '{r.data.eval_split}' is the training split; "
            "name a held-out split or set evaluation.every to 0"
        )


# ── GRPO ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_grpo(r: RlhfRecipe) -> Iterator[str]:
    """The batch can be split, and its rewards say something."""
    if r.rollout.group_size == 1 and r.algorithm.reward_norm != "none":
        yield (
            f"rollout.group_size: a group of 1 has no mean or deviation of its own, so algorithm.reward_norm "
            f"{r.algorithm.reward_norm} makes every advantage 0; raise group_size or set reward_norm to none"
        )
    samples = r.rollout.groups * r.rollout.group_size
    if samples % r.algorithm.minibatches:
        yield (
            f"algorithm.minibatches: {r.algorithm.minibatches} does not divide rollout.groups · group_size = {samples}"
            f"; the nearest that do: {_divisors_near(samples, r.algorithm.minibatches)}"
        )
    if r.algorithm.kl != "none" and r.algorithm.kl_coef == 0:
        yield f"algorithm.kl: {r.algorithm.kl} has no effect with kl_coef 0; set kl_coef above 0 or kl to none"


def _divisors_near(number: int, wanted: int) -> str:
    below = max(d for d in range(1, min(wanted, number) + 1) if number % d == 0)
    above = next((d for d in range(wanted, number + 1) if number % d == 0), below)
    return str(below) if above == below else f"{below}, {above}"


def check_rollout(r: RlhfRecipe) -> Iterator[str]:
    """Servers can generate all the time with η > 0, filters leave some groups, and memory is released to a trainer."""
    yield from check_sampling("rollout", r)
    filters = r.rollout.filters
    if r.rollout.max_head_offpolicyness > 0 and r.inference.release_memory:
        yield (
            "inference.release_memory: servers cannot release their memory while they generate; "
            "set rollout.max_head_offpolicyness to 0, or inference.release_memory to false"
        )
    if r.rollout.group_size == 1 and filters.equal_rewards:
        yield "rollout.filters.equal_rewards: rejects every group of rollout.group_size 1; clear it or raise the size"
    if filters.min_success > filters.max_success:
        yield (
            f"rollout.filters.min_success: {filters.min_success:g} is above max_success {filters.max_success:g}, so "
            "that every group is rejected"
        )
    servers, trainer = set(r.inference.gpus), set(r.trainer.gpus)
    if r.inference.release_memory and servers and trainer and not servers & trainer:
        yield (
            "inference.release_memory: has no effect, since inference.gpus and trainer.gpus have none in common; "
            "leave it out, or name the trainer's GPUs in inference.gpus"
        )


# ── GPUs, ports, and SGLang's flags ───────────────────────────────────────────────────────────────────────────────────


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
    **dict.fromkeys(("nnodes", "node-rank", "dist-init-addr", "nccl-init-addr"), "inference.nodes"),
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
    """Each server has its GPUs, which can be split over its machines, a port and a process."""
    gpus, width, servers = r.inference.gpus, r.inference.tensor_parallel, r.inference.servers
    if width % r.inference.nodes:
        yield (
            f"inference.nodes: the {width} GPUs of inference.tensor_parallel cannot be split evenly over "
            f"{r.inference.nodes} machines; make it a multiple of inference.nodes"
        )
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


# ── all of them ───────────────────────────────────────────────────────────────────────────────────────────────────────


BASE_CHECKS: Final = (check_model, check_data, check_network, check_trusted)
TRAINING_CHECKS: Final = (check_training, check_ranks)
EVALUATION_CHECKS: Final = (check_evaluation, check_flags, check_servers)
GRPO_CHECKS: Final = (check_weights_every, check_grpo, check_held_out, check_rollout)

#: Keys that other systems have and a recipe refuses, with the reason.
REFUSED_KEYS: Final = {
    f"rollout.{name}": "rollouts are sampled from the whole vocabulary, because a trainer cannot reproduce the "
    "probabilities of truncated sampling; leave it out, and lower rollout.temperature if need be"
    for name in ("top_p", "top_k", "min_p")
} | {"run": "names no field; run=NAME is a word of its own for `arealflow run`, and --param run=NAME for a deployment"}
