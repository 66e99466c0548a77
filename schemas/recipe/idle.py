"""Recipe fields that have an effect only with certain values of others; setting them without effect is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel

from schemas.recipe.derived import is_decoupled, same_policy
from schemas.recipe.fields import is_set
from schemas.recipe.launcher import Slurm
from schemas.recipe.sources import SPLIT, source_kind

if TYPE_CHECKING:
    from schemas.recipe.recipe import BaseRecipe


@dataclass(frozen=True)
class Idle:
    """`field` has an effect only if `acts` holds, else it must keep its default. `when` describes the latter case."""

    field: str
    acts: Callable[[Any], bool]
    when: str


def _embedded(recipe: Any) -> bool:
    engine: str = recipe.inference.engine
    return engine == "embedded"


def _on_slurm(recipe: Any) -> bool:
    launcher: str = recipe.launcher.type
    return launcher == "slurm"


def evaluates(recipe: Any) -> bool:
    return bool(recipe.flow == "evaluate" or (recipe.flow == "rlhf" and recipe.evaluation.every > 0))


def _source(*kinds: str) -> Callable[[Any], bool]:
    return lambda recipe: source_kind(recipe.data.source) in kinds


def _asynchronous(recipe: Any) -> bool:
    return bool(recipe.rollout.max_head_offpolicyness > 0)


def splits(recipe: Any) -> bool:
    return source_kind(recipe.data.source) != "file" or SPLIT in recipe.data.source


SGLANG_ALONE: Final = (
    "tensor_parallel", "gpus", "memory_fraction", "first_port", "release_memory", "transport", "prove_weights", "flags",
)  # fmt: skip
TIS: Final = ("tis_bound", "tis_cap", "tis_low", "tis_high", "tis_level")
IDLE: Final = (
    Idle("inference.deterministic", _embedded, "with inference.engine sglang: only the embedded engine uses it"),
    Idle("inference.slots", _embedded, "with inference.engine sglang: only the embedded engine uses it"),
    Idle("inference.threads", _embedded, "with inference.engine sglang: only the embedded engine uses it"),
    *(
        Idle(f"inference.{name}", lambda r: not _embedded(r), "with inference.engine embedded: only SGLang uses it")
        for name in SGLANG_ALONE
    ),
    *(
        Idle(f"inference.{name}", lambda r: r.flow == "rlhf", "in an evaluate recipe, which trains nothing")
        for name in ("release_memory", "transport")
    ),
    *(Idle(f"launcher.slurm.{name}", _on_slurm, "without launcher.type slurm") for name in Slurm.model_fields),
    Idle("rollout.worker_memory_mb", lambda r: r.launcher.type != "inline", "with launcher.type inline: no processes"),
    *(
        Idle(f"launcher.ray.{name}", lambda r: r.launcher.type == "ray", "without launcher.type ray")
        for name in ("resources", "autoscaling")
    ),
    Idle("data.system", lambda r: r.data.chat, "without data.chat: set data.chat to true"),
    Idle("data.subset", _source("hub"), "unless data.source is the name of a Hugging Face data set"),
    Idle("data.prompt_column", _source("hub", "file"), "with sums://, which has no columns"),
    Idle("data.answer_column", _source("hub", "file"), "with sums://, which has no columns"),
    Idle("data.train_split", lambda r: r.flow != "evaluate", "in an evaluate recipe, which reads data.eval_split"),
    Idle("data.train_split", splits, f"with a file whose name has no {SPLIT}"),
    Idle("data.eval_split", lambda r: r.flow == "evaluate" or evaluates(r), "where nothing is evaluated"),
    Idle("data.eval_split", splits, f"with a file whose name has no {SPLIT}"),
    *(
        Idle(f"workflow.{name}", lambda r: r.workflow.name != "single_turn", "with workflow.name single_turn")
        for name in ("arguments", "blocked_seconds", "verifies")
    ),
    Idle(
        "reward.unverified_reward",
        lambda r: r.reward.on_unverified == "reward",
        "unless reward.on_unverified is reward",
    ),
    Idle("algorithm.kl_coef", lambda r: r.algorithm.kl != "none", "with algorithm.kl none: set it to reward or loss"),
    Idle(
        "algorithm.clip_ratio",
        lambda r: r.algorithm.minibatches > 1 or not r.algorithm.decoupled,
        "with one minibatch: the policy has not changed when the ratio is computed",
    ),
    *(
        Idle(
            f"algorithm.{name}",
            lambda r: not same_policy(r),
            "with server and trainer on the CPU in float32 (embedded and deterministic, local without gpus) and "
            "rollout.max_head_offpolicyness 0: their logprobs differ only by rounding, and the weight is 1",
        )
        for name in ("decoupled", *TIS)
    ),
    *(
        Idle(f"algorithm.{name}", lambda r: r.algorithm.decoupled, "with algorithm.decoupled false: no weight is used")
        for name in TIS
    ),
    Idle("algorithm.tis_cap", lambda r: r.algorithm.tis_bound == "cap", "with tis_bound mask"),
    *(
        Idle(f"algorithm.{name}", lambda r: r.algorithm.tis_bound == "mask", "unless tis_bound is mask")
        for name in ("tis_low", "tis_high")
    ),
    *(
        Idle(
            f"alerts.{name}",
            lambda r: _asynchronous(r) and is_decoupled(r),
            "with rollout.max_head_offpolicyness 0 or algorithm.decoupled false: it is not measured",
        )
        for name in ("min_effective_sample_size", "max_behaviour_clipped")
    ),
    Idle(
        "alerts.max_lag_beyond",
        lambda r: _asynchronous(r) and r.rollout.bound == "admission",
        "unless rollout.bound is admission and rollout.max_head_offpolicyness above 0: no lag exceeds η",
    ),
    Idle(
        "trainer.head_chunk_tokens",
        lambda r: r.trainer.head_chunk_tokens < r.trainer.micro_batch_tokens,
        "unless it is below trainer.micro_batch_tokens: all tokens of a pass are then one chunk",
    ),
    Idle(
        "trainer.lr_final",
        lambda r: r.trainer.lr_schedule != "constant",
        "with trainer.lr_schedule constant: set it to linear or cosine",
    ),
    Idle(
        "trainer.zero_stage",
        lambda r: r.trainer.backend == "deepspeed",
        "unless trainer.backend is deepspeed",
    ),
    Idle("trainer.replicas", lambda r: r.trainer.backend == "fsdp2", "unless trainer.backend is fsdp2"),
    Idle(
        "trainer.cpu_offload",
        lambda r: r.trainer.backend == "fsdp2" or (r.trainer.backend == "deepspeed" and r.trainer.zero_stage > 0),
        "with trainer.backend local, or with trainer.zero_stage 0: set the backend to fsdp2, or a higher stage",
    ),
    *(
        Idle(f"rollout.{name}", _asynchronous, "with rollout.max_head_offpolicyness 0: groups wait for new weights")
        for name in ("bound", "interruption", "pace")
    ),
    Idle("rollout.filters.arguments", lambda r: r.rollout.filters.function, "without rollout.filters.function"),
    Idle("rollout.filters.max_rejected", lambda r: r.rollout.filters.active, "without a filter"),
    Idle("evaluation.every", lambda r: r.flow != "evaluate", "in an evaluate recipe, which evaluates once"),
    *(
        Idle(
            f"evaluation.{name}",
            evaluates,
            "with evaluation.every 0: nothing is evaluated (evaluation={} clears the section)",
        )
        for name in ("limit", "samples", "temperature", "max_new_tokens", "stop", "group_seconds")
    ),
)


def idle_knobs(recipe: BaseRecipe) -> Iterator[str]:
    """A message for each field of `IDLE` that this recipe sets without effect."""
    for idle in IDLE:
        owner, _, name = idle.field.rpartition(".")
        part = _section(recipe, owner)
        if part is not None and name in type(part).model_fields and not idle.acts(recipe) and _is_set(part, name):
            yield f"{idle.field}: has no effect {idle.when}; otherwise leave it out"


def _section(recipe: BaseRecipe, path: str) -> BaseModel | None:
    found: Any = recipe
    for name in path.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, BaseModel) else None


def _is_set(part: BaseModel, name: str) -> bool:
    return is_set(type(part).model_fields[name], getattr(part, name))
