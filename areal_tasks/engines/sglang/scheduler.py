"""What arealflow changes in the process that runs the model of an SGLang server.

It records the weights that sample tokens (`token_weights`), begins samples in batches, and scores given tokens first.
In a server over several machines it loads weights of the store from a folder of its own machine (`parts`).

With η > 0 samples wait in SGLang's queue. When one ends, the next could begin, but its prefill interrupts the decoding
of all others. So samples begin in batches: when a tenth of the slots is free (`command.BATCHED_STARTS`). SGLang 0.5.17
has two switches for this. `--min-free-slots-delay` never waits for more than four slots; this limit is lifted here.
`--enable-prefill-delayer` waits for as many slots as samples have begun at once before, less .2 % per decoding step:
within half a minute that is four again.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import Any, Final

from areal_tasks.engines.sglang.token_weights import note_weights
from areal_tasks.secret import keep

SHARE: Final = 10  # a batch begins when one in so many slots is free


def run_scheduler(settings: Any, *arguments: Any, handed: Mapping[str, str] | None = None, **named: Any) -> None:
    """Replaces SGLang's `run_scheduler_process` in `launch_server`: the main function of the scheduler's process.

    `handed`: what it needs to use a store on S3.
    """
    keep(handed or {})
    import torch
    from sglang.srt.managers import scheduler  # type: ignore[import-not-found,unused-ignore]
    from sglang.srt.managers.scheduler_components.weight_updater import (  # type: ignore[import-not-found,unused-ignore]
        SchedulerWeightUpdaterManager,
    )
    from sglang.srt.managers.tp_worker import TpModelWorker  # type: ignore[import-not-found,unused-ignore]

    if settings.nnodes > 1:
        from areal_tasks.engines.sglang.parts import load_from_store

        load_from_store(SchedulerWeightUpdaterManager, first_machine=settings.node_rank == 0)
    note_weights(TpModelWorker, SchedulerWeightUpdaterManager, int(settings.weight_version), torch.cuda.synchronize)
    begin_in_batches(scheduler)
    score_first(scheduler.Scheduler)
    scheduler.run_scheduler_process(settings, *arguments, **named)


def begin_in_batches(scheduler: Any) -> None:
    """Make the module `scheduler` wait for at least a tenth of the slots, where `--min-free-slots-delay` is set."""
    resolve = scheduler.resolve_min_free_slots

    def slots(wanted: int | None, most: int, **named: Any) -> int | None:
        return max(wanted, most // SHARE) if wanted else resolve(wanted, most, **named)

    scheduler.resolve_min_free_slots = slots


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
