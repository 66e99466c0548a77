"""The default workflow: `group_size` independent completions of each prompt."""

from __future__ import annotations

import numpy as np

from areal_tasks.data.sampler import sampling_seed
from areal_tasks.engines.client import GenerateRequest, GenerateResult
from areal_tasks.workflows.protocol import Prompt, Sample, WorkflowContext


class SingleTurn:
    """One request and one answer per sample."""

    async def run(self, prompt: Prompt, context: WorkflowContext) -> list[Sample]:
        """`group_size` samples of the prompt, in order."""
        requests = [request_for(prompt, index, context) for index in range(context.group_size)]
        results = await context.client.generate(requests)
        pairs = enumerate(zip(requests, results, strict=True))
        return [sample_of(prompt, index, request, result) for index, (request, result) in pairs]


def request_for(prompt: Prompt, index: int, context: WorkflowContext) -> GenerateRequest:
    """The request for one sample of a prompt with the recipe's settings; users' workflows may call it, too."""
    return GenerateRequest(
        input_ids=prompt.input_ids,
        max_new_tokens=context.max_new_tokens,
        temperature=context.temperature,
        seed=sampling_seed(context.seed, prompt.group_id, index, context.generation),
        stop=context.stop,
        group=prompt.group_id,
    )


def sample_of(prompt: Prompt, index: int, request: GenerateRequest, result: GenerateResult) -> Sample:
    """The sample made of the prompt's tokens and the answer to `request`, which must hold these tokens alone."""
    before = len(prompt.input_ids)
    input_ids = np.array(prompt.input_ids + result.output_ids, np.int32)
    return Sample(
        prompt=prompt,
        sample_index=index,
        completion=result.text,
        input_ids=input_ids,
        loss_mask=np.arange(len(input_ids)) >= before,
        logprobs=np.array([0.0] * before + result.logprobs, np.float32),
        versions=np.array([-1] * before + result.versions, np.int32),
        stale_kv=np.array([False] * before + result.stale_kv) if any(result.stale_kv) else None,
        stop_reason=result.stop_reason,
        seed=request.seed or 0,
        server=result.server,
        seconds=result.seconds,
    )
