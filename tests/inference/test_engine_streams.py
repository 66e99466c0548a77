"""Sequences with a listener: each token is reported as it is sampled, and is what it would be without a listener."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from areal_tasks.engines.embedded.api import Generate, open_request
from areal_tasks.engines.embedded.engine import Engine
from areal_tasks.engines.embedded.process import stream
from areal_tasks.engines.embedded.runner import read_weights_folder
from areal_tasks.engines.embedded.sequence import Sequence
from tests.inference.held import Held
from tests.inference.helpers import Running, make_sequences

EngineOf = Callable[..., Engine]
PROMPT = [3, 10, 17, 5]


def sequences(**params: Any) -> list[Sequence]:
    return make_sequences(PROMPT, **params)


def heard(engine: Engine, asked: list[Sequence]) -> tuple[list[Sequence], list[list[Sequence]]]:
    """The finished sequences, and what the listener of each was sent."""
    told: list[list[Sequence]] = [[] for _ in asked]
    for sequence, of_it in zip(asked, told, strict=True):
        sequence.listener = of_it.append
    return Running(engine, asked).wait(), told


def check_told(done: Sequence, told: list[Sequence]) -> None:
    """One token more each time, all but the last."""
    assert [now.output for now in told] == [done.output[:n] for n in range(1, len(done.output))]
    for now in told:
        assert now.finish is None and now.logprobs == done.logprobs[: len(now.output)]
        assert sum(count for _, count in now.versions) == len(now.output)


def test_what_is_told_on_the_way_changes_no_token(engine_of: EngineOf) -> None:
    """In slots that are left, moved and taken again, and with stop strings that are looked for across tokens."""
    engine = engine_of(slots=5)
    params = {"max_new_tokens": 30, "sampling_seed": 4, "n": 12, "stop": ["ab", "1+", "c2"]}
    alone = Running(engine, sequences(**params)).wait()
    done, told = heard(engine, sequences(**params))
    assert [(s.output, s.logprobs, s.finish, s.versions) for s in done] == [
        (s.output, s.logprobs, s.finish, s.versions) for s in alone
    ]
    assert len({len(sequence.output) for sequence in done}) > 3
    for sequence, of_it in zip(done, told, strict=True):
        check_told(sequence, of_it)


def test_new_weights_on_the_way_are_told_from_then_on(engine_of: EngineOf, other_folder: Path) -> None:
    engine = engine_of()
    [sequence] = sequences(max_new_tokens=60, ignore_eos=True)
    weights = read_weights_folder(other_folder, engine.runner.model)
    told: list[Sequence] = []

    def listen(now: Sequence) -> None:
        told.append(now)
        if len(now.output) == 5:
            engine.update_weights(weights, "1", keep_cache=False)

    sequence.listener = listen
    [done] = Running(engine, [sequence]).wait()
    check_told(done, told)
    assert done.versions == [("0", 5), ("1", 55)] and told[4].versions == [("0", 5)]
    assert told[6].versions == [("0", 5), ("1", 2)]


def events(engine: Engine, **body: Any) -> list[bytes]:
    """What a streamed request sends."""

    async def collect() -> list[bytes]:
        asked = open_request(Generate(input_ids=PROMPT, stream=True, **body), engine)
        return [event async for event in stream(engine, asked).body_iterator]  # type: ignore[attr-defined]

    return asyncio.run(collect())


def test_an_unfinished_text_holds_whole_characters_only(engine_of: EngineOf) -> None:
    engine = engine_of()
    texts = engine.detokenizer.texts
    held = Held(engine, 5)  # until the first event is made

    def cut(*args: Any) -> list[str]:
        held.go_on()
        return [text + "\ufffd" for text in texts(*args)]

    engine.detokenizer.texts = cut  # type: ignore[method-assign]
    *parts, last, _ = events(engine, sampling_params={"max_new_tokens": 20, "ignore_eos": True})
    assert parts and all("\ufffd" not in orjson.loads(part.removeprefix(b"data: "))["text"] for part in parts)
    assert orjson.loads(last.removeprefix(b"data: "))["text"].endswith("\ufffd")


def test_an_engine_that_fails_says_so_in_the_stream(engine_of: EngineOf) -> None:
    engine = engine_of()
    engine.close()
    error, done = events(engine)
    found = orjson.loads(error.removeprefix(b"data: "))["error"]
    assert "closed" in found["message"] and found["code"] == 503
    assert done == b"data: [DONE]\n\n"
