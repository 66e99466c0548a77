"""What every inference server must do when requests are interrupted: cases over a running server, as in `contract`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count, cycle
from typing import Any, Final

from waiting import LIMIT, wait_until

from areal_tasks.engines.client import GenerateRequest, GenerateResult, InferenceClient
from areal_tasks.engines.server import each_token, stale_runs, version_runs
from areal_tasks.store.parallel import in_background
from tests.inference.held import logprobs_of_runs
from tests.sglang.contract import logprobs_of
from tests.sglang.contract_target import Json, Target, model_of, tokenizer_of

#: Seconds after which SGLang generates much and has ended little: on a usual, a slow, a quick, and a busy machine.
WAITS: Final = (0.15, 0.5, 0.05, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


Work = asyncio.Future[list[GenerateResult]]
Act = Callable[[InferenceClient, Work], Awaitable[object]]


def _long(t: Target, seed: int) -> Callable[[], list[Json]]:
    new = t.max_length - 20
    return lambda: t.generate([t.prompt(seed + i) for i in range(4)], max_new_tokens=new, ignore_eos=True)


def a_pause_that_aborts_answers_with_what_there_is(t: Target) -> None:
    wait_until(lambda: "abort" in _aborted(t), "an abort before the end")
    assert t.generate([t.prompt(84)], max_new_tokens=2, ignore_eos=True)[0]["output_ids"], "it goes on serving"


def _aborted(t: Target) -> set[str]:
    """Why samples ended that were under way when a pause aborted them, or had ended."""
    work = in_background(_long(t, 80), "long")
    t.await_load(lambda running, _: running > 0 or work.done(), 0.1)
    assert t.post("/pause_generation", {"mode": "abort"}).status_code == 200
    assert t.post("/continue_generation").status_code == 200
    reasons = set()
    for answer in work.result(LIMIT):
        meta = answer["meta_info"]
        reasons.add(meta["finish_reason"]["type"])
        assert len(meta["output_token_logprobs"]) == len(answer["output_ids"])
    assert reasons <= {"abort", "length"}
    return reasons


def _many(t: Target, seed: int) -> list[GenerateRequest]:
    """Requests for long samples, more than run at once."""
    return [GenerateRequest(t.prompt(seed + i), t.max_length - 20, seed=i, group=i) for i in range(256)]


def _generated(t: Target, asked: list[GenerateRequest], wait: float, act: Act) -> list[GenerateResult]:
    """The results of `asked`, of which `act` has interrupted some, unless all came first.

    `wait`: seconds until much is under way, for a server that does not tell its load.
    """

    async def ask(client: InferenceClient) -> Any:
        work = asyncio.ensure_future(client.generate(asked))
        await asyncio.to_thread(t.await_load, lambda running, _: running > 0 or work.done(), wait)
        await act(client, work)
        return await work

    with t.client() as run:
        return list(run(ask))


def an_update_interrupts_and_the_client_goes_on_with_the_new_weights(t: Target) -> None:
    version, asked, waits = int(t.version), _many(t, 92), cycle(WAITS)

    def interrupted() -> list[tuple[GenerateRequest, GenerateResult]]:
        try:
            results = _generated(
                t, asked, next(waits), lambda client, _: client.update_weights(str(t.other), version + 1)
            )
        finally:
            assert t.update(t.folder, version).json()["success"]
        return [pair for pair in zip(asked, results, strict=True) if len(set(pair[1].versions)) > 1]

    for request, result in wait_until(interrupted, "new weights that come before the end")[:4]:
        t.assert_cut(request.input_ids, result, version)


def new_weights_wait_for_what_is_drained(t: Target) -> None:
    """What was under way keeps its weights to its end; what comes meanwhile waits for the new ones."""
    version, asked, waits = int(t.version), _many(t, 130), cycle(WAITS)
    late = GenerateRequest(t.prompt(139), 8)

    async def drain(client: InferenceClient) -> tuple[list[GenerateResult], GenerateResult, bool]:
        work = asyncio.ensure_future(client.generate(asked))
        await asyncio.to_thread(t.await_load, lambda running, _: running > 0 or work.done(), next(waits))
        under_way = not work.done()
        update = asyncio.ensure_future(client.update_weights(str(t.other), version + 1))
        await asyncio.sleep(0)  # the update has begun
        [[result], _] = await asyncio.gather(client.generate([late]), update)
        assert work.done()
        return await work, result, under_way

    def drained() -> tuple[list[GenerateResult], GenerateResult] | None:
        try:
            with t.client("drain") as run:
                results, result, under_way = run(drain)
        finally:
            assert t.update(t.folder, version).json()["success"]
        return (results, result) if under_way else None

    before, after = wait_until(drained, "new weights that come before the end")
    assert all(set(result.versions) == {version} and result.segments == 1 for result in before)
    for request, result in list(zip(asked, before, strict=True))[:4]:
        t.assert_logprobs(request.input_ids, result.output_ids, result.logprobs, 1.0)
    t.assert_cut(late.input_ids, after, version)
    assert set(after.versions) == {version + 1}


def a_stop_string_that_spans_new_weights_is_found(t: Target) -> None:
    """A pause ends the request, and the same weights come again as another version. The text is that of a first run."""
    version, waits, seeds = int(t.version), cycle(WAITS), count(140)
    decode = tokenizer_of(t.folder).decode

    def interrupted(prompt: list[int], wait: float, stop: tuple[str, ...]) -> GenerateResult:
        request = GenerateRequest(prompt, t.max_length - 20, temperature=0.0, ignore_eos=True, stop=stop)

        async def again(client: InferenceClient, _: Work) -> None:
            await client.pause()
            await asyncio.to_thread(t.update, t.folder, version + 1)
            await client.resume()

        try:
            return _generated(t, [request], wait, again)[0]
        finally:
            assert t.update(t.folder, version).json()["success"]

    def spanned() -> tuple[str, GenerateResult] | None:
        prompt, wait = t.prompt(next(seeds)), next(waits)
        first = interrupted(prompt, wait, ())
        cut = first.versions.count(version)
        stop = decode(first.output_ids[max(cut - 20, 0) : cut + 10])
        result = interrupted(prompt, wait, (stop,))
        cut = result.versions.count(version)
        parts = decode(result.output_ids[:cut]), decode(result.output_ids[cut:])
        whole = decode(result.output_ids)
        return (stop, result) if stop in whole and not any(stop in part for part in parts) else None

    stop, result = wait_until(spanned, "new weights within a text that repeats")
    assert result.stop_reason == "stop" and stop not in decode(result.output_ids[:-1])


def a_pause_interrupts_and_the_client_goes_on_afterwards(t: Target) -> None:
    asked, waits, ended = _many(t, 100), cycle(WAITS), list[bool]()

    async def pause(client: InferenceClient, work: Work) -> None:
        await client.pause()
        await asyncio.to_thread(t.await_load, lambda running, queued: (running == 0 < queued) or work.done(), 0.3)
        ended[:] = [work.done()]
        await client.resume()

    def interrupted() -> list[tuple[GenerateRequest, GenerateResult]]:
        results = _generated(t, asked, next(waits), pause)
        assert all(result.stop_reason in ("stop", "length") for result in results)
        return [] if ended[0] else [pair for pair in zip(asked, results, strict=True) if pair[1].segments > 1]

    for request, result in wait_until(interrupted, "a pause that comes before the end")[:4]:
        t.assert_logprobs(request.input_ids, result.output_ids, result.logprobs, 1.0)


def requests_paused_in_place_are_held(t: Target) -> None:
    wait_until(lambda: _held(t), "a pause that comes before the end")


def _held(t: Target) -> bool:
    """Whether samples were under way when the server paused. What comes in the pause is held, too."""
    work = in_background(_long(t, 110), "long")
    t.await_load(lambda running, _: running > 0 or work.done(), 0.1)
    assert t.post("/pause_generation", {"mode": "in_place"}).status_code == 200
    later = in_background(lambda: t.generate([t.prompt(114)], max_new_tokens=1), "later")
    t.await_load(lambda running, queued: running + queued == 5 or work.done(), 0.3)
    held = not work.done()
    assert not later.done()
    assert t.post("/continue_generation").status_code == 200
    assert later.result(LIMIT)
    for answer in work.result(LIMIT):
        assert answer["meta_info"]["finish_reason"]["type"] == "length"
        assert len(answer["output_ids"]) == t.max_length - 20
    return held


def tokens_over_an_older_cache_say_so_and_have_the_logprobs_of_the_mixture(t: Target) -> None:
    """New weights that come in place. What begins after them reuses nothing that older ones have computed."""
    version = int(t.version)
    models = {version: model_of(t.folder), version + 1: model_of(t.other)}

    def mixed() -> bool:
        answers, late = _continued_in_place(t, version, 120)
        for i, answer in enumerate([*answers, late]):
            versions = [int(v) for v in each_token(version_runs(answer["meta_info"]))]
            stale = each_token(stale_runs(answer["meta_info"]))
            assert stale == [v > versions[0] for v in versions] and versions == sorted(versions)
            prompt = t.prompt(120 + i % len(answers))
            t.assert_close(
                logprobs_of(answer), logprobs_of_runs(models, prompt, answer["output_ids"], versions, stale).tolist()
            )
        assert [int(v) for v in each_token(version_runs(late["meta_info"]))] == [version + 1] * 8
        return any(len(version_runs(answer["meta_info"])) == 2 for answer in answers)

    wait_until(mixed, "new weights that come before the end")


def _continued_in_place(t: Target, version: int, seed: int) -> tuple[list[Json], Json]:
    """Answers to requests that get new weights on the way, unless they end before; one that comes with the weights."""
    work = in_background(_long(t, seed), "long")
    t.await_load(lambda running, _: running > 0 or work.done(), 0.1)
    try:
        assert t.post("/pause_generation", {"mode": "in_place"}).status_code == 200
        assert t.update(t.other, version + 1, flush_cache=False).json()["success"]
        late = in_background(lambda: t.generate([t.prompt(seed)], max_new_tokens=8, ignore_eos=True), "late")
        assert t.post("/continue_generation").status_code == 200
        return work.result(LIMIT), late.result(LIMIT)[0]
    finally:
        assert t.update(t.folder, version).json()["success"]


INTERRUPTION_CASES = (
    a_pause_that_aborts_answers_with_what_there_is,
    an_update_interrupts_and_the_client_goes_on_with_the_new_weights,
    new_weights_wait_for_what_is_drained,
    a_stop_string_that_spans_new_weights_is_found,
    a_pause_interrupts_and_the_client_goes_on_afterwards,
    requests_paused_in_place_are_held,
    tokens_over_an_older_cache_say_so_and_have_the_logprobs_of_the_mixture,
)
