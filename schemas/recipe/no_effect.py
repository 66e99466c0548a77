"""Recipe fields that have an effect only with certain values of other fields; otherwise setting them is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from schemas.recipe.derived import is_decoupled, same_policy
from schemas.recipe.fields import is_set, leaves
from schemas.recipe.launcher import Slurm
from schemas.recipe.sources import SPLIT, source_kind

if TYPE_CHECKING:
    from schemas.recipe.recipe import BaseRecipe


@dataclass(frozen=True)
class NoEffect:
    """If `has_effect` is false, fields have no effect and must keep their defaults. `when` says when that is so.

    `names`: of the fields of one section, such as `inference.slots threads`.
    """

    names: str
    has_effect: Callable[[Any], bool]
    when: str

    @property
    def fields(self) -> list[str]:
        section, _, names = self.names.rpartition(".")
        return [f"{section}.{name}" for name in names.split()]


def _embedded(recipe: Any) -> bool:
    return bool(recipe.inference.engine == "embedded")


def evaluates(recipe: Any) -> bool:
    return bool(recipe.flow == "evaluate" or (recipe.flow == "rlhf" and recipe.evaluation.every > 0))


def _source_is(*kinds: str) -> Callable[[Any], bool]:
    return lambda recipe: source_kind(recipe.data.source) in kinds


def _asynchronous(recipe: Any) -> bool:
    return bool(recipe.rollout.max_head_offpolicyness > 0)


def has_splits(recipe: Any) -> bool:
    return source_kind(recipe.data.source) != "file" or SPLIT in recipe.data.source


SGLANG_ALONE: Final = (
    "tensor_parallel nodes gpus memory_fraction first_port release_memory transport prove_weights flags"
)
TIS: Final = "tis_bound tis_cap tis_low tis_high tis_level"
NO_EFFECT: Final = (
    NoEffect(
        "inference.deterministic slots threads",
        _embedded,
        "with inference.engine sglang: only the embedded engine uses it",
    ),
    NoEffect(
        f"inference.{SGLANG_ALONE}", lambda r: not _embedded(r), "with inference.engine embedded: only SGLang uses it"
    ),
    NoEffect(
        "inference.release_memory transport", lambda r: r.flow == "rlhf", "in an evaluate recipe, which trains nothing"
    ),
    NoEffect(
        f"launcher.slurm.{' '.join(Slurm.model_fields)}",
        lambda r: r.launcher.type == "slurm",
        "without launcher.type slurm",
    ),
    NoEffect(
        "rollout.worker_memory_mb", lambda r: r.launcher.type != "inline", "with launcher.type inline: no processes"
    ),
    NoEffect("launcher.ray.resources autoscaling", lambda r: r.launcher.type == "ray", "without launcher.type ray"),
    NoEffect("data.system", lambda r: r.data.chat, "without data.chat: set data.chat to true"),
    NoEffect("data.subset", _source_is("hub"), "unless data.source is the name of a Hugging Face data set"),
    NoEffect("data.prompt_column answer_column", _source_is("hub", "file"), "with sums://, which has no columns"),
    NoEffect("data.train_split", lambda r: r.flow != "evaluate", "in an evaluate recipe, which reads data.eval_split"),
    NoEffect("data.train_split", has_splits, f"with a file whose name has no {SPLIT}"),
    NoEffect("data.eval_split", lambda r: r.flow == "evaluate" or evaluates(r), "where nothing is evaluated"),
    NoEffect("data.eval_split", has_splits, f"with a file whose name has no {SPLIT}"),
    NoEffect(
        "workflow.arguments blocked_seconds verifies",
        lambda r: r.workflow.name != "single_turn",
        "with workflow.name single_turn",
    ),
    NoEffect(
        "reward.unverified_reward",
        lambda r: r.reward.on_unverified == "reward",
        "unless reward.on_unverified is reward",
    ),
    NoEffect(
        "algorithm.kl_coef", lambda r: r.algorithm.kl != "none", "with algorithm.kl none: set it to reward or loss"
    ),
    NoEffect(
        "algorithm.clip_ratio",
        lambda r: r.algorithm.minibatches > 1 or not r.algorithm.decoupled,
        "with one minibatch: the policy has not changed when the ratio is computed",
    ),
    NoEffect(
        f"algorithm.decoupled {TIS}",
        lambda r: not same_policy(r),
        "with server and trainer on the CPU in float32 (embedded and deterministic, local without gpus) and "
        "rollout.max_head_offpolicyness 0: their logprobs differ only by rounding, and the weight is 1",
    ),
    NoEffect(f"algorithm.{TIS}", lambda r: r.algorithm.decoupled, "with algorithm.decoupled false: no weight is used"),
    NoEffect("algorithm.tis_cap", lambda r: r.algorithm.tis_bound == "cap", "with tis_bound mask"),
    NoEffect("algorithm.tis_low tis_high", lambda r: r.algorithm.tis_bound == "mask", "unless tis_bound is mask"),
    NoEffect(
        "alerts.min_effective_sample_size max_behaviour_clipped",
        lambda r: _asynchronous(r) and is_decoupled(r),
        "with rollout.max_head_offpolicyness 0 or algorithm.decoupled false: it is not measured",
    ),
    NoEffect(
        "alerts.max_lag_beyond",
        lambda r: _asynchronous(r) and r.rollout.bound == "admission",
        "unless rollout.bound is admission and rollout.max_head_offpolicyness above 0: no lag exceeds η",
    ),
    NoEffect(
        "trainer.head_chunk_tokens",
        lambda r: r.trainer.head_chunk_tokens < r.trainer.micro_batch_tokens,
        "unless it is below trainer.micro_batch_tokens: all tokens of a pass are then one chunk",
    ),
    NoEffect(
        "trainer.lr_final",
        lambda r: r.trainer.lr_schedule != "constant",
        "with trainer.lr_schedule constant: set it to linear or cosine",
    ),
    NoEffect("trainer.zero_stage", lambda r: r.trainer.backend == "deepspeed", "unless trainer.backend is deepspeed"),
    NoEffect("trainer.replicas", lambda r: r.trainer.backend == "fsdp2", "unless trainer.backend is fsdp2"),
    NoEffect(
        "trainer.cpu_offload",
        lambda r: r.trainer.backend == "fsdp2" or (r.trainer.backend == "deepspeed" and r.trainer.zero_stage > 0),
        "with trainer.backend local, or with trainer.zero_stage 0: set the backend to fsdp2, or a higher stage",
    ),
    NoEffect(
        "rollout.bound interruption pace",
        _asynchronous,
        "with rollout.max_head_offpolicyness 0: groups wait for new weights",
    ),
    NoEffect("rollout.filters.arguments", lambda r: r.rollout.filters.function, "without rollout.filters.function"),
    NoEffect("rollout.filters.max_rejected", lambda r: r.rollout.filters.active, "without a filter"),
    NoEffect("evaluation.every", lambda r: r.flow != "evaluate", "in an evaluate recipe, which evaluates once"),
    NoEffect(
        "evaluation.limit samples temperature max_new_tokens stop group_seconds",
        evaluates,
        "with evaluation.every 0: nothing is evaluated (evaluation={} clears the section)",
    ),
)


def settings_without_effect(recipe: BaseRecipe) -> Iterator[str]:
    """A message for each field of `NO_EFFECT` that this recipe sets without effect."""
    given = {path for path, value, info in leaves(recipe) if is_set(info, value)}
    for row in NO_EFFECT:
        for field in row.fields:
            if field in given and not row.has_effect(recipe):
                yield f"{field}: has no effect {row.when}; otherwise leave it out"
