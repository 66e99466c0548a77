"""Checks that need more than one field of a recipe: contradictions, and settings without effect.

Each check is a small pure function from a recipe to a message (or None), listed in one of the tables below. They run in
pydantic's validators, so that the Prefect form is checked too. To add a check, add it to a table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from pydantic_core import PydanticCustomError

from schemas.recipe.idle import evaluates, idle_knobs, splits
from schemas.recipe.sources import SPLIT, SUFFIXES, holds_credentials, source_kind

if TYPE_CHECKING:
    from schemas.recipe.recipe import BaseRecipe, EvaluateRecipe, RlhfRecipe, SftRecipe

#: pydantic's error type under which all problems of a recipe are raised at once.
PROBLEMS: Final = "recipe_problems"
Message = str | None


def refuse_problems(recipe: BaseRecipe, checks: Iterable[Callable[[Any], Message]]) -> None:
    """Raise one pydantic error that lists every problem of `recipe`, if there is any."""
    secret = no_credentials(recipe)
    problems = [secret] if secret else [message for check in checks if (message := check(recipe))]
    problems += [] if secret else idle_knobs(recipe)  # other messages might repeat the secret
    if problems:
        raise PydanticCustomError(PROBLEMS, "{text}", {"text": "\n".join(problems), "problems": problems})


# ── every flow ──────────────────────────────────────────────────────────────────────────────────────────────────────


def one_model(r: BaseRecipe) -> Message:
    given = [name for name in ("path", "scratch", "warm_start") if getattr(r.model, name)]
    if len(given) == 1:
        return None
    found = f"both {' and '.join(given)} are given; clear one" if given else "none is given"
    return f"model: exactly one of path, scratch and warm_start is needed; {found}"


def warm_start_flow(r: BaseRecipe) -> Message:
    if r.model.warm_start and r.flow != "rlhf":
        return f"model.warm_start: only an rlhf recipe can start warm; a {r.flow} recipe needs path or scratch"
    return None


def run_path(r: BaseRecipe) -> Message:
    if r.model.path.startswith("run://") and not re.fullmatch(r"run://[a-z0-9][a-z0-9._-]*(@\d+)?", r.model.path):
        return f"model.path: '{r.model.path}' should look like run://NAME or run://NAME@VERSION"
    return None


def scratch_heads(r: BaseRecipe) -> Message:
    spec = r.model.scratch
    if spec and spec.hidden % (2 * spec.heads):
        return (
            f"model.scratch: hidden {spec.hidden} should be an even multiple of heads {spec.heads}, "
            "since rotary embeddings rotate pairs of a head's dimensions"
        )
    return None


def scratch_alphabet(r: BaseRecipe) -> Message:
    spec = r.model.scratch
    if spec and len(set(spec.alphabet)) < len(spec.alphabet):
        return "model.scratch.alphabet: a character occurs twice; name each once"
    return None


def scratch_sums(r: BaseRecipe) -> Message:
    spec = r.model.scratch
    if spec and source_kind(r.data.source) == "sums" and (missing := set("0123456789+=") - set(spec.alphabet)):
        return f"model.scratch.alphabet: sums need the characters {''.join(sorted(missing))} too"
    return None


def scratch_chat(r: BaseRecipe) -> Message:
    if r.model.scratch and r.data.chat:
        return "data.chat: a scratch model has no chat template; set data.chat to false"
    return None


def template_prompt(r: BaseRecipe) -> Message:
    if "{prompt}" not in r.data.template:
        return "data.template: must contain {prompt}, where the row's prompt goes"
    return None


def source_named(r: BaseRecipe) -> Message:
    source = r.data.source
    if not source:
        return "data.source: is empty; name a data set, a file, a URL or sums://TERMS"
    if source_kind(source) == "file" and PurePosixPath(source).suffix not in SUFFIXES:
        return f"data.source: '{source}' should end with {', '.join(SUFFIXES)}"
    return None


def split_placeholder(r: BaseRecipe) -> Message:
    if source_kind(r.data.source) != "file" and SPLIT in r.data.source:
        return f"data.source: {SPLIT} is for files; a data set's splits are named by train_split and eval_split"
    return None


def no_credentials(r: BaseRecipe) -> Message:
    """A recipe is stored with its run and shown by Prefect, so it must contain no secret."""
    for field, url in (("store.url", r.store.url), ("data.source", r.data.source)):
        if holds_credentials(url):
            return f"{field}: holds credentials; replace them, and put them into the environment (AWS_ACCESS_KEY_ID, …)"
    return None


def network_named(r: BaseRecipe) -> Message:
    here = r.launcher.type in ("local", "inline")
    if here and r.launcher.network:
        return f"launcher.network: has no effect with launcher.type {r.launcher.type}, whose services use loopback"
    if not here and not r.launcher.network:
        return (
            f"launcher.network: launcher.type {r.launcher.type} needs the network in which services listen, such as "
            "10.0.0.0/24 (`ip -brief address` lists this machine's)"
        )
    return None


BASE_CHECKS: Final[tuple[Callable[[BaseRecipe], Message], ...]] = (
    one_model,
    warm_start_flow,
    run_path,
    scratch_heads,
    scratch_alphabet,
    scratch_sums,
    scratch_chat,
    template_prompt,
    source_named,
    split_placeholder,
    network_named,
)


# ── training ────────────────────────────────────────────────────────────────────────────────────────────────────────


def micro_batch_holds_sample(r: RlhfRecipe | SftRecipe) -> Message:
    if r.trainer.micro_batch_tokens < r.model.max_length:
        return (
            f"trainer.micro_batch_tokens: {r.trainer.micro_batch_tokens} holds no sample of model.max_length "
            f"{r.model.max_length} tokens; raise it or shorten the samples"
        )
    return None


def ranks_on_nodes(r: RlhfRecipe | SftRecipe) -> Message:
    if r.trainer.ranks % r.trainer.nodes:
        return f"trainer.nodes: {r.trainer.ranks} ranks cannot be split evenly over {r.trainer.nodes} machines"
    if r.trainer.nodes > 1 and not r.launcher.network:
        return f"trainer.nodes: {r.trainer.nodes} machines need a launcher.type of several, such as slurm or ray"
    return None


def replicas_of_ranks(r: RlhfRecipe | SftRecipe) -> Message:
    trainer = r.trainer
    if trainer.replicas == 1 or trainer.backend != "fsdp2":
        return None
    if trainer.ranks % trainer.replicas:
        return f"trainer.replicas: {trainer.ranks} ranks cannot be split evenly over {trainer.replicas} copies"
    if trainer.replicas % trainer.nodes:
        return (
            f"trainer.replicas: {trainer.replicas} copies would be split across {trainer.nodes} machines; make it a "
            "multiple of trainer.nodes, so that each copy is inside one machine"
        )
    return None


def schedule_decays(r: RlhfRecipe | SftRecipe) -> Message:
    if r.trainer.lr_schedule != "constant" and r.trainer.lr_final == 1:
        return f"trainer.lr_schedule: {r.trainer.lr_schedule} has no effect with lr_final 1; set lr_final below 1"
    return None


def warmup_ends(r: RlhfRecipe | SftRecipe) -> Message:
    steps = r.schedule.iterations * (r.algorithm.minibatches if r.flow == "rlhf" else r.algorithm.steps)
    if r.trainer.warmup_steps >= steps:
        return f"trainer.warmup_steps: {r.trainer.warmup_steps} is not over within the run's {steps} steps; lower it"
    return None


def weights_every_written(r: RlhfRecipe | SftRecipe) -> Message:
    if r.flow != "rlhf" or r.trainer.weights_every == 1:
        return None
    if r.inference.engine == "embedded" or r.inference.transport == "store":
        return (
            f"trainer.weights_every: {r.trainer.weights_every} would keep new weights from the servers, which get them "
            "only through the store; set it to 1, or inference.engine to sglang and inference.transport to auto"
        )
    return None


TRAINING_CHECKS: Final[tuple[Callable[[Any], Message], ...]] = (
    micro_batch_holds_sample,
    ranks_on_nodes,
    replicas_of_ranks,
    schedule_decays,
    warmup_ends,
    weights_every_written,
)


# ── generation ──────────────────────────────────────────────────────────────────────────────────────────────────────


def evaluation_fits(r: RlhfRecipe | EvaluateRecipe) -> Message:
    if evaluates(r) and r.evaluation.max_new_tokens >= r.model.max_length:
        return _no_room("evaluation", r.evaluation.max_new_tokens, r.model.max_length)
    return None


def _no_room(part: str, new_tokens: int, length: int) -> str:
    return (
        f"{part}.max_new_tokens: {new_tokens} leaves no room for a prompt in model.max_length {length}; "
        "lower one or raise the other"
    )


def evaluation_samples(r: RlhfRecipe | EvaluateRecipe) -> Message:
    if r.evaluation.samples > 1 and r.evaluation.temperature == 0:
        return "evaluation.samples: several greedy completions are all the same; set evaluation.temperature above 0"
    return None


def evaluation_stops(r: RlhfRecipe | EvaluateRecipe) -> Message:
    return "evaluation.stop: an empty string ends every completion; remove it" if "" in r.evaluation.stop else None


def wall_after_cpu(r: RlhfRecipe | EvaluateRecipe) -> Message:
    cpu, wall = r.reward.timeout_seconds, r.reward.wall_seconds
    if 0 < wall < cpu:
        return (
            f"reward.wall_seconds: {wall:g} ends a verifier before it can use reward.timeout_seconds {cpu:g} of CPU; "
            "raise one or lower the other"
        )
    return None


EVALUATION_CHECKS: Final[tuple[Callable[[Any], Message], ...]] = (
    evaluation_fits,
    evaluation_samples,
    evaluation_stops,
    wall_after_cpu,
)


# ── GRPO ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def rollout_fits(r: RlhfRecipe) -> Message:
    if r.rollout.max_new_tokens >= r.model.max_length:
        return _no_room("rollout", r.rollout.max_new_tokens, r.model.max_length)
    return None


def rollout_stops(r: RlhfRecipe) -> Message:
    return "rollout.stop: an empty string ends every completion; remove it" if "" in r.rollout.stop else None


def group_has_spread(r: RlhfRecipe) -> Message:
    if r.rollout.group_size == 1 and r.algorithm.reward_norm != "none":
        return (
            f"rollout.group_size: a group of 1 has no mean or deviation of its own, so algorithm.reward_norm "
            f"{r.algorithm.reward_norm} makes every advantage 0; raise group_size or set reward_norm to none"
        )
    return None


def minibatches_divide(r: RlhfRecipe) -> Message:
    samples = r.rollout.groups * r.rollout.group_size
    if samples % r.algorithm.minibatches:
        return (
            f"algorithm.minibatches: {r.algorithm.minibatches} does not divide rollout.groups · group_size = {samples}"
            f"; the nearest that do: {_divisors_near(samples, r.algorithm.minibatches)}"
        )
    return None


def _divisors_near(number: int, wanted: int) -> str:
    below = max(d for d in range(1, min(wanted, number) + 1) if number % d == 0)
    above = next((d for d in range(wanted, number + 1) if number % d == 0), below)
    return str(below) if above == below else f"{below}, {above}"


def kl_has_weight(r: RlhfRecipe) -> Message:
    if r.algorithm.kl != "none" and r.algorithm.kl_coef == 0:
        return f"algorithm.kl: {r.algorithm.kl} has no effect with kl_coef 0; set kl_coef above 0 or kl to none"
    return None


def held_out(r: RlhfRecipe) -> Message:
    if not evaluates(r):
        return None
    if not splits(r):
        return (
            f"evaluation.every: data.source '{r.data.source}' is one file, so that evaluation would read the training "
            f"data; use {SPLIT} in its name or set every to 0"
        )
    if r.data.train_split == r.data.eval_split:
        return (
            f"data.eval_split: '{r.data.eval_split}' is the training split; "
            "name a held-out split or set evaluation.every to 0"
        )
    return None


GRPO_CHECKS: Final[tuple[Callable[[RlhfRecipe], Message], ...]] = (
    rollout_fits,
    rollout_stops,
    group_has_spread,
    minibatches_divide,
    kl_has_weight,
    held_out,
)


# ── asynchronous generation ─────────────────────────────────────────────────────────────────────────────────────────


def memory_is_not_lent(r: RlhfRecipe) -> Message:
    if r.rollout.max_head_offpolicyness > 0 and r.inference.release_memory:
        return (
            "inference.release_memory: servers cannot release their memory while they generate; "
            "set rollout.max_head_offpolicyness to 0, or inference.release_memory to false"
        )
    return None


def groups_differ(r: RlhfRecipe) -> Message:
    if r.rollout.group_size == 1 and r.rollout.filters.equal_rewards:
        return "rollout.filters.equal_rewards: rejects every group of rollout.group_size 1; clear it or raise the size"
    return None


def success_window(r: RlhfRecipe) -> Message:
    low, high = r.rollout.filters.min_success, r.rollout.filters.max_success
    if low > high:
        return f"rollout.filters.min_success: {low:g} is above max_success {high:g}, so that every group is rejected"
    return None


ROLLOUT_CHECKS: Final[tuple[Callable[[Any], Message], ...]] = (
    memory_is_not_lent,
    groups_differ,
    success_window,
)


#: Keys that other systems have and a recipe refuses, with the reason.
REFUSED_KEYS: Final = {
    f"rollout.{name}": "rollouts are sampled from the whole vocabulary, because a trainer cannot reproduce the "
    "probabilities of truncated sampling; leave it out, and lower rollout.temperature if need be"
    for name in ("top_p", "top_k", "min_p")
}
