"""One client for any number of inference servers that speak SGLang's native API.

It routes to the least loaded server, keeps a group on one server, retries elsewhere what a server failed to answer,
and goes on from the partial output of what was interrupted. Every token keeps the logprob and the weights version it
was sampled with.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final

from areal_tasks.engines.server_pool import Refused, ServerDown, ServerPool, WrongVersion, version_runs
from areal_tasks.engines.watchdog import Sign
from schemas.recipe.sections import Inference

IDLE_CONTINUATIONS: Final = 16  # interruptions in a row that yield no token, after which something is wrong


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One completion to be sampled. Requests of one `group` share a server."""

    input_ids: list[int]
    max_new_tokens: int
    temperature: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    group: int = 0


@dataclass(slots=True)
class GenerateResult:
    """A completion: element i of `logprobs` and `versions` speaks of `output_ids[i]`."""

    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    text: str = ""  # empty if put together from several answers: their parts need not be whole characters
    stop_reason: str = "abort"  # stop, length or abort
    server: str = ""
    seconds: float = 0.0
    segments: int = 0  # answers it was put together from


class InferenceClient:
    """Use within one event loop; `close()` when done. `settings`: the recipe's inference section.

    Errors of all methods: UserError with the server's reason for a request that is refused; ServerDown when no server
    answers within the request timeout; WrongVersion when a server does not take the weights it was sent.
    `lending`: those of the addresses whose servers another client has told to lend their memory.
    """

    def __init__(self, urls: Iterable[str], token: str, settings: Inference, lending: Container[str] = ()) -> None:
        self.settings = settings
        self.pool = ServerPool(urls, token, settings, lending)
        self.finished = 0  # requests completed since this client was made
        self._aborts = 0  # calls of abort(): what they interrupt is not continued

    async def close(self) -> None:
        """Close all connections."""
        await self.pool.close()

    @property
    def version(self) -> int | None:
        """The weights version all servers hold; None until a server was asked or updated."""
        return self.pool.version

    async def generate(
        self, requests: Sequence[GenerateRequest], done: Callable[[int, GenerateResult], None] = lambda i, result: None
    ) -> list[GenerateResult]:
        """Complete all requests, in order; `groups_per_request` groups go into one HTTP request.

        `done` is called with each request's place and result while others are still generated.
        """
        results: list[GenerateResult] = [GenerateResult() for _ in requests]

        async def complete(chunk: list[int]) -> None:
            await self._complete(requests, results, chunk)
            for i in chunk:
                done(i, results[i])

        chunks = _chunks(requests, self.settings.groups_per_request)
        tasks = [asyncio.ensure_future(complete(chunk)) for chunk in chunks]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return results

    async def _complete(
        self, requests: Sequence[GenerateRequest], results: list[GenerateResult], chunk: list[int]
    ) -> None:
        """Generate, and go on from partial output, until every request of the chunk has ended."""
        started, aborts, idle = time.perf_counter(), self._aborts, 0
        left = chunk
        while left:
            body = _body([(requests[i], results[i]) for i in left])
            before = sum(len(results[i].output_ids) for i in left)
            server, answers = await self.pool.generate(requests[left[0]].group, body, len(left))
            for i, answer in zip(left, answers, strict=True):
                _extend(results[i], answer)
                results[i].server = server
            generated = sum(len(results[i].output_ids) for i in left)
            asked = len(left)
            left = [i for i in left if results[i].stop_reason == "abort"] if aborts == self._aborts else []
            self.finished += asked - len(left)
            for i in left:
                _withdraw(results[i])
            idle = 0 if generated - len(left) > before else idle + 1
            if left and idle > IDLE_CONTINUATIONS:
                raise ServerDown(f"{server} keeps aborting requests without generating a token")
        for i in chunk:
            results[i].seconds = time.perf_counter() - started

    async def update_weights(self, uri: str, version: int) -> list[float]:
        """Load the weights manifest (or local folder) `uri` as `version` on every server; seconds for each.

        What is being generated is interrupted and continued with the new weights.
        """
        return await self.pool.update_weights(uri, version)

    async def meet(self) -> int | None:
        """The version that the servers say they hold. WrongVersion if they differ."""
        return await self.pool.meet()

    async def adopt(self, version: int) -> None:
        """The servers were handed `version` by the trainer: have each of them say so."""
        await self.pool.adopt(version)

    async def signs(self, everyone: bool = False) -> dict[str, Sign]:
        """How each server that has something to do for this client (`everyone`: any server) gets on, by its address."""
        return await self.pool.signs(everyone)

    def lost(self) -> list[str]:
        """Addresses of servers that stay evicted: they may run, but they need a restart."""
        return self.pool.lost()

    def healthy(self) -> list[str]:
        """Addresses of the servers that are not evicted."""
        return [server.url for server in self.pool.servers if server.healthy]

    def lending(self) -> list[str]:
        """Addresses of the servers that lend the memory of their cache."""
        return [server.url for server in self.pool.servers if server.lends]

    async def release_memory(self) -> None:
        """Have the servers lend the memory of their cache until `resume_memory`: until then nobody may generate."""
        await self.pool.lend(True)

    async def resume_memory(self) -> None:
        """Have the servers that lend that memory take it back."""
        await self.pool.lend(False)

    async def pause(self, mode: str = "abort") -> None:
        """Stop generating on all servers; interrupted requests continue after `resume()`."""
        self.pool.paused = True
        await self.pool.broadcast("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Go on generating."""
        await self.pool.broadcast("/continue_generation", {})
        self.pool.paused = False

    async def abort(self) -> None:
        """End all requests under way: their results have stop_reason `abort` and what was generated so far."""
        self._aborts += 1
        await self.pool.broadcast("/abort_request", {"abort_all": True})

    async def server_info(self) -> list[dict[str, Any]]:
        """What each server says of itself."""
        return await self.pool.server_info()


def _chunks(requests: Sequence[GenerateRequest], groups: int) -> list[list[int]]:
    """Indices of the requests, `groups` groups at a time; a group's requests are found by its id."""
    by_group = groupby(sorted(range(len(requests)), key=lambda i: requests[i].group), lambda i: requests[i].group)
    members = [list(indices) for _, indices in by_group]
    return [[i for group in members[at : at + groups] for i in group] for at in range(0, len(members), groups)]


def _body(work: list[tuple[GenerateRequest, GenerateResult]]) -> dict[str, Any]:
    """The `/generate` body that continues each request from what its result already holds."""
    return {
        "input_ids": [request.input_ids + result.output_ids for request, result in work],
        "sampling_params": [_params(request, len(result.output_ids)) for request, result in work],
        "return_logprob": True,
    }


def _params(request: GenerateRequest, generated: int) -> dict[str, Any]:
    params: dict[str, Any] = {
        "max_new_tokens": request.max_new_tokens - generated,
        "temperature": request.temperature,
        "no_stop_trim": True,  # the text is that of the tokens trained on
    }
    if request.seed is not None:
        params["sampling_seed"] = request.seed
    if request.stop:
        params["stop"] = list(request.stop)
    if request.stop_token_ids:
        params["stop_token_ids"] = list(request.stop_token_ids)
    return params


def _extend(result: GenerateResult, answer: dict[str, Any]) -> None:
    """Append a segment to a result."""
    meta = answer["meta_info"]
    if meta["output_token_logprobs"]:
        logprobs, tokens, *_ = zip(*meta["output_token_logprobs"], strict=True)
        result.output_ids += tokens
        result.logprobs += logprobs
    for version, count in version_runs(meta):
        result.versions += [int(version)] * count
    result.segments += 1
    result.text = answer["text"] if result.segments == 1 else ""
    result.stop_reason = meta["finish_reason"]["type"]


def _withdraw(result: GenerateResult) -> None:
    """Take back the last token of an interrupted result, to have it sampled again.

    SGLang looks for an abort before it looks for the end: the last token may be the one that ends the text. An abort
    does not depend on the token that it hits, so another draw of it has the same distribution.
    """
    for column in (result.output_ids, result.logprobs, result.versions):
        del column[-1:]


__all__ = ["GenerateRequest", "GenerateResult", "InferenceClient", "Refused", "ServerDown", "WrongVersion"]
