"""Dynamic sampling: finished groups that are rejected because of their rewards (DAPO, arXiv:2503.14476, §3.2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean

from areal_tasks.rewards.pool import VerifyResult
from areal_tasks.user_code import find_function
from areal_tasks.workflows import Sample
from schemas.recipe.sections import Filters

#: Called with a group's samples and their rewards (NaN: none); returns why the group is rejected, or None.
Function = Callable[[list[Sample], list[float]], str | None]


def load_function(filters: Filters) -> Function | None:
    """The user's filter with its arguments bound; None where the recipe names none.

    Raises:
        UserError: there is no such function, or it does not take these arguments.
    """
    if not filters.function:
        return None
    return find_function(filters.function, "rollout.filters.function", ("samples", "rewards"), filters.arguments)


def rejection(results: Sequence[VerifyResult], filters: Filters) -> str:
    """Why a group is rejected, as `filter: reason`; empty if it is not."""
    judged = [result for result in results if not math.isnan(result.reward)]
    if not judged:
        return ""
    if filters.equal_rewards and len({result.reward for result in judged}) == 1:
        return f"equal_rewards: all are {judged[0].reward:g}"
    success = sum(result.verdict == "correct" for result in judged) / len(judged)
    if success < filters.min_success:
        return f"min_success: {success:.3g} of the samples are correct"
    if success > filters.max_success:
        return f"max_success: {success:.3g} of the samples are correct"
    return ""


def rejection_by(function: Function, samples: Sequence[Sample], results: Sequence[VerifyResult]) -> str:
    """Why the user's filter rejects a group; empty if it returns None. TypeError unless it returns a string or None."""
    reason = function(list(samples), [result.reward for result in results])
    if not isinstance(reason, str | None):
        raise TypeError(f"rollout.filters.function returned {reason!r}, which is neither a string nor None")
    return f"function: {reason}" if reason else ""


def kind_of(reason: str) -> str:
    """What rejected a group: the name of a filter, or `failed`."""
    return reason.partition(":")[0]


def mean_reward(results: Sequence[VerifyResult]) -> float | None:
    """The mean reward of the samples that have one; None if none has."""
    rewards = [result.reward for result in results if not math.isnan(result.reward)]
    return fmean(rewards) if rewards else None
