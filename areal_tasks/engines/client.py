"""Generation on any number of inference servers: requests in, completions out.

A request waits, in order, until a server has room for it. What a server fails to answer goes to another, and what was
interrupted goes on from its partial output. Every token keeps the logprob and version of the weights that sampled it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, Final, NamedTuple

from areal_tasks.engines.ends import Ends
from areal_tasks.engines.server import (
    BadRequest,
    Server,
    ServerDown,
    WrongVersion,
    each_token,
    stale_runs,
    version_runs,
)
from areal_tasks.engines.server_pool import ServerPool
from schemas.errors import UserError
from schemas.recipe.derived import Interruption
from schemas.recipe.sections import Inference

ATTEMPTS: Final = 4  # servers a request is tried on: one that kills its server must not kill them all
LEARN_SECONDS: Final = 0.05  # pause between two questions which weights a server holds
IDLE_CONTINUATIONS: Final = 16  # interruptions in a row that yield no token, after which something is wrong


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One completion to be sampled. Requests of one `group` share a server.

    No part of it is sampled by a server that holds weights of a version below `floor`: it waits for another.
    """

    input_ids: list[int]
    max_new_tokens: int
    temperature: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    group: int = 0
    floor: int = 0


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
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class _Waiter(NamedTuple):
    """A request without a server."""

    request: GenerateRequest
    samples: int
    given: asyncio.Future[Server]


class InferenceClient(ServerPool):
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
        super().__init__(urls, token, settings, patience_seconds, interruption)
        self.finished = 0  # requests completed since this client was made
        self._ends = ends
        self._gathered: list[_Work] = []  # in this turn of the event loop
        self._waiting: deque[_Waiter] = deque()

    @property
    def capacity(self) -> int:
        """Groups that may be under way at once without waiting for a server."""
        each = self.settings.max_concurrent_requests * self.settings.groups_per_request
        return each * max(1, len(self.healthy()))

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """Complete all requests, in order.

        Requests that are asked for in one turn of the event loop, by however many callers, share HTTP requests of
        `groups_per_request` groups each. What no caller waits for any more is not completed.
        """
        works = [_Work(request) for request in requests]
        if not self._gathered:
            asyncio.get_running_loop().call_soon(self._begin)  # after all that is ready in this turn
        self._gathered += works
        try:
            await asyncio.gather(*(work.done for work in works))
        finally:
            for work in works:
                work.done.cancel()
        return [work.result for work in works]

    def _begin(self) -> None:
        works, self._gathered = [work for work in self._gathered if not work.done.done()], []
        for chunk in _chunks(works, self.settings.groups_per_request):
            task, wanted = asyncio.ensure_future(self._finish(chunk)), {work.done for work in chunk}
            for work in chunk:
                work.done.add_done_callback(partial(_end_unwanted, task, wanted))

    async def _finish(self, chunk: list[_Work]) -> None:
        """Complete the requests of a chunk. Where the servers refuse it, each group is asked for alone."""
        try:
            async with aclosing(self._complete(chunk)) as steps:
                async for _ in steps:
                    pass
        except Exception as error:
            left = [work for work in chunk if not work.done.done()]
            groups = _chunks(left, 1)
            if isinstance(error, BadRequest) and len(groups) > 1:
                await asyncio.gather(*map(self._finish, groups))
            else:
                for work in left:
                    work.done.set_exception(error)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Piece]:
        """Complete one request, a piece at a time as its tokens come; the last piece says why it ended.

        Pieces never overlap and none is taken back. Whoever stops listening earlier closes the stream (`aclosing`), and
        the server stops generating for it.
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
        started, idle, left = time.perf_counter(), 0, chunk
        while left:
            before = sum(work.known for work in left)
            async with aclosing(self._send(left, stream)) as answered:
                async for server, answers in answered:
                    found = [self._extend(work, answer, server) for work, answer in zip(left, answers, strict=True)]
                    yield
                    if stream and any(found):
                        break
            for work in left:
                self._end(work, time.perf_counter() - started)
            idle = 0 if sum(work.known for work in left) > before else idle + 1
            left = [work for work in left if work.result.stop_reason == "abort"]
            if left and idle > IDLE_CONTINUATIONS:
                raise ServerDown(f"{left[0].result.server} keeps aborting requests without generating a token")

    def _end(self, work: _Work, seconds: float) -> None:
        """The answer is over: so is the request, or it goes on from what it has."""
        result = work.result
        if result.stop_reason == "abort":
            _withdraw(work)
        else:
            self.finished += 1
            result.seconds = seconds
            if not result.text and (detokenizer := self._ends().detokenizer) is not None:
                [result.text] = detokenizer.texts([result.output_ids])
            if not work.done.done():  # else nobody wants it any more
                work.done.set_result(None)
        work.known = len(result.output_ids)

    async def _send(self, works: list[_Work], stream: bool) -> AsyncGenerator[tuple[str, list[dict[str, Any]]]]:
        """A server's URL and its answers, once or as often as they grow (`stream`). Retried elsewhere when it fails."""
        request = works[0].request
        for _ in range(ATTEMPTS):
            async with self._server_for(request, len(works)) as server:
                try:
                    first = max(request.floor, server.version or 0)
                    async with aclosing(server.generate(_body(works, stream))) as answered:
                        async for answers in answered:
                            self._check_versions(server, answers, first)
                            yield server.url, answers
                    server.failing_since = None
                    return
                except ServerDown as error:
                    self._evict(server, error)
        raise ServerDown(f"{ATTEMPTS} servers failed to answer one request; the last: {self._last_error}")

    def _check_versions(self, server: Server, answers: Iterable[dict[str, Any]], first: int) -> None:
        """Raise WrongVersion if a token was generated with weights before `first` or after those that are wanted."""
        found = {int(version) for answer in answers for version, _ in version_runs(answer["meta_info"])}
        last = self.target.version if self.target else max(found, default=first)
        if not all(first <= version <= last for version in found):
            raise WrongVersion(f"{server.url} generated with weights {sorted(found)}, expected {first} to {last}")
        if self.target is None and found:
            server.version = max(last, server.version or 0)

    @asynccontextmanager
    async def _server_for(self, request: GenerateRequest, samples: int) -> AsyncIterator[Server]:
        """Wait for a server; inside, a request is under way on it. Raises ServerDown if none comes."""
        waiter = _Waiter(request, samples, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._dispatch()
        try:
            server = await waiter.given
            self._background("watch", server, self._watch)
            yield server
        finally:
            if (given := waiter.given).done() and not given.cancelled() and given.exception() is None:
                self.router.end(given.result(), samples)
            self._dispatch()

    def _dispatch(self) -> None:
        """Give waiting requests, in order, to the servers that the router chooses."""
        self.followers.changed()
        passed = []  # no server holds weights that are new enough for them
        while self._waiting and self.router.free():
            waiter = self._waiting.popleft()
            if waiter.given.done():  # it was cancelled
                continue
            if server := self.router.choose(waiter.request.group, waiter.request.floor):
                self.router.begin(server, waiter.request.group, waiter.samples)
                waiter.given.set_result(server)
            else:
                passed.append(waiter)
        self._waiting.extendleft(reversed(passed))
        for server in self.servers if passed and self.target is None else ():
            self._background("learn", server, self._learn)
        if self._closed:
            self._give_up()
        elif self._waiting and not self.healthy():
            self._background("hope", None, self._no_server_timer)

    async def _no_server_timer(self, _: None) -> None:
        """Requests wait for the first server that is well again, and are told if none is in time."""
        try:
            await self._until(lambda: any(server.healthy for server in self.servers))
        except ServerDown:
            self._give_up()

    def _give_up(self) -> None:
        """Whoever waits is told that there is no server."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.given.done():
                waiter.given.set_exception(self._no_server())

    async def _learn(self, server: Server) -> None:
        """While requests wait for newer weights than the server is known to hold, ask which somebody gave it."""
        while server.healthy and any(waiter.request.floor > (server.version or 0) for waiter in self._waiting):
            try:
                await server.ask_version()
            except ServerDown as error:
                self._evict(server, error)
            self._dispatch()
            await asyncio.sleep(LEARN_SECONDS)

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


def _chunks(works: Iterable[_Work], groups: int) -> list[list[_Work]]:
    """The requests, `groups` groups of one floor at a time; a group's requests are found by its id."""
    found, key = [], attrgetter("request.floor", "request.group")
    for _, alike in groupby(sorted(works, key=key), attrgetter("request.floor")):
        members = [list(group) for _, group in groupby(alike, key)]
        found += [list(chain(*members[at : at + groups])) for at in range(0, len(members), groups)]
    return found


def _end_unwanted(task: asyncio.Task[None], wanted: set[asyncio.Future[None]], done: asyncio.Future[None]) -> None:
    """One more request of a chunk is done or given up: the last one ends the work at it."""
    wanted.discard(done)
    if not wanted:
        task.cancel()


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
    stops = {"stop": list(request.stop), "stop_token_ids": list(request.stop_token_ids)}
    seed = {} if request.seed is None else {"sampling_seed": request.seed}
    return params | seed | {name: values for name, values in stops.items() if values}


def _extend(work: _Work, answer: dict[str, Any], server: str) -> None:
    """Take over what is new in an answer. Those of a stream repeat what came before them.

    With SGLang's flag incremental-streaming-output they do not: then they list fewer tokens than they count.
    """
    result, meta = work.result, answer["meta_info"]
    listed = meta["output_token_logprobs"]
    unlisted = max(meta["completion_tokens"] - len(listed), 0)
    first = len(result.output_ids) - work.begun - unlisted
    if first < 0:
        raise UserError(
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
