"""A workflow that has raw SGLang do the same work as a run, in turns with it: on the same server, within seconds.

What a host has to spare changes by a tenth and more from one minute to the next, so that a run and a server that is
measured after it differ by that, too. As `workflow.name=benchmarks.gpu.raw_rounds:RawRounds` each rollout is made as
`single_turn` makes it, and then a bare client asks the same server for as many completions of the same prompts, each by
a request of its own. The rollout comes first, as in any run: it bears what follows new weights or a checkpoint.
`run_times.iteration_rows` takes the raw rounds' time out of the run's. One server, no evaluations.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_tasks.workflows import Prompt, Sample, SingleTurn, WorkflowContext
from benchmarks.gpu.sglang_load import bare_client, flush_cache, one_round


@dataclass
class RawRounds:
    """`results`: a file to which each round appends a line. `flush`: false for a server that has no cache to flush."""

    results: str
    flush: bool = True
    asked: list[Prompt] = field(default_factory=list, init=False)  # of this rollout, whose groups all begin together
    under_way: int = field(default=0, init=False)

    async def run(self, prompt: Prompt, context: WorkflowContext) -> list[Sample]:
        """`group_size` samples of the prompt. The last group to end makes the raw round."""
        self.asked.append(prompt)
        self.under_way += 1
        samples = await SingleTurn().run(prompt, context)
        self.under_way -= 1
        if not self.under_way:
            asked, self.asked = self.asked, []
            await self._round(asked[0].group_id // len(asked), asked, context)
        return samples

    async def _round(self, iteration: int, prompts: Sequence[Prompt], context: WorkflowContext) -> None:
        began, [url] = time.perf_counter(), context.client.healthy()
        asked = [prompt.input_ids for prompt in prompts for _ in range(context.group_size)]
        async with bare_client(context.client.access.headers) as session:
            if self.flush:
                await flush_cache(session, url)
            found = await one_round(session, url, asked, context.max_new_tokens, len(asked))
        row = {"iteration": iteration, "raw_tokens": found["tokens"], "raw_seconds": found["seconds"]}
        with Path(self.results).open("a") as sink:
            sink.write(json.dumps(row | {"raw_spent": time.perf_counter() - began}) + "\n")


def read_rounds(file: Path) -> list[dict[str, Any]]:
    """A row per iteration: raw_tokens, raw_seconds, and raw_spent with what was around the round; none if no file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
