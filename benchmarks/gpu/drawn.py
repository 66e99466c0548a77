"""Samples of drawn lengths: what a fixed load of generation is made of, whatever the model would say."""

from __future__ import annotations

from dataclasses import dataclass, replace

from areal_tasks.workflows import Prompt, Sample, WorkflowContext
from areal_tasks.workflows.single_turn import request_for, sample_of
from benchmarks.simulate import Load


@dataclass(frozen=True)
class Drawn:
    """`single_turn`, but that each sample is as long as `Load` draws it for its group and index.

    The arguments are those of `Load`.
    """

    median: float = Load.median
    sigma: float = Load.sigma
    longest: int = Load.longest

    async def run(self, prompt: Prompt, context: WorkflowContext) -> list[Sample]:
        load = Load(group_size=context.group_size, median=self.median, sigma=self.sigma, longest=self.longest)
        lengths = enumerate(load.lengths(prompt.group_id))
        requests = [
            replace(request_for(prompt, index, context), max_new_tokens=length, ignore_eos=True)
            for index, length in lengths
        ]
        results = await context.client.generate(requests)
        pairs = enumerate(zip(requests, results, strict=True))
        return [sample_of(prompt, index, request, result) for index, (request, result) in pairs]
