"""Dynamic sampling: rejects finished groups by their rewards, so that other groups replace them."""

from __future__ import annotations

from typing import Any, Final

from schemas.recipe.fields import Section, operational, semantic

#: Why groups are rejected: all attempts failed, or one of the filters below applies.
REASONS: Final = ("failed", "equal_rewards", "min_success", "max_success", "function")


class Filters(Section):
    """Dynamic sampling (DAPO, arXiv:2503.14476, §3.2): rejects finished groups by their rewards.

    With a filter, groups are verified as they finish. Each rejected group is replaced by one group of the next prompt.
    Samples without a reward do not count; a group in which no sample has a reward is not rejected.
    """

    equal_rewards: bool = semantic(
        False, before=False, description="Reject groups whose rewards are all equal: GRPO learns nothing from them."
    )
    min_success: float = semantic(
        0.0, before=0.0, ge=0, le=1, description="Reject groups in which a smaller share of the samples is `correct`."
    )
    max_success: float = semantic(
        1.0, before=1.0, ge=0, le=1, description="Reject groups in which a greater share of the samples is `correct`."
    )
    function: str = semantic(
        "",
        before="",
        description="Your own filter, as `package.module:object`: called with a group's samples, their rewards and "
        "`arguments`, it returns the reason to reject the group, or nothing.",
    )
    arguments: dict[str, Any] = semantic({}, before={}, description="Keyword arguments of `function`.")
    max_rejected: int | None = operational(
        None,
        ge=1,
        le=1_000_000_000,
        description="The run stops at this many rejected groups while a batch is filled; none: ten batches' worth.",
    )

    @property
    def active(self) -> bool:
        return bool(self.equal_rewards or self.min_success > 0 or self.max_success < 1 or self.function)
