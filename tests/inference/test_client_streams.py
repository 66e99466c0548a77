"""Streamed completions: the pieces of one request, whatever happens to the servers that generate it."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import orjson
import pytest
from aiohttp import web

from areal_tasks.engines.client import GenerateRequest, InferenceClient, Piece
from areal_tasks.engines.server import BadRequest
from tests.inference.fake_server import Fake, run, serving, until

REQUEST = GenerateRequest([7], 6, seed=3)


class Streaming(Fake):
    """Streams the tokens 1, 2, 3 … one at a time: each is the length of the text before it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.on_generate = self.stream
        self.incremental = False  # SGLang's flag: events hold new tokens only
        self.first_events: list[dict[str, Any]] = []  # sent instead of tokens, one for a request
        self.dies_after = 0  # tokens; then the connection ends, once
        self.silent_end = False  # whether it ends as if all had been said
        self.aborts_after = 0  # tokens; the last of them comes with the event that says so, once
        self.gone = 0  # requests whose client has left

    async def stream(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert body["stream"] is True
        self.bodies.append(body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            if self.first_events:
                await self.send(response, self.first_events.pop(0))
            elif not await self.send_tokens(response, body):
                assert request.transport is not None
                request.transport.close()
                return response
            await response.write(b"data: [DONE]\n\n")
        except ConnectionError:
            self.gone += 1
        return response

    async def send_tokens(self, response: web.StreamResponse, body: dict[str, Any]) -> bool:
        """False if the connection is to be lost."""
        prompt, most, version = body["input_ids"], body["sampling_params"]["max_new_tokens"], self.version
        for n in range(1, most + 1):
            await asyncio.sleep(self.delay)  # as a server takes its time
            aborted, last = n == self.aborts_after, n == most
            if aborted:
                self.aborts_after = 0
            reason = {"type": "abort" if aborted else "length"} if aborted or last else None
            await self.send(response, self.event(prompt, n, version, reason))
            if n == self.dies_after:
                self.dies_after = 0
                return self.silent_end
            if aborted:
                return True
        return True

    def event(self, prompt: list[int], n: int, version: int, reason: dict[str, Any] | None) -> dict[str, Any]:
        answer = self.answer(prompt, 10**9, False, version, n)
        answer["meta_info"]["finish_reason"] = reason
        if self.incremental:
            answer["meta_info"]["output_token_logprobs"] = answer["meta_info"]["output_token_logprobs"][-1:]
        return answer

    async def send(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(b"data: " + orjson.dumps(event) + b"\n\n")


async def pieces_of(client: InferenceClient, request: GenerateRequest = REQUEST) -> list[Piece]:
    async with aclosing(client.stream(request)) as pieces:
        return [piece async for piece in pieces]


def check_pieces(pieces: list[Piece], versions: list[int] | None = None, reason: str = "length", most: int = 6) -> None:
    """The pieces hold each token once, in order, and the last one says why it is the last."""
    tokens = [token for piece in pieces for token in piece.output_ids]
    assert tokens == list(range(1, most + 1))
    assert [x for piece in pieces for x in piece.logprobs] == [pytest.approx(-0.1 * token) for token in tokens]
    assert [v for piece in pieces for v in piece.versions] == (versions or [0] * most)
    assert [piece.stop_reason for piece in pieces] == [None] * (len(pieces) - 1) + [reason]
    assert all(piece.output_ids for piece in pieces[:-1])


@pytest.mark.parametrize("incremental", [False, True])
def test_tokens_come_as_they_are_generated(incremental: bool) -> None:
    async def test() -> None:
        fake = Streaming(delay=0.01)
        fake.incremental = incremental
        async with serving(fake) as client:
            pieces = await pieces_of(client)
            check_pieces(pieces)
            assert len(pieces) > 3 and {piece.server for piece in pieces} == {fake.url}
            [server] = client.servers
            assert server.done == 1 and server.load == server.asks == 0

    run(test)


def test_the_first_piece_comes_before_the_last_token_is_generated() -> None:
    async def test() -> None:
        fake = Streaming(delay=10)
        async with serving(fake) as client:
            pieces = client.stream(REQUEST)
            fake.delay = 0.0  # of the first token
            waiting = asyncio.ensure_future(anext(pieces))
            await until(lambda: len(fake.bodies) > 0)
            fake.delay = 10  # of the others
            assert (await waiting).output_ids[0] == 1
            await pieces.aclose()

    run(test)


@pytest.mark.parametrize("silent", [False, True])
def test_a_server_that_dies_is_followed_by_another_which_goes_on(silent: bool) -> None:
    async def test() -> None:
        dying, well = Streaming(delay=0.01), Streaming(delay=0.01)
        dying.dies_after, dying.silent_end = 3, silent
        async with serving(dying, well) as client:
            pieces = await pieces_of(client)
            check_pieces(pieces)
            assert [server.healthy for server in client.servers] == [False, True]
            assert {piece.server for piece in pieces} == {dying.url, well.url}
            assert well.bodies[0]["input_ids"] == [7, 1, 2, 3]
            assert well.bodies[0]["sampling_params"]["max_new_tokens"] == 3

    run(test)


def test_new_weights_on_the_way_make_later_tokens_theirs() -> None:
    async def test() -> None:
        fake = Streaming(delay=0.02)
        async with serving(fake) as client:
            await client.update_weights("w0", 0)
            pieces = []
            async with aclosing(client.stream(REQUEST)) as stream:
                async for piece in stream:
                    pieces.append(piece)
                    if len(pieces) == 2:
                        fake.aborts_after = 4
                        await client.update_weights("w1", 1)
            check_pieces(pieces, [0, 0, 0, 1, 1, 1])
            assert fake.bodies[1]["input_ids"] == [7, 1, 2, 3], "the token that came with the abort is sampled again"

    run(test)


def test_an_abort_that_brings_no_token_takes_none_back() -> None:
    async def test() -> None:
        fake = Streaming()
        aborted = fake.event([7], 0, 0, {"type": "abort", "message": "Abort in waiting queue"})
        fake.first_events = [aborted, {"error": {"message": "Request x was aborted", "code": 499}}]
        async with serving(fake) as client:
            check_pieces(await pieces_of(client))
            assert [body["input_ids"] for body in fake.bodies] == [[7]] * 3

    run(test)


def test_who_stops_listening_lets_the_server_go() -> None:
    async def test() -> None:
        fake = Streaming(delay=0.01)
        async with serving(fake) as client:
            async with aclosing(client.stream(GenerateRequest([7], 10**6))) as pieces:
                async for _ in pieces:
                    break
            await until(lambda: fake.gone == 1)
            assert client.servers[0].load == client.servers[0].asks == 0 and client.servers[0].healthy

    run(test)


def test_tokens_of_wrong_weights_are_not_handed_on() -> None:
    async def test() -> None:
        liar, honest = Streaming(), Streaming()
        async with serving(liar, honest) as client:
            await client.update_weights("w", 0)
            liar.version = 5
            check_pieces(await pieces_of(client))
            assert [server.healthy for server in client.servers] == [False, True]

    run(test)


@pytest.mark.parametrize("within", [True, False])
def test_an_event_that_tells_of_an_error_is_treated_as_its_status_would_be(within: bool) -> None:
    async def test() -> None:
        fakes = [Streaming(), Streaming()]
        for code in (503, 400):
            error = {"error": {"message": "no room", "code": code}}
            reason = {"type": "abort", "message": "no room", "status_code": code}
            fakes[0].first_events.append(fakes[0].event([7], 0, 0, reason) if within else error)
        async with serving(*fakes) as client:
            check_pieces(await pieces_of(client))
            await until(lambda: client.servers[0].healthy)
            with pytest.raises(BadRequest, match="400: no room"):
                for group in range(8):
                    await pieces_of(client, GenerateRequest([7], 6, group=group))

    run(test)


def test_an_event_may_be_long() -> None:
    async def test() -> None:
        fake = Streaming()
        fake.first_events = [fake.event([7], 30_000, 0, {"type": "length"})]
        async with serving(fake) as client:
            check_pieces(await pieces_of(client, GenerateRequest([7], 30_000)), most=30_000)

    run(test)
