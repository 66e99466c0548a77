"""Dynamic sampling: by which rewards a finished group is rejected, so that another takes its place."""

from __future__ import annotations

from typing import Any, Final

from schemas.recipe.fields import Section, operational, semantic

#: Why groups are rejected: their attempts have failed, or one of the filters below.
REASONS: Final = ("failed", "equal_rewards", "min_success", "max_success", "function")


class Filters(Section):
    """Dynamic sampling (DAPO, arXiv:2503.14476, §3.2): finished groups that are rejected for their rewards.

    With a filter, groups are verified as they finish. Each rejected group lets the next prompt's begin: no more are
    generated than that. A sample without a reward does not count; a group in which no sample has one is not rejected.
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
        "`arguments`, it returns why the group is rejected, or nothing.",
    )
    arguments: dict[str, Any] = semantic({}, before={}, description="Keyword arguments of `function`.")
    max_rejected: int | None = operational(
        None,
        ge=1,
        le=1_000_000_000,
        description="So many rejected groups, while no batch is filled, end the run; none: ten batches' worth.",
    )

    @property
    def active(self) -> bool:
        """Whether any filter is on."""
        return bool(self.equal_rewards or self.min_success > 0 or self.max_success < 1 or self.function)
