"""The process that runs the model in an SGLang server: what arealflow changes there.

It records the weights that sample tokens (`token_weights`), begins samples together, and scores given tokens first.

With η > 0 samples wait in SGLang's queue. Each that ends lets one begin, whose prefill interrupts the decoding of all
others, so they begin in groups: when a tenth of the places is free (`command.TOGETHER`). SGLang 0.5.17 has two switches
for this. `--min-free-slots-delay` never waits for more than four places, which is lifted here.
`--enable-prefill-delayer` waits for as many as have begun together before, less .2 % for each decoding step: within
half a minute that is four again.
"""

from __future__ import annotations

from functools import wraps
from typing import Any, Final

from areal_tasks.engines.sglang.token_weights import note_weights

SHARE: Final = 10  # of the places: one in so many


def run_scheduler(settings: Any, *arguments: Any, **named: Any) -> None:
    """Replaces SGLang's `run_scheduler_process` in `launch_server`: the main function of the scheduler's process."""
    import torch
    from sglang.srt.managers import scheduler  # type: ignore[import-not-found,unused-ignore]
    from sglang.srt.managers.scheduler_components.weight_updater import (  # type: ignore[import-not-found,unused-ignore]
        SchedulerWeightUpdaterManager,
    )
    from sglang.srt.managers.tp_worker import TpModelWorker  # type: ignore[import-not-found,unused-ignore]

    note_weights(TpModelWorker, SchedulerWeightUpdaterManager, int(settings.weight_version), torch.cuda.synchronize)
    begin_together(scheduler)
    score_first(scheduler.Scheduler)
    scheduler.run_scheduler_process(settings, *arguments, **named)


def begin_together(scheduler: Any) -> None:
    """Make the module `scheduler` wait for a tenth of the places at least, where `--min-free-slots-delay` is set."""
    resolve = scheduler.resolve_min_free_slots

    def places(wanted: int | None, most: int, **named: Any) -> int | None:
        return max(wanted, most // SHARE) if wanted else resolve(wanted, most, **named)

    scheduler.resolve_min_free_slots = places


def score_first(scheduler: Any) -> None:
    """Make the class Scheduler answer requests that score their prompts before those that wait already.

    The publication of weights waits for scores, and with η > 0 the queue may be several iterations long.
    """
    add = scheduler._add_request_to_queue

    @wraps(add)
    def added(self: Any, request: Any, *arguments: Any, **named: Any) -> None:
        add(self, request, *arguments, **named)
        scores = 0 <= request.logprob_start_len < len(request.origin_input_ids)  # others have -1, or their length
        if scores and self.waiting_queue and self.waiting_queue[-1] is request:
            self.waiting_queue.insert(0, self.waiting_queue.pop())

    scheduler._add_request_to_queue = added
