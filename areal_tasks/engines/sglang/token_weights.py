"""Which weights sampled each token, and whether its KV cache held entries of older weights, as reported by SGLang.

SGLang 0.5.17 reports one weights version per answer, the one current at its end. Here its scheduler, which runs the
model and loads weights in one thread, records at which token of a request the weights change, in the per-token data
that SGLang adds to the answer (`customized_info`), and does nothing for other tokens: with a small model its thread
limits the speed. The answer reports this as the embedded server does (`weight_versions`, `stale_kv`).

Each request gets the version current at its arrival as the name of its prefix cache (`extra_key`). Under the name v are
keys and values of weights v or newer, so that a request never reuses those of weights older than its name, and all
tokens sampled with weights newer than the name are marked as stale.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from functools import wraps
from typing import Any, Final

KEY: Final = "areal_weights"
UPDATES: Final = ("update_weights_from_disk", "update_weights_from_distributed", "update_weights_from_tensor")


class Changes:
    """Where in a request's output the weights change: (token, version, whether the cache holds older keys and values).

    SGLang takes the part of each slice of tokens, as from a list with one element per token.
    """

    def __init__(self) -> None:
        self.held: int | None = None
        self._begun: dict[int, tuple[int, bool]] = {}

    def begin(self, token: int, version: int, stale: bool) -> None:
        """Record a change from `token` on. It replaces an earlier one there, with which no token was sampled."""
        self.held, self._begun[token] = version, (version, stale)

    def __getitem__(self, tokens: slice) -> list[tuple[int, int, bool]]:
        return [(token, *what) for token, what in self._begun.items() if tokens.start <= token < tokens.stop]


def note_weights(worker: Any, updater: Any, first: int, synchronize: Callable[[], None]) -> None:
    """Make the class TpModelWorker record which weights sample each token; the class `updater` loads weights.

    `synchronize` waits for work queued on the GPU: a step that SGLang has begun must not use partly new weights.
    """
    held = first
    forward = worker.forward_batch_generation

    @wraps(forward)
    def noting(self: Any, batch: Any, *arguments: Any, **named: Any) -> Any:
        if batch is not None:
            note_batch(batch, held)
        return forward(self, batch, *arguments, **named)

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


def note_batch(batch: Any, held: int) -> None:
    """Record the requests of a batch whose next token is the first that weights `held` sample."""
    for request in batch.reqs:
        if request.customized_info is None:
            request.customized_info = {KEY: Changes()}
    changes = [request.customized_info[KEY] for request in batch.reqs]
    if all(one.held == held for one in changes):
        return
    for request, one, length in zip(batch.reqs, changes, batch.seq_lens_cpu.tolist(), strict=True):
        if one.held != held:
            named = held if request.extra_key is None else int(request.extra_key)
            one.begin(max(0, length - len(request.origin_input_ids)), held, named < held)


def report_weights(manager: Any) -> None:
    """Make the class TokenizerManager name each request's cache, and report its tokens' weights in the answer."""
    create, generate = manager._create_tokenized_object, manager.generate_request

    @wraps(create)
    def named(self: Any, *arguments: Any, **more: Any) -> Any:
        request = create(self, *arguments, **more)
        request.extra_key = self.config_value("weight_version")
        return request

    @wraps(generate)
    async def reporting(self: Any, *arguments: Any, **more: Any) -> AsyncIterator[Any]:
        """`generate_request` whose answers have the segments of weights."""
        async for answers in generate(self, *arguments, **more):
            for answer in answers if isinstance(answers, list) else [answers]:
                meta = answer["meta_info"]
                meta |= segments(meta.pop(KEY, []), meta["completion_tokens"])
            yield answers

    manager._create_tokenized_object, manager.generate_request = named, reporting


def segments(changes: Sequence[tuple[int, int, bool]], tokens: int) -> dict[str, list[tuple[int, int]]]:
    """What an answer reports of its tokens: (version, tokens) and (stale, tokens) of the parts between changes."""
    ends = [*(begun for begun, _, _ in changes[1:]), tokens]
    counts = [end - begun for (begun, _, _), end in zip(changes, ends, strict=False)]
    return {
        "weight_versions": [(version, count) for (_, version, _), count in zip(changes, counts, strict=True)],
        "stale_kv": [(stale, count) for (_, _, stale), count in zip(changes, counts, strict=True)],
    }
