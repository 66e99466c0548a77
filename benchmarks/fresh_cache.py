"""A workflow for a comparison: samples are not trained on from the token where their KV cache is of older weights."""

from __future__ import annotations

import numpy as np

from areal_tasks.workflows import Prompt, Sample, SingleTurn, WorkflowContext


class FreshCache(SingleTurn):
    """As `single_turn`, but tokens that are `stale_kv` do not count. The first token of a sample never is."""

    async def run(self, prompt: Prompt, context: WorkflowContext) -> list[Sample]:
        """The samples of `single_turn`, whose loss masks leave out tokens that are `stale_kv`."""
        samples = await super().run(prompt, context)
        for sample in samples:
            if sample.stale_kv is not None:
                sample.loss_mask = np.asarray(sample.loss_mask) & ~np.asarray(sample.stale_kv)
        return samples
