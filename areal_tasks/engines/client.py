"""One client for any number of inference servers that speak SGLang's native API.

It routes to the least loaded server, keeps a group on one server, retries elsewhere what a server failed to answer,
and goes on from the partial output of what was interrupted. Every token keeps the logprob and the weights version it
was sampled with. A completion may be had whole, or streamed as it grows, by the same code.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Container, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

from areal_tasks.engines.answers import Refused, ServerDown, WrongVersion, each_token, stale_runs, version_runs
from areal_tasks.engines.batching import Batcher
from areal_tasks.engines.ends import Ends
from areal_tasks.engines.interrupter import drained
from areal_tasks.engines.routing import Server, Target
from areal_tasks.engines.server_pool import ServerPool
from areal_tasks.engines.watchdog import Sign
from schemas.recipe.interruption import Interruption
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
    """A completion: element i of `logprobs`, `versions` and `stale_kv` describes `output_ids[i]`."""

    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    text: str = ""  # empty if it is not the engine's and the client knows no tokenizer
    stop_reason: str = "abort"  # stop, length or abort
    server: str = ""
    seconds: float = 0.0
    segments: int = 0  # answers it was put together from
    stale_kv: list[bool] = field(default_factory=list)  # sampled over keys and values of weights older than its version


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of a streamed completion: element i of the other lists describes `output_ids[i]`."""

    output_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    stale_kv: list[bool]  # see GenerateResult
    stop_reason: str | None  # of the last piece, which may be empty otherwise: stop, length or abort
    server: str


@dataclass(slots=True)
class _Work:
    """A request on its way. All tokens before `known` are final; those from `begun` on come from the current answer."""

    request: GenerateRequest
    result: GenerateResult = field(default_factory=GenerateResult)
    begun: int = 0
    known: int = 0
    refused: Refused | None = None


class InferenceClient:
    """Use within one event loop; `close()` when done. `settings`: the recipe's inference section.

    Errors of all methods: UserError with the server's reason for a request that is refused; ServerDown when no server
    answers within the request timeout; WrongVersion when a server does not take the weights it was sent.
    `patience_seconds`: how long to wait while no server is well; none: `NO_SERVER_SECONDS`. `ends` are asked for where
    the client has to see that a completion has ended. `interruption`: of the recipe; none: η is 0.
    """

    def __init__(
        self,
        urls: Iterable[str],
        token: str,
        settings: Inference,
        patience_seconds: float | None = None,
        ends: Callable[[], Ends] = Ends,
        interruption: Interruption | None = None,
    ) -> None:
        self.settings = settings
        self._ends = ends
        self.pool = ServerPool(urls, token, settings, patience_seconds, interruption)
        self.finished = 0  # requests completed since this client was made
        self._aborts = 0  # calls of abort(): what they interrupt is not continued
        self._batcher = Batcher(self._finish, lambda works: _chunks(works, settings.groups_per_request))

    async def close(self) -> None:
        """Close all connections."""
        await self.pool.close()

    @property
    def version(self) -> int | None:
        """The weights version that all servers hold that generate; None until a server was asked or updated."""
        return self.pool.target.version if self.pool.target else None

    @property
    def capacity(self) -> int:
        """Groups that may be under way at once without waiting for a server."""
        servers = max(1, len(self.healthy()))
        return servers * self.settings.max_concurrent_requests * self.settings.groups_per_request

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """Complete all requests, in order.

        Requests that are asked for in one turn of the event loop, by however many callers, share HTTP requests of
        `groups_per_request` groups each.
        """
        works = [_Work(request) for request in requests]
        await self._batcher.complete(works)
        for work in works:
            if work.refused is not None:
                raise work.refused
        return [work.result for work in works]

    async def _finish(self, chunk: list[_Work]) -> None:
        """Complete the requests of a chunk. Where the servers refuse it, each group is asked for alone."""
        try:
            async with aclosing(self._complete(chunk)) as steps:
                async for _ in steps:
                    pass
        except Refused as error:
            left = [work for work in chunk if work.result.stop_reason == "abort"]
            groups = _chunks(left, 1)
            if len(groups) > 1:
                await asyncio.gather(*map(self._finish, groups))
            for work in left if len(groups) == 1 else ():
                work.refused = error

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Piece]:
        """Complete one request, a piece at a time as its tokens come; the last piece says why it ended.

        Pieces never overlap and none is taken back: what a server leaves unfinished is continued after them. Whoever
        stops listening earlier closes the stream, and the server stops generating for it:

            async with aclosing(client.stream(request)) as pieces:
                async for piece in pieces:
        """
        work, given = _Work(request), 0
        async with aclosing(self._complete([work], stream=True)) as steps:
            async for _ in steps:
                if work.known > given and work.result.stop_reason == "abort":  # not ended yet
                    yield _piece(work, given)
                    given = work.known
        yield _piece(work, given, work.result.stop_reason)

    async def _complete(self, chunk: list[_Work], stream: bool = False) -> AsyncGenerator[None]:
        """Generate, and go on from partial output, until every request of the chunk has ended. Yields at each news."""
        started, aborts, idle = time.perf_counter(), self._aborts, 0
        left = chunk
        while left:
            before = sum(work.known for work in left)
            body = partial(_body, left, stream)
            async with aclosing(self.pool.generate(left[0].request.group, body, len(left))) as answered:
                async for server, answers in answered:
                    found = [self._extend(work, answer, server) for work, answer in zip(left, answers, strict=True)]
                    yield
                    if stream and any(found):
                        break
            asked = left
            left = [work for work in left if work.result.stop_reason == "abort"] if aborts == self._aborts else []
            self.finished += len(asked) - len(left)
            for work in left:
                _withdraw(work)
            for work in asked:
                work.known = len(work.result.output_ids)
            idle = 0 if sum(work.known for work in asked) > before else idle + 1
            if left and idle > IDLE_CONTINUATIONS:
                raise ServerDown(f"{left[0].result.server} keeps aborting requests without generating a token")
        for work in chunk:
            work.result.seconds = time.perf_counter() - started
            if not work.result.text and (detokenizer := self._ends().detokenizer) is not None:
                [work.result.text] = detokenizer.texts([work.result.output_ids])

    def _extend(self, work: _Work, answer: dict[str, Any], server: str) -> bool:
        """Take over what is new in an answer; whether the completion has ended where the server did not see it."""
        _extend(work, answer, server)
        result, request = work.result, work.request
        at_limit = result.stop_reason == "length"
        if not at_limit and not (work.begun and request.stop):
            return False
        end = self._ends().found(result.output_ids, work.begun, at_limit, request.stop, request.stop_token_ids)
        if end is None:
            return False
        if end < len(result.output_ids):
            result.text = ""
            _cut(work, end)
        result.stop_reason, work.known = "stop", end
        return True

    async def update_weights(self, uri: str, version: int, key: str = "") -> list[float]:
        """Load the weights manifest (or local folder) `uri` as `version` on every server; seconds for each.

        Requests under way continue with the new weights, or the weights wait for their end. `key`: a name for `wants`.
        """
        return await self.pool.update_weights(Target(version, key or uri, uri))

    async def adopt(self, version: int, key: str, urls: Container[str]) -> list[str]:
        """The servers at `urls` were handed `version` by the trainer; the addresses of those that say so."""
        return await self.pool.adopt(Target(version, key), urls)

    def wants(self, key: str) -> bool:
        """Whether the weights of that name are those that all servers are to hold."""
        return self.pool.target is not None and self.pool.target.key == key

    @property
    def stuck(self) -> bool:
        """Whether no server generates before somebody gives it weights: none holds those that are wanted."""
        return self.pool.stuck

    async def holding(self, version: int, key: str, uri: str | None) -> None:
        """The servers hold these weights, as somebody else has seen to or has named them; see `ServerPool.hold`."""
        self.pool.hold(Target(version, key, uri))

    async def doubt(self) -> None:
        """The servers' weights may be damaged or not whole: none generates, and no answer counts, until given some."""
        self.pool.doubt()
        for server in [server for server in self.pool.servers if server.requests]:
            await self.pool.connections.drop(server)

    async def foreign(self, urls: Iterable[str]) -> None:
        """Have servers that others have started. Raises UserError if one cannot be used as it was started."""
        self.pool.foreign = True
        await self.pool.sync(dict.fromkeys(urls, 0), ())
        await self.pool.check()

    async def sync(self, starts: Mapping[str, int], current: Container[str]) -> None:
        """Have exactly these servers from now on: see the pool."""
        await self.pool.sync(starts, current)

    async def checksums(self) -> dict[str, list[dict[str, str]]]:
        """A checksum of each tensor, by its name, on each GPU of the SGLang servers, by their addresses."""
        found = await self._check_weights("checksum")
        return {url: [rank["checksums"] for rank in answer["ranks"]] for url, answer in found.items()}

    async def overwrite_weights(self) -> None:
        """Fill the tensors of SGLang servers, which must be paused, with random numbers; weights must follow."""
        self.pool.doubt()
        await self._check_weights("reset_tensors")

    async def _check_weights(self, action: str) -> dict[str, Any]:
        """What each healthy server answers to `/weights_checker`, by its address. A server that fails is evicted."""

        async def ask(server: Server) -> tuple[str, Any]:
            return server.url, await self.pool.connections.ask(server, "POST", "/weights_checker", {"action": action})

        return dict(await self.pool.each(ask))

    async def evict(self, failed: Mapping[str, str]) -> None:
        """Give nothing more to servers of which somebody else has seen that they failed: why, by their address."""
        for server in self.pool.servers:
            if server.url in failed:
                self.pool.evict(server, ServerDown(failed[server.url]))

    async def signs(self, everyone: bool = False) -> dict[str, Sign]:
        """How each server that has something to do for this client (`everyone`: any server) gets on, by its address."""
        pool = self.pool  # a server that is evicted is given up already
        busy = [server for server in pool.servers if server.healthy and (server.asks or everyone)]
        signs = await asyncio.gather(*(pool.lending.sign(server) for server in busy))
        return dict(zip([server.url for server in busy], signs, strict=True))

    def lost(self) -> list[str]:
        """Addresses of servers that stay evicted: they may run, but they need a restart."""
        return self.pool.lost()

    def healthy(self) -> list[str]:
        """Addresses of the servers that are not evicted."""
        return [server.url for server in self.pool.servers if server.healthy]

    async def standing(self) -> list[str]:
        """The same, once servers that have just joined were looked at; at least one."""
        return await self.pool.standing()

    async def release_memory(self) -> None:
        """Have the servers lend the memory of their cache until `resume_memory`: until then nobody may generate."""
        await self.pool.lend(True)

    async def resume_memory(self) -> None:
        """Have the servers that lend that memory take it back."""
        await self.pool.lend(False)

    @property
    def paused(self) -> bool:
        """Whether the servers were told to stop generating, and not yet to go on."""
        return self.pool.lending.paused

    async def interrupt(self) -> None:
        """Return when no server has a request under way, so that the trainer may send weights; `resume` follows."""
        self.pool.doubt()
        if self.pool.interrupter.mode == "drain":
            await drained(self.pool.servers)
        elif self.pool.interrupter.mode is not None:
            await self.pause("abort")

    async def pause(self, mode: str = "abort") -> None:
        """Stop generating on all servers; interrupted requests continue after `resume()`."""
        self.pool.lending.paused = True
        await self.pool.each(partial(self.pool.lending.pause, mode=mode))

    async def resume(self) -> None:
        """Go on generating; servers that are evicted do before they are let in."""
        pool = self.pool
        while any(server.healthy and server.paused for server in pool.servers):  # one may be let in meanwhile
            await pool.each(pool.lending.go_on)
        pool.lending.paused = False

    async def abort(self) -> None:
        """End all requests under way: their results have stop_reason `abort` and what was generated so far."""
        self._aborts += 1
        ask = self.pool.connections.ask
        await self.pool.each(lambda server: ask(server, "POST", "/abort_request", {"abort_all": True}))


def _chunks(works: Iterable[_Work], groups: int) -> list[list[_Work]]:
    """The requests, `groups` groups at a time; a group's requests are found by its id."""
    of_group = attrgetter("request.group")
    members = [list(group) for _, group in groupby(sorted(works, key=of_group), of_group)]
    return [[work for group in members[at : at + groups] for work in group] for at in range(0, len(members), groups)]


def _body(works: list[_Work], stream: bool) -> dict[str, Any]:
    """The `/generate` body that continues each request from what its result already holds; a stream has one."""
    prompts, params = [], []
    for work in works:
        work.begun = len(work.result.output_ids)
        prompts.append(work.request.input_ids + work.result.output_ids)
        params.append(_params(work.request, work.begun))
    if stream:
        return {"input_ids": prompts[0], "sampling_params": params[0], "return_logprob": True, "stream": True}
    return {"input_ids": prompts, "sampling_params": params, "return_logprob": True}


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


def _extend(work: _Work, answer: dict[str, Any], server: str) -> None:
    """Take over what is new in an answer. Those of a stream repeat what came before them.

    With SGLang's flag incremental-streaming-output they do not: then they list fewer tokens than they count.
    """
    result, meta = work.result, answer["meta_info"]
    listed = meta["output_token_logprobs"]
    unlisted = max(meta["completion_tokens"] - len(listed), 0)
    first = len(result.output_ids) - work.begun - unlisted
    if first < 0:
        raise Refused(
            f"{server} counts {meta['completion_tokens']} tokens and lists the last {len(listed)} only: start it "
            "without flags that shorten answers"
        )
    result.output_ids += [token for _, token, *_ in listed[first:]]
    result.logprobs += [logprob for logprob, *_ in listed[first:]]
    result.versions += [int(version) for version in each_token(version_runs(meta))[first:]]
    result.stale_kv += each_token(stale_runs(meta))[first:]
    result.text = "" if work.begun else answer["text"]
    result.server = server
    ended = meta["finish_reason"]
    if ended is not None:
        result.segments += 1
        result.stop_reason = ended["type"]
    if ended is None or ended["type"] != "abort":
        work.known = len(result.output_ids)


def _withdraw(work: _Work) -> None:
    """Take back the last token of an interrupted result, to have it sampled again, unless it is known not to end it.

    SGLang looks for an abort before it looks for the end: the last token may be the one that ends the text. An abort
    does not depend on the token that it hits, so another draw of it has the same distribution.
    """
    _cut(work, max(work.known, len(work.result.output_ids) - 1))


def _cut(work: _Work, tokens: int) -> None:
    """Keep so many tokens only."""
    result = work.result
    for column in (result.output_ids, result.logprobs, result.versions, result.stale_kv):
        del column[tokens:]


def _piece(work: _Work, first: int, stop_reason: str | None = None) -> Piece:
    """The known tokens from `first` on."""
    result, new = work.result, slice(first, work.known)
    values = (result.output_ids[new], result.logprobs[new], result.versions[new], result.stale_kv[new])
    return Piece(*values, stop_reason, result.server)


__all__ = ["GenerateRequest", "GenerateResult", "InferenceClient", "Piece", "Refused", "ServerDown", "WrongVersion"]
