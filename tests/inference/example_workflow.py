"""Two turns: the model answers, is asked to check its answer, and answers again. The second answer is judged."""

import asyncio
from dataclasses import replace

from areal_tasks.workflows import Prompt, Sample, WorkflowContext
from areal_tasks.workflows.single_turn import request_for, sample_of


class Checked:
    def __init__(self, question: str) -> None:
        self.question = question

    async def run(self, prompt: Prompt, context: WorkflowContext) -> list[Sample]:
        question = context.tokenizer(self.question, add_special_tokens=False)["input_ids"]
        return await asyncio.gather(
            *(self.sample(prompt, index, context, question) for index in range(context.group_size))
        )

    async def sample(self, prompt: Prompt, index: int, context: WorkflowContext, question: list[int]) -> Sample:
        request = request_for(prompt, index, context)
        [first] = await context.client.generate([request])
        sample = sample_of(prompt, index, request, first)
        ids = [*prompt.input_ids, *first.output_ids, *question]
        room = min(context.max_new_tokens, context.max_length - len(ids))
        if first.stop_reason != "stop" or room < 1 or not await self.asks(sample, context):
            return sample

        [second] = await context.client.generate([replace(request, input_ids=ids, max_new_tokens=room)])
        asked, answered, before = len(question), len(second.output_ids), len(prompt.input_ids)
        return replace(
            sample,
            completion=second.text,
            input_ids=[*ids, *second.output_ids],
            loss_mask=[*sample.loss_mask, *[False] * asked, *[True] * answered],
            logprobs=[*sample.logprobs, *[0.0] * asked, *second.logprobs],
            versions=[*sample.versions, *[-1] * asked, *second.versions],
            stale_kv=[*[False] * before, *first.stale_kv, *[False] * asked, *second.stale_kv],
            stop_reason=second.stop_reason,
            seconds=first.seconds + second.seconds,
            turns=2,
        )

    async def asks(self, sample: Sample, context: WorkflowContext) -> bool:
        return True


class Corrected(Checked):
    """Asks only where the first answer is wrong."""

    async def asks(self, sample: Sample, context: WorkflowContext) -> bool:
        found = await context.verify(sample)
        return found.verdict != "correct"
