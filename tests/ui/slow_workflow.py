"""A workflow that goes on once something more has been said about its stage."""

from __future__ import annotations

from waiting import until

from areal_tasks.workflows import Prompt, Sample, SingleTurn, WorkflowContext

#: Lines about progress, which the test adds to.
SAID: list[str] = []


class ReportedTurn(SingleTurn):
    """As `single_turn`, after a further line."""

    async def run(self, prompt: Prompt, context: WorkflowContext) -> list[Sample]:
        before = len(SAID)
        await until(lambda: len(SAID) > before, "a line about progress")
        return await super().run(prompt, context)
