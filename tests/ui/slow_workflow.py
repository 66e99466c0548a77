"""A workflow that takes its time, for tests of what is said meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from areal_tasks.workflows import Prompt, Sample, SingleTurn, WorkflowContext


class SlowTurn(SingleTurn):
    """As `single_turn`, a tenth of a second later."""

    async def run(self, prompts: Sequence[Prompt], context: WorkflowContext) -> list[Sample]:
        await asyncio.sleep(0.1)
        return await super().run(prompts, context)
