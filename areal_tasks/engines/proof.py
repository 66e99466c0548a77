"""Proves, once per start of a flow, that new weights reach every tensor of SGLang's servers.

SGLang 0.5.17 skips tensors whose names it does not know, silently in `qwen2_moe`, `qwen3_moe`, `glm4_moe` and others.
It reports that the update succeeded, and continues to generate with the older tensors. So after the first weights the
servers report a checksum of each tensor, overwrite all with random numbers, receive the same weights again, and must
report the same checksums. Later weights have the same names and shapes, which the trainer ensures (`Names`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from areal_tasks.engines.client import InferenceClient
from areal_tasks.engines.loop_thread import Call
from areal_tasks.engines.server import BadRequest
from schemas.errors import UserError, listed
from schemas.recipe.recipe import Recipe, SftRecipe

log = logging.getLogger(__name__)

Checksums = Mapping[str, Sequence[Mapping[str, str]]]  # by server, GPU and tensor
Give = Callable[[], list[float]]

#: Buffers that models of SGLang 0.5.17 compute themselves and no checkpoint holds: Gemma 2 and 4, Phi-3-small,
#: Falcon-H1, Apertus, rotary positions of several axes. Others are known to SGLang's checker, which skips them.
COMPUTED: Final = frozenset({"normalizer", "root_size", "dummy_token_indices", "mup_vector", "beta", "eps", "axis_map"})
WITHOUT: Final = "inference.prove_weights=false continues without this proof"


@dataclass
class Proof:
    """`due` until it has succeeded. `call` runs the client's coroutines."""

    call: Call
    due: bool

    def of(self, client: InferenceClient, give: Give) -> list[float]:
        """Call `give`, which gives weights to the client's servers, and return its result; while `due`, prove them.

        UserError names a tensor that does not come from the weights, and the remedy.
        """
        seconds = give()
        if self.due:
            self.call(client.pause())
            try:
                self.due = not self._succeeds(client, give)
            finally:
                self.call(client.resume())
        return seconds

    def _succeeds(self, client: InferenceClient, give: Give) -> bool:
        """False if the servers failed meanwhile, so nothing was proven."""
        started, before = time.perf_counter(), self._checksums(client)
        every = {name for ranks in before.values() for names in ranks for name in names}
        if computed := {name for name in every if name.rpartition(".")[2] in COMPUTED}:
            log.warning(
                "not proven that new weights reach all tensors: the servers compute %s, which the proof would "
                "overwrite, too. The train-inference mismatch (algorithm.max_logprob_gap) of each iteration "
                "shows it instead",
                listed(computed),
            )
            return True
        with _refusals():
            self.call(client.overwrite_weights())
        give()
        after = self._checksums(client)
        check_same(before, after)
        seconds, tensors = time.perf_counter() - started, sum(len(names) for ranks in after.values() for names in ranks)
        log.info("new weights reach all %d tensors on the servers' GPUs (proven in %.2f s)", tensors, seconds)
        return not before.keys().isdisjoint(after)

    def _checksums(self, client: InferenceClient) -> Checksums:
        with _refusals():
            return self.call(client.checksums())


@contextmanager
def _refusals() -> Iterator[None]:
    """Extend the error of a server that refuses (too old, or short of memory) by how to run without the proof."""
    try:
        yield
    except BadRequest as error:
        raise UserError(f"it could not be proven that new weights reach all tensors: {error}; {WITHOUT}") from error


def is_proven(recipe: Recipe) -> bool:
    """Whether a recipe needs the proof. The embedded engine does not: it loads all of a model's tensors or refuses."""
    return not isinstance(recipe, SftRecipe) and recipe.inference.engine == "sglang" and recipe.inference.prove_weights


def check_same(before: Checksums, after: Checksums) -> None:
    """UserError if on a server in both a tensor's checksum has changed, or the tensor is in one of the two only."""
    pairs = [pair for url in before.keys() & after.keys() for pair in zip(before[url], after[url], strict=True)]
    changed = {name for one, other in pairs for name in one.keys() | other.keys() if one.get(name) != other.get(name)}
    if changed:
        raise UserError(
            "new weights do not reach every tensor of the inference servers: overwritten and given the same weights "
            f"again, these have changed: {listed(changed)}. SGLang skips tensors whose names it does not know. "
            "Name a model.path whose tensors have the usual names of its model family, or try another "
            f"inference.transport. If the servers compute these tensors themselves, {WITHOUT}"
        )
