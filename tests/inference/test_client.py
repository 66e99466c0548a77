"""The client against servers that die, dawdle, lie and forget."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from aiohttp import web

from areal_tasks.engines import server_pool
from areal_tasks.engines.access import Access
from areal_tasks.engines.client import GenerateRequest, InferenceClient
from areal_tasks.engines.server import BadRequest, Server, ServerDown, Target
from schemas.errors import UserError
from schemas.recipe.sections import Inference
from tests.inference.fake_server import Fake, check, requests, run, serving, until


def test_results_are_in_order_and_groups_travel_together() -> None:
    async def test() -> None:
        fakes = [Fake(), Fake()]
        async with serving(*fakes, groups_per_request=3) as client:
            asked = requests(10)[::-1]
            results = await client.generate(asked)
            check(asked, results)
            bodies = [b for fake in fakes for b in fake.bodies]
            assert sorted(len(b["input_ids"]) for b in bodies) == [2, 6, 6, 6]
            seeds = [[p["sampling_seed"] // 100 for p in b["sampling_params"]] for b in bodies]
            assert sum(len(set(s)) for s in seeds) == 10  # no group is in two requests
            assert {r.server for r in results} == {f.url for f in fakes}
            assert client.version == 0

    run(test)


def test_callers_of_one_turn_share_requests_and_each_gets_its_own() -> None:
    async def test() -> None:
        fake = Fake(per_sample=0.01)
        async with serving(fake, groups_per_request=3) as client:
            asked = requests(7)
            groups = [asked[at : at + 2] for at in range(0, len(asked), 2)]
            found = await asyncio.gather(*map(client.generate, groups))
            check(asked, [result for results in found for result in results])
            assert sorted(len(body["input_ids"]) for body in fake.bodies) == [2, 6, 6]

    run(test)


def test_a_prompt_that_is_refused_costs_no_other_group_of_its_request() -> None:
    class Strict(Fake):
        async def generate(self, request: web.Request) -> web.StreamResponse:
            if any(len(ids) > 50 for ids in (await request.json())["input_ids"]):
                return web.json_response({"error": {"message": "too long"}}, status=400)
            return await super().generate(request)

    async def test() -> None:
        async with serving(Strict(), groups_per_request=8) as client:
            asked = requests(6)
            groups = [[replace(one, group=i)] for i, one in enumerate(asked)]
            groups[2] = [replace(groups[2][0], input_ids=[1] * 60)]
            found = await asyncio.gather(*map(client.generate, groups), return_exceptions=True)
            assert [i for i, result in enumerate(found) if isinstance(result, BadRequest)] == [2]
            good = [i for i in range(6) if i != 2]
            check([groups[i][0] for i in good], [found[i][0] for i in good])  # type: ignore[index]

    run(test)


def test_a_caller_that_gives_up_ends_what_nobody_else_waits_for() -> None:
    async def test() -> None:
        fake = Fake(delay=1000)
        async with serving(fake, groups_per_request=1) as client:
            stays, goes = (asyncio.ensure_future(client.generate(requests(1))) for _ in range(2))
            await until(lambda: len(fake.bodies) == 1)  # of one group: they share the request
            goes.cancel()
            alone = asyncio.ensure_future(client.generate([replace(requests(1)[0], group=9)]))
            await until(lambda: len(fake.bodies) == 2)
            alone.cancel()
            await until(lambda: client.servers[0].requests == 1)
            assert not stays.done()
            stays.cancel()
            await until(lambda: client.servers[0].requests == 0)

    run(test)


def test_a_group_returns_to_its_server() -> None:
    async def test() -> None:
        fakes = [Fake(), Fake(), Fake()]
        async with serving(*fakes) as client:
            first = [r.server for r in await client.generate(requests(9))]
            assert [r.server for r in await client.generate(requests(9))] == first
            assert len(set(first)) == 3

    run(test)


@pytest.mark.parametrize("how", ["broken", "deaf"])
def test_what_a_dying_server_held_is_retried_on_another(how: str) -> None:
    async def test() -> None:
        dying, well = Fake(delay=0.05), Fake(delay=0.05)
        async with serving(dying, well) as client:
            asked = requests(8)
            work = asyncio.ensure_future(client.generate(asked))
            await until(lambda: len(dying.bodies) > 0)
            setattr(dying, how, True)
            check(asked, await work)
            assert well.samples == 16
            before = len(dying.bodies)
            check(requests(4), await client.generate(requests(4)))
            assert len(dying.bodies) == before  # evicted

    run(test)


def test_a_recovered_server_is_brought_up_to_date_and_let_in_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "PROBE_SECONDS", (0.01, 0.02))

    async def test() -> None:
        ill, well = Fake(), Fake()
        async with serving(ill, well) as client:
            ill.broken = True
            check(requests(4), await client.generate(requests(4)))
            assert len(await client.update_weights("file:///w1.json", 1)) == 1
            ill.broken = False
            await until(lambda: ill.updates == ["file:///w1.json"])
            await until(lambda: client.servers[0].healthy)
            asked = [GenerateRequest([7], 3, group=1000 + i) for i in range(10)]
            check(asked, await client.generate(asked), version=1)
            assert any(b["input_ids"] == [[7]] for b in ill.bodies[-5:])

    run(test)


def test_a_slow_server_gets_less() -> None:
    async def test() -> None:
        slow, quick = Fake(per_sample=0.02), Fake(per_sample=0.001)
        async with serving(slow, quick, max_concurrent_requests=1) as client:
            for start in range(0, 60, 12):
                asked = [GenerateRequest([7], 3, group=start + i) for i in range(12)]
                check(asked, await client.generate(asked))
            assert quick.samples > 2 * slow.samples > 0

    run(test)


def test_tokens_of_wrong_weights_are_noticed_and_sampled_elsewhere() -> None:
    async def test() -> None:
        liar, honest = Fake(), Fake()
        async with serving(liar, honest) as client:
            await client.update_weights("zero", 0)
            liar.version = 5
            asked = requests(6)
            check(asked, await client.generate(asked))
            assert not client.servers[0].healthy

    run(test)


def test_an_update_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "NO_SERVER_SECONDS", 0.2)

    async def test() -> None:
        good, stuck = Fake(), Fake()
        stuck.stuck = True
        async with serving(good, stuck) as client:
            assert len(await client.update_weights("w", 3)) == 1
            assert client.version == 3
            assert [s.healthy for s in client.servers] == [True, False]
            check(requests(4), await client.generate(requests(4)), version=3)
        async with serving(stuck) as client:
            with pytest.raises(ServerDown, match="holds weights 0 after it was sent 3"):
                await client.update_weights("w", 3)

    run(test)


def test_all_servers_load_new_weights_at_the_same_time() -> None:
    """Each of them waits for the other to have been asked."""

    async def test() -> None:
        fakes, begun = [Fake(), Fake()], asyncio.Barrier(2)

        async def together(fake: Fake, request: web.Request) -> web.Response:
            await begun.wait()
            return await Fake.update(fake, request)

        for fake in fakes:
            fake.on_update = partial(together, fake)
        async with serving(*fakes) as client:
            assert len(await client.update_weights("w", 1)) == 2

    run(test)


def test_interrupted_output_is_continued_with_its_versions() -> None:
    async def test() -> None:
        fake = Fake(delay=0.05)
        async with serving(fake) as client:
            await client.update_weights("w0", 0)
            fake.interrupt = 1
            work = asyncio.ensure_future(client.generate(requests(1, size=2)))
            await until(lambda: len(fake.bodies) > 0)
            await client.update_weights("w1", 1)
            results = await work
            assert [r.output_ids for r in results] == [[1, 2, 3]] * 2
            assert all(r.versions == [0, 1, 1] and r.segments == 2 for r in results)
            assert [r.text for r in results] == [""] * 2, "to be decoded again"
            assert fake.bodies[1]["input_ids"] == [[7, 1]] * 2, "the last token is sampled again"
            assert [p["max_new_tokens"] for p in fake.bodies[1]["sampling_params"]] == [2, 2]

    run(test)


def test_a_server_that_aborts_for_ever_is_given_up() -> None:
    async def test() -> None:
        fake = Fake()
        fake.interrupt = 10**9
        fake.answer = lambda prompt, most, interrupted, version: {  # type: ignore[method-assign]
            "text": "", "output_ids": [],
            "meta_info": {"finish_reason": {"type": "abort"}, "weight_version": "0", "completion_tokens": 0,
                          "output_token_logprobs": []}}  # fmt: skip
        async with serving(fake) as client:
            with pytest.raises(ServerDown, match="keeps aborting"):
                await client.generate(requests(1))

    run(test)


def test_an_answer_that_counts_tokens_it_does_not_list_is_not_taken() -> None:
    async def test() -> None:
        fake = Fake()
        whole = fake.answer

        def short(*arguments: Any) -> dict[str, Any]:
            found = whole(*arguments)
            del found["meta_info"]["output_token_logprobs"][0]
            return found

        fake.answer = short  # type: ignore[method-assign]
        async with serving(fake) as client:
            with pytest.raises(UserError, match="counts 3 tokens and lists the last 2"):
                await client.generate(requests(1))

    run(test)


def test_a_load_of_another_attempt_at_the_same_version_does_not_count() -> None:
    async def test() -> None:
        fake = Fake()
        async with serving(fake) as client:
            [server] = client.servers

            async def outdated(request: web.Request) -> web.Response:
                fake.on_update = fake.update
                await client.holding(Target(5, "b", "attempt=b"))
                return await fake.update(request)

            fake.on_update = outdated
            assert await client.update_weights("attempt=a", 5, "a") == []
            await until(lambda: server.may_generate)
            assert fake.updates == ["attempt=a", "attempt=b"] and fake.version == 5

    run(test)


def test_a_version_that_no_server_confirms_is_not_held() -> None:
    async def test() -> None:
        fake = Fake(version=3)
        async with serving(fake) as client:
            await client.adopt(3, "three", [fake.url])
            assert client.version == 3
            await client.adopt(4, "four", [fake.url])
            assert client.stuck and not client.servers[0].healthy

    run(test)


def test_a_refusal_carries_the_reason_and_is_not_retried() -> None:
    async def test() -> None:
        fakes = [Fake(), Fake()]
        async with serving(*fakes) as client:
            with pytest.raises(UserError, match="400: token id 999 is outside"):
                await client.generate([GenerateRequest([999], 3)])
            assert sum(len(f.bodies) for f in fakes) == 1

    run(test)


def test_without_any_server_the_last_error_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "NO_SERVER_SECONDS", 0.2)

    async def test() -> None:
        fake = Fake()
        fake.broken = True
        async with serving(fake) as client:
            with pytest.raises(ServerDown, match=r"no inference server answers.*500: out of order"):
                await client.generate(requests(1))
        gone = InferenceClient(["http://127.0.0.1:9"], Access("token"), Inference())
        with pytest.raises(ServerDown, match=r"no inference server answers.*Connect"):
            await gone.generate(requests(1))
        await gone.close()

    run(test)


def test_cancelling_closes_the_connections() -> None:
    async def test() -> None:
        fake = Fake(delay=10)
        async with serving(fake) as client:
            work = asyncio.ensure_future(client.generate(requests(3)))
            await until(lambda: len(fake.bodies) > 0)
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work
            await until(lambda: client.servers[0].load == 0)

    run(test)


def test_a_request_that_was_aborted_before_its_turn_is_sent_again() -> None:
    async def test() -> None:
        fake = Fake()
        async with serving(fake) as client:
            asked, answer = requests(1), fake.generate
            refusals = iter([499, 499])

            async def first_499(request: web.Request) -> web.StreamResponse:
                if (status := next(refusals, 200)) != 200:
                    return web.json_response({"error": {"message": "Request x was aborted"}}, status=status)
                return await answer(request)

            fake.on_generate = first_499
            check(asked, await client.generate(asked))
            assert len(fake.bodies) == 1 and client.servers[0].healthy

    run(test)


def test_an_update_interrupts_what_is_being_generated() -> None:
    async def test() -> None:
        fake = Fake()
        async with serving(fake) as client:
            await client.update_weights("w", 1)
            assert fake.update_bodies[0]["abort_all_requests"] and fake.update_bodies[0]["flush_cache"]

    run(test)


def test_a_server_that_hangs_is_found_out_and_its_requests_go_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "WATCH_SECONDS", 0.02)
    monkeypatch.setattr(server_pool, "LOST_SECONDS", 0.05)

    async def test() -> None:
        hung, well = Fake(delay=20), Fake(delay=0.2)
        hung.broken_health = True
        async with serving(hung, well) as client:
            await client.update_weights("zero", 0)
            asked = requests(4)
            check(asked, await client.generate(asked))
            assert {s.url: s.healthy for s in client.servers} == {hung.url: False, well.url: True}
            assert well.samples == 8
            await until(lambda: client.lost() == [hung.url])

    run(test)


def test_a_paused_server_is_not_taken_for_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "WATCH_SECONDS", 0.01)

    async def test() -> None:
        fake = Fake(delay=0.3)
        fake.broken_health = True
        async with serving(fake) as client:
            await client.pause()
            check(requests(1), await client.generate(requests(1)))
            assert client.servers[0].healthy and client.lost() == []

    run(test)


def test_no_server_gets_more_requests_at_once_than_the_recipe_says(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        fakes = [Fake(), Fake()]
        most: dict[str, int] = {}
        async with serving(*fakes, max_concurrent_requests=3) as client:
            begin = Server.begin

            def counted(server: Server, samples: int, now: float) -> None:
                begin(server, samples, now)
                most[server.url] = max(most.get(server.url, 0), server.requests)

            monkeypatch.setattr(Server, "begin", counted)
            check(requests(20), await client.generate(requests(20)))
            assert set(most.values()) == {3}

    run(test)


def test_a_server_of_somebody_else_may_have_a_name_for_its_weights() -> None:
    async def test() -> None:
        fake = Fake()
        fake.name = "default"
        async with serving(fake) as client:
            assert client.version is None
            await client.update_weights("w", 4)
            assert client.version == 4

    run(test)


def test_a_timeout_names_the_setting_that_it_is() -> None:
    """Python's own TimeoutError says nothing."""

    async def test() -> None:
        async with serving(Fake(delay=60.0), request_timeout_seconds=0.05) as client:
            server = client.servers[0]
            with pytest.raises(ServerDown, match=r"/generate: no answer within 0\.05 s, .* inference\.request_t"):
                await server.ask("/generate", {"input_ids": [[1]]})
            with pytest.raises(ServerDown, match=r"/generate: no answer within 0\.01 s$"):
                await server.ask("/generate", {"input_ids": [[1]]}, seconds=0.01)

    run(test)
