"""Generation on any number of inference servers: requests in, completions out.

Requests queue in order until a server has room. A request that a server fails to answer is retried on another, and an
interrupted one continues from its partial output. Every token keeps the logprob and version that it was sampled with.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, Final

from areal_tasks.engines.access import Access
from areal_tasks.engines.ends import Ends
from areal_tasks.engines.pool_weights import UpdatedPool
from areal_tasks.engines.server import BadRequest, Server, ServerDown, each_token, stale_runs, version_runs
from schemas.errors import UserError
from schemas.recipe.derived import Interruption
from schemas.recipe.sections import Inference

ATTEMPTS: Final = 4  # servers that a request is tried on: a request that crashes its server must not crash all of them
IDLE_CONTINUATIONS: Final = 16  # consecutive interruptions without a new token that are tolerated


class Lost(Exception):
    """The server of a request that `begins_again` has failed, and nothing of its completion is known."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One completion to be sampled. Requests of one `group` that are made at once are sent in one HTTP request.

    No token of it is sampled with weights of a version below `floor`: it waits for a server with newer weights.
    Tokens of `input_ids` from position `scored_from` on (1 or more) get logprobs, too, at temperature 1; a server
    answers such requests before all others.
    """

    input_ids: list[int]
    max_new_tokens: int
    temperature: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False  # only `max_new_tokens` and `stop` end it
    group: int = 0
    floor: int = 0
    scored_from: int | None = None
    begins_again: bool = False  # `Lost` is raised where its floor might be higher the next time


@dataclass(slots=True)
class GenerateResult:
    """A completion: element i of `logprobs`, `versions` and `stale_kv` describes `output_ids[i]`."""

    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    text: str = ""  # empty if the server's text is not that of all tokens and the client has no tokenizer
    stop_reason: str = "abort"  # stop, length or abort
    server: str = ""
    seconds: float = 0.0
    segments: int = 0  # the number of answers that it consists of
    stale_kv: list[bool] = field(default_factory=list)  # sampled over KV cache of weights older than its version
    prompt_logprobs: list[float] = field(default_factory=list)  # of the request's tokens from `scored_from` on


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
    """A request in progress. Tokens before `known` are final; those from `begun` on come from the current answer."""

    request: GenerateRequest
    result: GenerateResult = field(default_factory=GenerateResult)
    begun: int = 0
    known: int = 0
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class InferenceClient(UpdatedPool):
    """Use within one event loop; `close()` when done. `settings`: the recipe's inference section.

    Errors of all methods: UserError with the server's reason for a request that is refused; ServerDown when no server
    answers within the request timeout, or a server does not take the weights it was sent.
    `patience_seconds`: how long to wait while no server is healthy; None: `NO_SERVER_SECONDS`. `ends` is called when
    the client itself must find the end of a completion. `interruption`: the recipe's; None if η is 0.
    """

    def __init__(
        self,
        urls: Iterable[str],
        access: Access,
        settings: Inference,
        patience_seconds: float | None = None,
        ends: Callable[[], Ends] = Ends,
        interruption: Interruption | None = None,
    ) -> None:
        super().__init__(urls, access, settings, patience_seconds, interruption)
        self._ends = ends
        self._gathered: list[_Work] = []  # in this iteration of the event loop

    @property
    def capacity(self) -> int:
        """The number of groups that can be in flight at once without waiting for a server."""
        each = self.settings.max_concurrent_requests * self.settings.groups_per_request
        return each * max(1, len(self.healthy()))

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """Complete all requests, in order.

        Requests made in one iteration of the event loop, by any number of callers, share HTTP requests of
        `groups_per_request` groups each. Requests that no caller awaits any more are cancelled.
        """
        works = [_Work(request) for request in requests]
        if not self._gathered:
            asyncio.get_running_loop().call_soon(self._begin)  # after the other callbacks of this iteration
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
            task = asyncio.ensure_future(self._finish(chunk))
            wanted = asyncio.gather(*(work.done for work in chunk), return_exceptions=True)
            wanted.add_done_callback(partial(_cancel, task))

    async def _finish(self, chunk: list[_Work]) -> None:
        """Complete the requests of a chunk. If a server refuses it, each group is sent by itself."""
        try:
            async with aclosing(self._complete(chunk)) as steps:
                async for _ in steps:
                    pass
        except Exception as error:
            pending = [work for work in chunk if not work.done.done()]
            groups = _chunks(pending, 1)
            if isinstance(error, BadRequest) and len(groups) > 1:
                await asyncio.gather(*map(self._finish, groups))
            else:
                for work in pending:
                    work.done.set_exception(error)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Piece]:
        """Complete one request and yield its tokens piece by piece; the last piece has the stop reason.

        Pieces never overlap and none is retracted. A caller that needs no more tokens closes the stream (`aclosing`),
        and the server stops generating for it.
        """
        work, given = _Work(request), 0
        async with aclosing(self._complete([work], stream=True)) as steps:
            async for _ in steps:
                if work.known > given and work.result.stop_reason == "abort":  # not ended yet
                    yield _piece(work, given)
                    given = work.known
        yield _piece(work, given, work.result.stop_reason)

    async def _complete(self, chunk: list[_Work], stream: bool = False) -> AsyncGenerator[None]:
        """Generate, continuing partial output, until every request of the chunk has ended. Yields after each answer."""
        started, idle, pending = time.perf_counter(), 0, chunk
        while pending:
            before = sum(work.known for work in pending)
            async with aclosing(self._send(pending, stream)) as answered:
                async for server, answers in answered:
                    ended = [self._extend(work, answer, server) for work, answer in zip(pending, answers, strict=True)]
                    yield
                    if stream and any(ended):
                        break
            for work in pending:
                self._end(work, time.perf_counter() - started)
            idle = 0 if sum(work.known for work in pending) > before else idle + 1
            pending = [work for work in pending if work.result.stop_reason == "abort"]
            if pending and idle > IDLE_CONTINUATIONS:
                raise ServerDown(f"{pending[0].result.server} keeps aborting requests without generating a token")

    def _end(self, work: _Work, seconds: float) -> None:
        """After the end of an answer: finish the request, or prepare it to continue from its partial output."""
        result = work.result
        if result.stop_reason == "abort":
            # SGLang checks for an abort before it checks for the end: the last token may be the one that ends the text.
            # An abort does not depend on the token that it hits, so sampling it again gives the same distribution.
            _cut(work, max(work.known, len(result.output_ids) - 1))
        else:
            result.seconds = seconds
            if not result.text and (detokenizer := self._ends().detokenizer) is not None:
                [result.text] = detokenizer.texts([result.output_ids])
            if not work.done.done():  # else the caller has cancelled it
                work.done.set_result(None)
        work.known = len(result.output_ids)

    async def _send(self, works: list[_Work], stream: bool) -> AsyncGenerator[tuple[str, list[dict[str, Any]]]]:
        """A server's URL and its answers: once, or growing (`stream`). Retried on another server after a failure."""
        request, answers = works[0].request, list[dict[str, Any]]()
        for attempt in range(ATTEMPTS):
            async with self._server_for(request.floor, len(works), again=attempt > 0) as server:
                try:
                    first, began, learns = (
                        max(request.floor, server.version or 0),
                        self.clock(),
                        self._learns_of(server),
                    )
                    async with aclosing(server.generate(_body(works, stream))) as answered:
                        async for answers in answered:
                            self._check_versions(server, answers, first)
                            yield server.url, answers
                    server.failing_since = None
                    if learns and request.scored_from is None:
                        self._learn(server, self.clock() - began, answers)
                    return
                except ServerDown as error:
                    self._evict(server, error)
                    if request.begins_again and not any(work.begun for work in works) and self._has_newer(request):
                        raise Lost(str(error)) from error
        raise ServerDown(f"{ATTEMPTS} servers failed to answer one request; the last: {self._last_error}")

    def _has_newer(self, request: GenerateRequest) -> bool:
        """Whether a server generates with newer weights than the request asks for."""
        return any(one.may_generate and (one.version or 0) > request.floor for one in self.servers)

    def _learns_of(self, server: Server) -> bool:
        """Whether a request that begins now tells how fast the server is.

        Not with its first answers, when it compiles; nor while others may not generate: with more of the samples than
        its share it has another pace, and more tokens per second.
        """
        return server.done > 0 and all(one.may_generate for one in self.servers)

    def _learn(self, server: Server, seconds: float, answers: Iterable[dict[str, Any]]) -> None:
        """Note how fast the server was, by its last answer."""
        if lengths := [tokens for answer in answers if (tokens := answer["meta_info"]["completion_tokens"])]:
            others = (one.speed for one in self.servers if one.may_generate and one is not server)
            server.speed.answered(seconds, lengths, others)

    def _check_versions(self, server: Server, answers: Iterable[dict[str, Any]], first: int) -> None:
        """Raise ServerDown if a token was sampled with weights older than `first` or newer than the target."""
        found = {int(version) for answer in answers for version, _ in version_runs(answer["meta_info"])}
        last = self.target.version if self.target else max(found, default=first)
        if not all(first <= version <= last for version in found):
            raise ServerDown(f"{server.url} generated with weights {sorted(found)}, expected {first} to {last}")
        if self.target is None and found:
            server.version = max(last, server.version or 0)

    def _extend(self, work: _Work, answer: dict[str, Any], server: str) -> bool:
        """Append the new part of an answer. Returns whether the completion has ended although the server continued."""
        _extend(work, answer, server)
        result, request = work.result, work.request
        at_limit = result.stop_reason == "length"
        if not at_limit and not (work.begun and request.stop):
            return False
        ends, stop_ids = self._ends(), request.stop_token_ids
        if request.ignore_eos:
            ends, stop_ids = replace(ends, tokens=frozenset()), ()
        end = ends.found(result.output_ids, work.begun, at_limit, request.stop, stop_ids)
        if end is None:
            return False
        if end < len(result.output_ids):
            result.text = ""
            _cut(work, end)
        result.stop_reason, work.known = "stop", end
        return True


def _chunks(works: Iterable[_Work], groups: int) -> list[list[_Work]]:
    """The requests in chunks of up to `groups` groups with the same floor; a group is identified by its id."""
    found, key = [], attrgetter("request.floor", "request.group")
    for _, alike in groupby(sorted(works, key=key), attrgetter("request.floor")):
        members = [list(group) for _, group in groupby(alike, key)]
        found += [list(chain(*members[at : at + groups])) for at in range(0, len(members), groups)]
    return found


def _cancel(task: asyncio.Task[None], wanted: object) -> None:
    """Callback when each request of a chunk is done or cancelled: end the chunk's task."""
    task.cancel()


def _body(works: list[_Work], stream: bool) -> dict[str, Any]:
    """The `/generate` body that continues each request from its partial output; a stream has one request."""
    prompts, params = [], []
    for work in works:
        work.begun = len(work.result.output_ids)
        prompts.append(work.request.input_ids + work.result.output_ids)
        params.append(_params(work.request, work.begun))
    if stream:
        return {"input_ids": prompts[0], "sampling_params": params[0], "return_logprob": True, "stream": True}
    starts = [-1 if work.request.scored_from is None else work.request.scored_from - 1 for work in works]
    scored = {"logprob_start_len": starts} if max(starts) >= 0 else {}
    return {"input_ids": prompts, "sampling_params": params, "return_logprob": True, **scored}


def _params(request: GenerateRequest, generated: int) -> dict[str, Any]:
    ignores = request.ignore_eos or request.scored_from is not None  # an end token among scored ones ends nothing
    params: dict[str, Any] = {
        "max_new_tokens": request.max_new_tokens - generated,
        "temperature": request.temperature,
        "no_stop_trim": True,  # so that the text matches the tokens trained on
        "sampling_seed": request.seed,
        "ignore_eos": ignores or None,
        "stop": list(request.stop) or None,
        "stop_token_ids": list(request.stop_token_ids) or None,
    }
    return {name: value for name, value in params.items() if value is not None}


def _extend(work: _Work, answer: dict[str, Any], server: str) -> None:
    """Append the new part of an answer. Each answer of a stream repeats the tokens before it.

    With SGLang's flag incremental-streaming-output it does not: then it lists fewer tokens than it counts.
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
    if work.request.scored_from is not None and (scores := meta.get("input_token_logprobs")):
        end = 1 + len(work.request.input_ids) - work.request.scored_from  # what follows was generated
        result.prompt_logprobs = [logprob for logprob, *_ in scores[1:end]]
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


def _cut(work: _Work, tokens: int) -> None:
    result = work.result
    for column in (result.output_ids, result.logprobs, result.versions, result.stale_kv):
        del column[tokens:]


def _piece(work: _Work, first: int, stop_reason: str | None = None) -> Piece:
    result, new = work.result, slice(first, work.known)
    values = (result.output_ids[new], result.logprobs[new], result.versions[new], result.stale_kv[new])
    return Piece(*values, stop_reason, result.server)
