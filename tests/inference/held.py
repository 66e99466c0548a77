"""An embedded engine that stands still where a test wants it to, and what its tokens' logprobs must be."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from collections.abc import Sequence as Items
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from waiting import LIMIT, wait_until

from areal_tasks.engines.embedded.engine import Engine
from areal_tasks.engines.embedded.sequence import Sequence


class Held:
    """Stands still after the decode passes with these numbers, until it is paused, gets weights, or `go_on`."""

    def __init__(self, engine: Engine, *passes: int) -> None:
        self.engine = engine
        self.lengths: list[dict[Sequence, int]] = []  # tokens of each sequence at each stop
        self._stops = [threading.Event() for _ in passes]
        self._passes = dict(zip(passes, self._stops, strict=True))
        self._released = threading.Event()
        self._decode, self._count = engine._decode, 0
        engine._decode = self._held  # type: ignore[method-assign]

    def _held(self) -> None:
        self._decode()
        self._count += 1
        if (stop := self._passes.get(self._count)) is not None:
            running = [(owner, slot) for slot, owner in self.engine._slots.owner.items()]
            self.lengths.append({one: len(one.output) + int(self.engine._slots.count[i]) for one, i in running})
            stop.set()
            self._stand()

    def _stand(self) -> None:
        engine, version = self.engine, self.engine.version
        while not (engine.paused or engine.version != version or self._released.is_set()):
            wait_until(lambda: engine._commands or self._released.is_set(), "a command")
            engine._run_commands()

    def wait(self, number: int = 0) -> None:
        """Return when the engine stands still for the `number`-th time."""
        assert self._stops[number].wait(LIMIT), "the engine did not get there"

    def go_on(self) -> None:
        self._released.set()


def logprobs_of_runs(
    models: Mapping[int, Any], prompt: Items[int], output: Items[int], versions: list[int], stale: list[bool]
) -> Tensor:
    """Logprobs of `output` at temperature 1, by transformers.

    The tokens of a run with one version and flag are sampled by that version's model. It computes the keys and values
    of all tokens before them, or of those only that are not in the cache of the run before, if the flag is set.
    """
    ids, found, cache = torch.tensor([[*prompt, *output]]), [], None
    computed, end = 0, len(prompt) - 1
    for (version, over_old), run in groupby(zip(versions, stale, strict=True)):
        count = len(list(run))
        if not over_old:
            cache, computed = None, 0
        end += count
        with torch.inference_mode():
            answer = models[version](input_ids=ids[:, computed:end], past_key_values=cache, use_cache=True)
        cache, computed = answer.past_key_values, end
        chosen = ids[0, end - count + 1 : end + 1, None]
        found.append(torch.log_softmax(answer.logits[0, -count:].float(), dim=-1).gather(1, chosen)[:, 0])
    return torch.cat(found)
