"""New weights while the embedded server generates: each token has its version and flag, and the logprob of these."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM
from waiting import until, wait_until

from areal_tasks.engines.access import Access
from areal_tasks.engines.client import GenerateRequest, GenerateResult, InferenceClient
from areal_tasks.engines.embedded.engine import Engine
from areal_tasks.engines.embedded.process import Server
from areal_tasks.engines.embedded.runner import read_weights_folder
from areal_tasks.engines.embedded.sequence import SamplingParams, Sequence
from areal_tasks.engines.embedded.slots import Slots
from areal_tasks.engines.ports import listen
from areal_tasks.engines.server import each_token
from areal_tasks.store.backend import open_store
from schemas.recipe.derived import Interruption
from schemas.recipe.sections import Inference
from tests.inference.fake_server import Told
from tests.inference.held import Held, logprobs_of_runs
from tests.inference.helpers import VOCABULARY, make_engine, submit

EngineOf = Callable[..., Engine]
PROMPT = [3, 10, 17, 5, 8]
TOKENS = 40
#: What is asked for together comes in one HTTP request, so that all of it begins before the engine stands still.
TOGETHER = Inference(groups_per_request=4)


@pytest.fixture(scope="module")
def models(reference: LlamaForCausalLM, other_reference: LlamaForCausalLM) -> list[LlamaForCausalLM]:
    """By version: they take turns."""
    return [reference, other_reference] * 4


@pytest.fixture(scope="module")
def folders(model_folder: Path, other_folder: Path) -> list[Path]:
    return [model_folder, other_folder] * 4


def flags(sequence: Sequence) -> tuple[list[int], list[bool]]:
    """Version and flag of each token."""
    return list(map(int, each_token(sequence.versions))), each_token(sequence.stale_kv)


def check_sequence(models: list[Any], sequence: Sequence) -> None:
    versions, stale = flags(sequence)
    assert len(versions) == len(stale) == len(sequence.output)
    expected = logprobs_of_runs(dict(enumerate(models)), sequence.prompt, sequence.output, versions, stale)
    assert torch.allclose(torch.tensor(sequence.logprobs), expected, atol=1e-4)


# ── the engine ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def small_engine(model_folder: Path) -> Iterator[Engine]:
    engine = make_engine(model_folder, slots=4, deterministic=False)
    yield engine
    engine.close()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    events=st.lists(st.sampled_from(["in_place", "flush", "pause"]), min_size=1, max_size=4),
    gaps=st.lists(st.integers(1, 7), min_size=4, max_size=4),
    samples=st.integers(1, 6),
)
def test_a_token_is_stale_if_older_weights_computed_some_of_its_cache(
    small_engine: Engine, models: list[Any], folders: list[Path], events: list[str], gaps: list[int], samples: int
) -> None:
    """Updates that keep the cache, updates that do not, and pauses, in any order."""
    engine = small_engine
    weights = [read_weights_folder(folder, engine.runner.model) for folder in folders]
    engine.update_weights(weights[0], "0", False).result()
    with passing(engine, *[sum(gaps[: i + 1]) for i in range(len(events))]) as held:
        running = submit(engine, PROMPT, samples, max_new_tokens=TOKENS, ignore_eos=True, sampling_seed=5)
        version, history = 0, []
        for i, event in enumerate(events):
            held.wait(i)
            at = held.lengths[i]
            if event in ("in_place", "flush"):
                version += 1
            if event != "flush":
                engine.pause("in_place").result()
            if event in ("in_place", "flush"):
                engine.update_weights(weights[version], str(version), event == "in_place").result()
            engine.resume().result()
            history.append((at, version, event))
        done = running.wait()
    for sequence in done:
        assert flags(sequence) == expected_flags(sequence, history)
        check_sequence(models, sequence)


def expected_flags(
    sequence: Sequence, history: list[tuple[dict[Sequence, int], int, str]]
) -> tuple[list[int], list[bool]]:
    """Written down token by token. A sequence that had not begun at an event is not touched by it."""
    versions, stale, version, is_stale = [], [], 0, False
    for token in range(len(sequence.output)):
        for at, new_version, event in history:
            begun = at.get(sequence, 0)
            if begun == token:
                version = new_version
                if event == "flush" or begun == 0:
                    is_stale = False
                elif event == "in_place":
                    is_stale = True
        versions.append(version)
        stale.append(is_stale)
    return versions, stale


@contextmanager
def passing(engine: Engine, *passes: int) -> Iterator[Held]:
    """As Held, of an engine that is used again."""
    decode = engine._decode
    held = Held(engine, *passes)
    try:
        yield held
    finally:
        held.go_on()
        engine._decode = decode  # type: ignore[method-assign]


def test_a_prompt_that_is_being_computed_is_computed_by_the_new_weights_alone(
    engine_of: EngineOf, models: list[Any], other_folder: Path
) -> None:
    engine, halves = engine_of(slots=4), threading.Event()
    prefill = engine._prefill

    def held() -> None:
        prefill()
        if not halves.is_set():
            halves.set()
            wait_until(lambda: engine._commands, "a command")

    engine._prefill = held  # type: ignore[method-assign]
    running = submit(engine, PROMPT * 20, 6, max_new_tokens=5, ignore_eos=True)  # two chunks; two samples wait
    assert halves.wait(200)
    assert engine._prefills[0].cursor == 64, "half of it is there"
    engine.pause("in_place").result()
    engine.update_weights(read_weights_folder(other_folder, engine.runner.model), "1", True).result()
    engine.resume().result()
    for sequence in running.wait():
        assert flags(sequence) == ([1] * 5, [False] * 5)
        check_sequence(models, sequence)


@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "update", "release", "compact"]), st.integers(0, 7)),
        min_size=20,
        max_size=60,
    )
)
def test_the_mark_stays_with_its_sequence(steps: list[tuple[str, int]]) -> None:
    """When slots are taken, left, taken again, and their sequences moved."""
    slots, begun, updates = Slots(8, 8, 4), dict[Sequence, int](), 0
    for step, which in steps:
        held = sorted(slots.owner)
        if step == "take" and slots.free:
            sequence = Sequence([3], SamplingParams(), 0, frozenset(), 4)
            slots.active[slots.take(sequence)] = True
            begun[sequence] = updates
        elif step == "update":
            slots.stale |= slots.active
            updates += 1
        elif step == "release" and held:
            slots.release(held[which % len(held)])
        elif step == "compact" and held and (free := [slot for slot in range(held[-1]) if slot not in held]):
            slots.move(np.array(held[-1:]), np.array(free[:1]))
        for slot, owner in slots.owner.items():
            assert bool(slots.stale[slot]) == (begun[owner] < updates)


# ── the server, by the client ───────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def served(engine: Engine, tmp_path: Path, mode: Interruption | None) -> AsyncIterator[InferenceClient]:
    """A client of the embedded server over this engine, whose completions end by their length."""
    engine.eos = frozenset()
    app = Server(engine, open_store(tmp_path.as_uri())).app()
    listener = listen()
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    client = InferenceClient([url], Access(), TOGETHER, interruption=mode)
    try:
        yield client
    finally:
        await client.close()
        server.should_exit = True
        await asyncio.to_thread(thread.join)
        listener.close()


def test_a_server_that_ends_ends_its_engine_whose_thread_holds_the_model(
    engine_of: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = engine_of()

    async def work() -> None:
        async with served(engine, tmp_path, None):
            assert engine._thread.is_alive()

    asyncio.run(work())
    assert not engine._thread.is_alive()


def request(index: int = 0, **changes: Any) -> GenerateRequest:
    return GenerateRequest(
        **{"input_ids": PROMPT, "max_new_tokens": TOKENS, "seed": 30 + index, "group": index} | changes
    )


def check_result(models: list[Any], result: GenerateResult) -> None:
    expected = logprobs_of_runs(dict(enumerate(models)), PROMPT, result.output_ids, result.versions, result.stale_kv)
    assert torch.allclose(torch.tensor(result.logprobs), expected, atol=1e-4)


def runs(values: list[Any]) -> list[Any]:
    """The values without repetitions in a row."""
    return [value for i, value in enumerate(values) if i == 0 or values[i - 1] != value]


@pytest.mark.parametrize("mode", ["in_place", "abort"])
def test_requests_continue_over_several_updates(
    mode: Interruption, engine_of: EngineOf, tmp_path: Path, models: list[Any], folders: list[Path]
) -> None:
    """In one answer. A request that begins after an update has nothing of the cache that was kept."""
    engine = engine_of()
    held = Held(engine, 5, 12)

    async def test() -> None:
        async with served(engine, tmp_path, mode) as client:
            early = asyncio.ensure_future(client.generate([request(i) for i in range(3)]))
            await asyncio.to_thread(held.wait, 0)
            await client.update_weights(str(folders[1]), 1)
            late = asyncio.ensure_future(client.generate([request(9)]))
            await asyncio.to_thread(held.wait, 1)
            await client.update_weights(str(folders[2]), 2)
            results, [new] = await early, (await late)
        for result in results:
            assert runs(result.versions) == [0, 1, 2] and result.segments == 1 and result.stop_reason == "length"
            assert len(result.output_ids) == len(result.stale_kv) == TOKENS
            assert result.stale_kv == [mode == "in_place" and version > 0 for version in result.versions]
            check_result(models, result)
        first = new.versions[0]
        assert first >= 1 and new.versions[-1] == 2
        assert new.stale_kv == [mode == "in_place" and version > first for version in new.versions]
        check_result(models, new)

    asyncio.run(test())


@pytest.mark.parametrize("mode", ["in_place", "abort", None])
def test_requests_of_another_client_continue(
    mode: Interruption | None, engine_of: EngineOf, tmp_path: Path, models: list[Any], folders: list[Path]
) -> None:
    """One that gives no weights, as in another process: what it asked for is ended, or goes on."""
    engine = engine_of()
    held = Held(engine, 5)

    async def test() -> None:
        async with served(engine, tmp_path, mode) as leader:
            client = InferenceClient([], Access(), TOGETHER)
            leader.followers.parts.append(told := Told(leader, client))
            await told.acknowledged()
            early = asyncio.ensure_future(client.generate([request(i) for i in range(3)]))
            await asyncio.to_thread(held.wait, 0)
            late = asyncio.ensure_future(client.generate([request(9, floor=1)]))
            await leader.update_weights(str(folders[1]), 1)
            results, [new] = await early, await late
            await client.close()
        for result in (*results, new):
            assert len(result.output_ids) == TOKENS and result.stop_reason == "length"
            check_result(models, result)
        assert all(runs(result.versions) == [0, 1] for result in results) and runs(new.versions) == [1]
        assert [any(result.stale_kv) for result in results] == [mode == "in_place"] * 3 and not any(new.stale_kv)

    asyncio.run(test())


def test_a_stream_carries_the_flags(engine_of: EngineOf, tmp_path: Path, models: list[Any], other_folder: Path) -> None:
    engine = engine_of()
    held, found = Held(engine, 5), GenerateResult()

    async def test() -> None:
        async with served(engine, tmp_path, "in_place") as client, aclosing(client.stream(request())) as pieces:
            async for piece in pieces:
                found.output_ids += piece.output_ids
                found.logprobs += piece.logprobs
                found.versions += piece.versions
                found.stale_kv += piece.stale_kv
                if len(found.output_ids) == 6:
                    await asyncio.to_thread(held.wait)
                    await client.update_weights(str(other_folder), 1)
        assert found.versions == [0] * 6 + [1] * (TOKENS - 6)
        assert found.stale_kv == [False] * 6 + [True] * (TOKENS - 6)
        check_result(models, found)

    asyncio.run(test())


def test_draining_lets_requests_end_and_holds_new_ones_back(
    engine_of: EngineOf, tmp_path: Path, models: list[Any], other_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine = engine_of()
    held = Held(engine, 5)

    async def test() -> None:
        async with served(engine, tmp_path, "drain") as client:
            early = asyncio.ensure_future(client.generate([request()]))
            await asyncio.to_thread(held.wait)
            update = asyncio.ensure_future(client.update_weights(str(other_folder), 1))
            await until(lambda: "change after the end of 1 requests" in caplog.text)
            late = asyncio.ensure_future(client.generate([request(1)]))
            await until(lambda: client._waiting)
            assert engine.version == "0" and not update.done()
            held.go_on()
            [old], _, [new] = await early, await update, await late
        assert (runs(old.versions), runs(new.versions)) == ([0], [1])
        for result in (old, new):
            assert not any(result.stale_kv)
            check_result(models, result)

    asyncio.run(test())


@pytest.mark.parametrize("mode", ["in_place", "abort"])
def test_a_stop_string_that_spans_new_weights_is_found(
    mode: Interruption, engine_of: EngineOf, tmp_path: Path, folders: list[Path]
) -> None:
    async def sampled(engine: Engine, **changes: Any) -> GenerateResult:
        held = Held(engine, 7)
        async with served(engine, tmp_path, mode) as client:
            work = asyncio.ensure_future(client.generate([request(**changes)]))
            await asyncio.to_thread(held.wait)
            await client.update_weights(str(folders[1]), 1)
            return (await work)[0]

    free = asyncio.run(sampled(engine_of()))
    words, at = [VOCABULARY[token] for token in free.output_ids], free.versions.index(1)
    stop = "".join(words[at - 2 : at + 2])
    assert stop not in "".join(words[: at + 1])
    ended = asyncio.run(sampled(engine_of(), stop=(stop,)))
    assert ended.stop_reason == "stop" and ended.segments == 1
    assert ended.output_ids == free.output_ids[: at + 2] and ended.versions[-3:] == [0, 1, 1]
