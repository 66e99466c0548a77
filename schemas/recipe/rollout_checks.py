"""Checks of what generation that runs ahead of training needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from schemas.recipe.recipe import RlhfRecipe

Message = str | None


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
