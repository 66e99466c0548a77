"""Which weights sampled each token, and whether its cache held keys and values of older ones: told by SGLang itself.

SGLang 0.5.17 tells one weights version an answer, that in force when the answer ends. Here its scheduler, which runs
the model and loads weights in one thread, notes the version with each token, by the means that SGLang has for such data
(`customized_info`); the answer then tells both as the embedded server does (`weight_versions`, `stale_kv`).

Each request is given the version in force when it came as the name of its prefix cache (`extra_key`). Under the name v
lie keys and values of weights v or newer, so that a request never reuses those of weights older than its name, and all
that is sampled with newer weights than the name is marked as stale.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import wraps
from itertools import groupby
from typing import Any, Final

KEY: Final = "areal_weights"  # of a token: (version, whether its cache holds keys and values of older weights)
UPDATES: Final = ("update_weights_from_disk", "update_weights_from_distributed", "update_weights_from_tensor")


def run_scheduler(settings: Any, *arguments: Any, **named: Any) -> None:
    """As SGLang's `run_scheduler_process`, whose place it takes in `launch_server`: a process's main function."""
    import torch
    from sglang.srt.managers.scheduler import run_scheduler_process  # type: ignore[import-not-found,unused-ignore]
    from sglang.srt.managers.scheduler_components.weight_updater import (  # type: ignore[import-not-found,unused-ignore]
        SchedulerWeightUpdaterManager,
    )
    from sglang.srt.managers.tp_worker import TpModelWorker  # type: ignore[import-not-found,unused-ignore]

    note_weights(TpModelWorker, SchedulerWeightUpdaterManager, int(settings.weight_version), torch.cuda.synchronize)
    run_scheduler_process(settings, *arguments, **named)


def note_weights(worker: Any, updater: Any, first: int, synchronize: Callable[[], None]) -> None:
    """Have the class TpModelWorker note with each token the weights that sample it, which the class `updater` changes.

    `synchronize` waits for what the GPU has been given: a step that SGLang has begun must not meet half-new weights.
    """
    held = first
    forward = worker.forward_batch_generation

    @wraps(forward)
    def noting(self: Any, batch: Any, *arguments: Any, **named: Any) -> Any:
        result = forward(self, batch, *arguments, **named)
        if batch is not None and result.logits_output is not None:
            result.logits_output.customized_info = {KEY: sampled_with(held, [req.extra_key for req in batch.reqs])}
        return result

    def counted(update: Any) -> Any:
        @wraps(update)
        def updated(self: Any, order: Any) -> Any:
            nonlocal held
            synchronize()
            output = update(self, order)
            if output.success and order.weight_version is not None:
                held = int(order.weight_version)
            return output

        return updated

    worker.forward_batch_generation = noting
    for name in UPDATES:
        setattr(updater, name, counted(getattr(updater, name)))


def sampled_with(held: int, names: Sequence[str | None]) -> list[tuple[int, bool]]:
    """What is noted with one token of each request of a batch, by the names of their caches."""
    kinds = {name: (held, name is not None and int(name) < held) for name in set(names)}
    return [kinds[name] for name in names]


def tell_weights(manager: Any) -> None:
    """Have the class TokenizerManager name each request's cache, and tell its tokens' weights in its answer."""
    create, generate = manager._create_tokenized_object, manager.generate_request

    @wraps(create)
    def named(self: Any, *arguments: Any, **more: Any) -> Any:
        request = create(self, *arguments, **more)
        request.extra_key = self.config_value("weight_version")
        return request

    @wraps(generate)
    async def telling(self: Any, *arguments: Any, **more: Any) -> AsyncIterator[Any]:
        async for answers in generate(self, *arguments, **more):
            for answer in answers if isinstance(answers, list) else [answers]:
                answer["meta_info"] |= runs(answer["meta_info"].pop(KEY, []))
            yield answers

    manager._create_tokenized_object, manager.generate_request = named, telling


def runs(tokens: Sequence[tuple[int, bool]]) -> dict[str, list[tuple[int, int]]]:
    """What an answer tells of its tokens: (version, tokens) and (stale, tokens) of its segments."""
    columns = zip(*tokens, strict=True) if tokens else ((), ())
    named = zip(("weight_versions", "stale_kv"), columns, strict=True)
    return {name: [(value, len(list(same))) for value, same in groupby(column)] for name, column in named}


def abort_quickly(manager: Any, seconds: float = 0.02) -> None:
    """Have the class TokenizerManager look more often whether what it aborts has ended: SGLang looks once a second."""
    pause = manager.pause_generation

    @wraps(pause)
    async def paused(self: Any, order: Any) -> None:
        if order.mode == "abort":
            self.is_pause = True  # new requests wait
            self.abort_request(abort_all=True)
            while await self.model_update_lock.is_locked():
                await asyncio.sleep(seconds)
                self.abort_request(abort_all=True)
        await pause(self, order)  # finds nothing under way then

    manager.pause_generation = paused
