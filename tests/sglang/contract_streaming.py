"""What every inference server must do when it streams: cases over a running server, as in `contract`."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from itertools import pairwise
from typing import Any

from waiting import wait_until

from areal_tasks.engines.client import GenerateRequest, GenerateResult, InferenceClient
from areal_tasks.engines.server import BadRequest
from tests.sglang.contract_target import Json, Target, scores_of

STREAMS = 24  # at once: events repeat what came before, so long ones are dear


def tokens_of(event: Json) -> list[int]:
    return [token for _, token, *_ in event["meta_info"]["output_token_logprobs"]]


def events_repeat_what_came_before_and_end_with_the_reason(t: Target) -> None:
    with t.streaming(1, t.prompt(120), max_new_tokens=24, ignore_eos=True) as [stream]:
        events = list(stream)
    for earlier, later in pairwise(events):
        assert tokens_of(later)[: len(tokens_of(earlier))] == tokens_of(earlier)
        assert later["text"].startswith(earlier["text"]) and later["meta_info"]["weight_version"] == t.version
    reasons = [event["meta_info"]["finish_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + [{"type": "length", "length": 24}]
    meta = events[-1]["meta_info"]
    assert meta["completion_tokens"] == 24 and tokens_of(events[-1]) == events[-1]["output_ids"]
    logprobs = [logprob for logprob, *_ in meta["output_token_logprobs"]]
    t.assert_logprobs(t.prompt(120), tokens_of(events[-1]), logprobs, 1.0)


def streamed_pieces_add_up_to_the_unstreamed_greedy_answer(t: Target) -> None:
    """To the token where the server promises that it repeats itself; elsewhere up to near ties."""
    asked = [GenerateRequest(t.prompt(121 + i), 24, temperature=0.0, group=i) for i in range(8)]

    async def ask(client: InferenceClient) -> Any:
        whole = await client.generate(asked)
        return whole, await asyncio.gather(*(collected(client, request) for request in asked))

    with t.client() as run:
        whole, streamed = run(ask)
    info = t.get("/server_info")
    promised = info.get("deterministic", info.get("enable_deterministic_inference"))
    for request, a, b in zip(asked, whole, streamed, strict=True):
        same = a.output_ids == b.output_ids and a.stop_reason == b.stop_reason
        assert same or (not promised and first_difference(t, request, a, b) <= t.largest_gap)
    for request, result in zip(asked, streamed, strict=True):
        assert result.versions == [int(t.version)] * len(result.output_ids)
        best = scores_of(t.folder, request.input_ids, result.output_ids, 1.0).amax(-1)
        t.assert_logprobs(request.input_ids, result.output_ids, best.tolist(), 1.0)
        t.assert_logprobs(request.input_ids, result.output_ids, result.logprobs, 0.0)


def first_difference(t: Target, request: GenerateRequest, a: GenerateResult, b: GenerateResult) -> float:
    """|Δ logprob| of the first two tokens that differ, in nats: both follow the same tokens."""
    pairs = zip(a.output_ids, b.output_ids, strict=False)
    index = next(index for index, (one, other) in enumerate(pairs) if one != other)
    scores = scores_of(t.folder, request.input_ids, a.output_ids, 1.0)[index]
    return abs(float(scores[a.output_ids[index]] - scores[b.output_ids[index]]))


def the_first_piece_of_a_stream_comes_long_before_its_last_token(t: Target) -> None:
    new = t.max_length - 20

    def early() -> bool:
        with t.streaming(1, t.prompt(130), max_new_tokens=new, ignore_eos=True) as [stream]:
            first, *_, last = map(tokens_of, stream)
        assert len(last) == new
        return len(first) < new / 2

    wait_until(early, "a stream that is sent as it is generated")


def a_client_that_leaves_its_streams_frees_their_slots(t: Target) -> None:
    """Held by a pause, the streams wait; no client is left to generate for afterwards."""
    with t.streaming(4, t.prompt(131), max_new_tokens=t.max_length - 20, ignore_eos=True) as streams:
        for stream in streams:
            assert next(stream)["meta_info"]["finish_reason"] is None
        assert t.post("/pause_generation", {"mode": "in_place"}).status_code == 200
    t.await_load(lambda running, queued: running + queued == 0, 0.5)
    assert t.post("/continue_generation").status_code == 200
    t.generate([t.prompt(132)], max_new_tokens=1)  # SGLang tells how much there is to do when it begins something
    assert _under_way(t) <= 1


def _under_way(t: Target) -> int:
    """Samples under way: SGLang tells it at a place of its own."""
    if t.tells_its_load:
        return sum(t.load())
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in t.get("/v1/loads")["loads"])


def new_weights_interrupt_a_stream_and_the_client_goes_on_with_them(t: Target) -> None:
    version = int(t.version)
    asked = [GenerateRequest(t.prompt(140 + i), t.max_length - 20, seed=i, group=i) for i in range(STREAMS)]

    async def ask(client: InferenceClient) -> Any:
        begun = asyncio.Event()
        work = asyncio.gather(*(collected(client, request, begun) for request in asked))
        await begun.wait()
        await client.update_weights(str(t.other), version + 1)
        return await work

    def interrupted() -> list[tuple[GenerateRequest, GenerateResult]]:
        try:
            with t.client() as run:
                results = run(ask)
        finally:
            assert t.update(t.folder, version).json()["success"]
        assert all(result.stop_reason in ("stop", "length") for result in results)
        return [pair for pair in zip(asked, results, strict=True) if len(set(pair[1].versions)) > 1]

    found = wait_until(interrupted, "new weights that come before the end")
    for request, result in found[:4]:
        t.assert_cut(request.input_ids, result, version)


def a_stream_that_cannot_be_served_is_refused_with_the_reason(t: Target) -> None:
    length = t.max_length + 50

    async def ask(client: InferenceClient) -> None:
        try:
            await collected(client, GenerateRequest(t.prompt(150, length), 4))
        except BadRequest as refused:
            assert "400" in str(refused) and str(length) in str(refused)
        else:
            raise AssertionError("it was not refused")

    with t.client() as run:
        run(ask)


async def collected(
    client: InferenceClient, request: GenerateRequest, begun: asyncio.Event | None = None
) -> GenerateResult:
    """A stream's pieces put together; `begun` is set when the first one comes."""
    result = GenerateResult()
    async with aclosing(client.stream(request)) as pieces:
        async for piece in pieces:
            if begun is not None:
                begun.set()
            result.output_ids += piece.output_ids
            result.logprobs += piece.logprobs
            result.versions += piece.versions
            result.stop_reason = piece.stop_reason or ""
    return result


STREAMING_CASES = (
    events_repeat_what_came_before_and_end_with_the_reason,
    streamed_pieces_add_up_to_the_unstreamed_greedy_answer,
    the_first_piece_of_a_stream_comes_long_before_its_last_token,
    a_client_that_leaves_its_streams_frees_their_slots,
    new_weights_interrupt_a_stream_and_the_client_goes_on_with_them,
    a_stream_that_cannot_be_served_is_refused_with_the_reason,
)
