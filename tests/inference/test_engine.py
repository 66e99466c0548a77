"""The engine against plain forward passes; every way a sequence can end or be interrupted."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM
from waiting import LIMIT, wait_until

from areal_tasks.engines.embedded.engine import Engine, NotFinite
from areal_tasks.engines.embedded.runner import Runner, read_weights_folder
from areal_tasks.engines.embedded.sequence import SamplingParams, Sequence, make_sequence
from schemas.errors import UserError
from tests.inference.conftest import make_model
from tests.inference.helpers import (
    EOS,
    MAX_LENGTH,
    VOCABULARY,
    Running,
    complete,
    full_logprobs,
    greedy_reference,
    settle,
    submit,
)

EngineOf = Callable[..., Engine]


def prompt(length: int, start: int = 3) -> list[int]:
    return [3 + (start + 7 * i) % (len(VOCABULARY) - 3) for i in range(length)]


def text(sequence: Sequence) -> str:
    return "".join(VOCABULARY[t] for t in sequence.output)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("length", [1, 9, 16, 17, 64, 65, 100])
def test_logprobs_are_those_of_a_full_forward(
    engine_of: EngineOf, reference: LlamaForCausalLM, length: int, temperature: float
) -> None:
    engine = engine_of(slots=8)
    done = submit(engine, prompt(length), n=3, max_new_tokens=40, temperature=temperature, sampling_seed=5).wait()
    for sequence in done:
        expected = full_logprobs(reference, sequence.prompt, sequence.output, temperature)
        assert torch.allclose(torch.tensor(sequence.logprobs), expected, atol=1e-5)


def scored(ids: list[int], first: int) -> Sequence:
    """A sequence whose tokens from `first` on are scored."""
    return make_sequence(ids, SamplingParams(max_new_tokens=1, ignore_eos=True), EOS, MAX_LENGTH, first)


@pytest.mark.parametrize("keeps", [False, True], ids=["recomputed", "kept"])
def test_scores_go_before_what_is_queued_and_survive_new_weights(
    engine_of: EngineOf,
    reference: LlamaForCausalLM,
    model_folder: Path,
    keeps: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_of(slots=2)
    decode, passes = engine.runner.decode, itertools.count(1)

    def pausing(*arguments: Any) -> Any:
        if next(passes) == 9:
            engine.pause("in_place")  # before the next pass
        return decode(*arguments)

    monkeypatch.setattr(engine.runner, "decode", pausing)
    same = read_weights_folder(model_folder, engine.runner.model)
    engine.pause("in_place").result()
    queued = submit(engine, prompt(4), n=40, max_new_tokens=100, ignore_eos=True)
    asked = [scored(prompt(90, start), 30 + start) for start in range(2)]
    running = Running(engine, asked)
    engine.resume().result()
    wait_until(lambda: engine.paused, "some of the scores")
    assert not running.ended
    engine.update_weights(same, "1", keeps).result()
    engine.resume().result()
    for sequence in running.wait():
        assert torch.allclose(
            torch.tensor(sequence.scores),
            full_logprobs(reference, sequence.prompt, sequence.given, 1.0),
            atol=1e-5,
        )
        assert sequence.versions == [("1", 1)] and len(sequence.output) == 1
    assert not any(s.finish for s in queued.sequences[2:]), "it waited"
    engine.abort(lambda sequence: True).result()


@pytest.mark.parametrize("length", [3, 20, 80])
def test_greedy_tokens_are_those_of_transformers_generate(
    engine_of: EngineOf, reference: LlamaForCausalLM, length: int
) -> None:
    engine = engine_of()
    for start in range(4):
        asked = prompt(length, start)
        sequence = complete(engine, asked, temperature=0, max_new_tokens=30)
        assert sequence.output == greedy_reference(reference, asked, 30)


def test_more_sequences_than_slots_all_finish(engine_of: EngineOf) -> None:
    engine = engine_of(slots=5)
    runs = [submit(engine, prompt(4 + i), n=7, max_new_tokens=1 + i % 9) for i in range(20)]
    done = [s for run in runs for s in run.wait()]
    assert len(done) == 140
    assert all(s.finish is not None and len(s.output) == len(s.logprobs) for s in done)
    assert all(s.output[-1] == 1 or len(s.output) == s.limit for s in done)


def test_stop_tokens_end_a_sequence_and_are_kept(engine_of: EngineOf) -> None:
    engine = engine_of()
    free = complete(engine, prompt(5), max_new_tokens=40, sampling_seed=1, ignore_eos=True)
    stop = free.output[7]
    first = free.output.index(stop)
    stopped = complete(engine, prompt(5), max_new_tokens=40, sampling_seed=1, stop_token_ids=[2, stop, 0])
    cut = min(i for i, t in enumerate(free.output) if t in (1, 2, stop, 0))
    assert cut <= first
    assert stopped.output == free.output[: cut + 1]
    assert stopped.finish == {"type": "stop", "matched": free.output[cut]}


def test_the_end_token_stops_unless_ignored(engine_of: EngineOf) -> None:
    engine = engine_of()
    several = submit(engine, prompt(5), max_new_tokens=60, sampling_seed=7, ignore_eos=True, n=16).wait()
    free = next(s for s in several if 1 in s.output[:-1])
    ended = complete(engine, prompt(5), max_new_tokens=60, sampling_seed=free.seed)
    assert ended.output == free.output[: free.output.index(1) + 1]
    assert ended.finish == {"type": "stop", "matched": 1}
    assert free.finish == {"type": "length", "length": 60}


def test_stop_strings_may_span_tokens(engine_of: EngineOf) -> None:
    engine = engine_of()
    free = complete(engine, prompt(5), max_new_tokens=50, sampling_seed=3, ignore_eos=True)
    stop = text(free)[20:24]
    at = text(free).index(stop)
    stopped = complete(
        engine, prompt(5), max_new_tokens=50, sampling_seed=3, ignore_eos=True, stop=["never in it", stop]
    )
    assert text(stopped) == text(free)[: at + len(stop)]
    assert stopped.finish == {"type": "stop", "matched": stop}


def test_a_full_context_ends_a_sequence(engine_of: EngineOf, reference: LlamaForCausalLM) -> None:
    engine = engine_of(max_length=50)
    sequence = complete(engine, prompt(45), max_new_tokens=1000, ignore_eos=True)
    assert len(sequence.output) == 5
    assert sequence.finish == {"type": "length", "length": 5}
    expected = full_logprobs(reference, sequence.prompt, sequence.output, 1.0)
    assert torch.allclose(torch.tensor(sequence.logprobs), expected, atol=1e-5)


def endless(engine: Engine, requests: int = 1, **params: Any) -> list[Running]:
    """Sequences that would run into the context's end. They are under way; the engine holds until its next command."""
    engine.pause("in_place").result()
    given = {"max_new_tokens": 1000, "ignore_eos": True, "sampling_seed": 9, **params}
    running = [submit(engine, prompt(5), **given) for _ in range(requests)]
    decode, left, begun = engine._decode, itertools.count(3, -1), threading.Event()

    def held() -> None:
        decode()
        if next(left) == 0:
            begun.set()
            wait_until(lambda: engine._commands, "a command")

    engine._decode = held  # type: ignore[method-assign]
    engine.resume().result()
    assert begun.wait(LIMIT)
    return running


def test_abort_gives_partial_output(engine_of: EngineOf) -> None:
    engine = engine_of()
    whole = complete(engine, prompt(5), max_new_tokens=1000, ignore_eos=True, sampling_seed=9)
    running, other = endless(engine, 2)
    engine.pause("in_place").result()
    assert engine.abort(set(running.sequences).__contains__).result() == 1
    engine.resume().result()
    [partial] = running.wait()
    assert 0 < len(partial.output) < len(whole.output)
    assert partial.finish == {"type": "abort", "message": "aborted"}
    assert partial.output == whole.output[: len(partial.output)]
    assert partial.logprobs == whole.logprobs[: len(partial.output)]
    assert other.wait()[0].logprobs == whole.logprobs


def test_what_waits_is_aborted_too(engine_of: EngineOf) -> None:
    engine = engine_of()
    engine.pause("in_place").result()
    waiting = submit(engine, prompt(5), n=3, max_new_tokens=3)
    assert engine.abort(lambda s: True).result() == 3
    assert [(s.output, s.finish) for s in waiting.wait()] == [([], {"type": "abort", "message": "aborted"})] * 3


def test_a_pause_changes_nothing(engine_of: EngineOf, reference: LlamaForCausalLM) -> None:
    engine = engine_of()
    whole = complete(engine, prompt(5), max_new_tokens=1000, ignore_eos=True, sampling_seed=9)
    [running] = endless(engine)
    engine.pause("in_place").result()
    steps = engine.steps
    settle(engine)
    assert engine.steps == steps
    late = submit(engine, prompt(7), max_new_tokens=2)
    engine.resume().result()
    [sequence] = running.wait()
    assert sequence.output == whole.output
    assert sequence.logprobs == whole.logprobs
    expected = full_logprobs(reference, sequence.prompt, sequence.output, 1.0)
    assert torch.allclose(torch.tensor(sequence.logprobs), expected, atol=1e-5)
    late.wait()


def test_pause_with_abort_ends_what_runs_and_holds_what_comes(engine_of: EngineOf) -> None:
    engine = engine_of()
    engine.pause("in_place").result()
    running = submit(engine, prompt(5), max_new_tokens=1000, ignore_eos=True)
    engine.pause("abort").result()
    assert running.wait()[0].finish == {"type": "abort", "message": "aborted"}
    held = submit(engine, prompt(5), max_new_tokens=2)
    settle(engine)
    assert not held.ended
    engine.resume().result()
    assert held.wait()[0].finish is not None


def other_weights(folder: Path, engine: Engine) -> dict[str, torch.Tensor]:
    return read_weights_folder(folder, engine.runner.model)


def test_new_weights_change_version_and_output(
    engine_of: EngineOf, other_folder: Path, other_reference: LlamaForCausalLM
) -> None:
    engine = engine_of()
    before = complete(engine, prompt(9), temperature=0, max_new_tokens=20)
    engine.update_weights(other_weights(other_folder, engine), "1", False).result()
    after = complete(engine, prompt(9), temperature=0, max_new_tokens=20)
    assert before.versions == [("0", len(before.output))]
    assert after.versions == [("1", len(after.output))]
    assert after.output == greedy_reference(other_reference, prompt(9), 20)
    assert after.output != before.output


def test_new_weights_reach_what_is_running(
    engine_of: EngineOf,
    other_folder: Path,
    reference: LlamaForCausalLM,
    other_reference: LlamaForCausalLM,
) -> None:
    engine = engine_of()
    weights = other_weights(other_folder, engine)
    [running] = endless(engine, n=4)
    engine.update_weights(weights, "1", False).result()
    for sequence in running.wait():
        assert [version for version, _ in sequence.versions] == ["0", "1"]
        assert sum(count for _, count in sequence.versions) == len(sequence.output) == MAX_LENGTH - 5
        old = sequence.versions[0][1]
        logprobs = torch.tensor(sequence.logprobs)
        first = full_logprobs(reference, sequence.prompt, sequence.output, 1.0)[:old]
        then = full_logprobs(other_reference, sequence.prompt, sequence.output, 1.0)[old:]
        assert torch.allclose(logprobs, torch.cat([first, then]), atol=1e-5)


def test_pausing_in_place_can_keep_the_old_cache(
    engine_of: EngineOf, other_folder: Path, other_reference: LlamaForCausalLM
) -> None:
    engine = engine_of()
    [running] = endless(engine)
    engine.pause("in_place").result()
    engine.update_weights(other_weights(other_folder, engine), "1", True).result()
    engine.resume().result()
    [sequence] = running.wait()
    assert [version for version, _ in sequence.versions] == ["0", "1"]
    old = sequence.versions[0][1]
    fresh = full_logprobs(other_reference, sequence.prompt, sequence.output, 1.0)[old:]
    assert not torch.allclose(torch.tensor(sequence.logprobs[old:]), fresh, atol=1e-3)


def test_weights_of_another_model_are_refused_and_change_nothing(engine_of: EngineOf, tmp_path: Path) -> None:
    engine = engine_of()
    before = complete(engine, prompt(5), max_new_tokens=10, sampling_seed=1)
    wider = make_model(tmp_path / "wider", 0, intermediate_size=96)
    with pytest.raises(UserError, match=r"do not fit .* 6 of \d+ tensors"):
        engine.update_weights(load_file(wider / "model.safetensors"), "1", False).result()
    assert engine.version == "0"
    assert complete(engine, prompt(5), max_new_tokens=10, sampling_seed=1).logprobs == before.logprobs


def test_weights_that_are_not_finite_are_refused(engine_of: EngineOf, model_folder: Path) -> None:
    engine = engine_of(slots=8)
    bad = other_weights(model_folder, engine)
    bad["model.norm.weight"][3] = torch.nan
    with pytest.raises(UserError, match=r"not finite, first in model\.norm\.weight"):
        engine.update_weights(bad, "1", False).result()
    assert engine.version == "0"
    assert complete(engine, prompt(9), max_new_tokens=10).finish is not None


def test_logits_that_are_not_finite_fail_the_request_and_leave_no_trace(
    engine_of: EngineOf, model_folder: Path
) -> None:
    engine = engine_of(slots=8)
    good = other_weights(model_folder, engine)
    before = complete(engine, prompt(9), max_new_tokens=10, sampling_seed=1)
    huge = {name: w * 1e38 if "norm" in name else w for name, w in good.items()}
    engine.update_weights(huge, "1", False).result()
    with pytest.raises(NotFinite, match="not finite"):
        complete(engine, prompt(9), max_new_tokens=10)
    engine.update_weights(good, "2", False).result()
    after = complete(engine, prompt(9), max_new_tokens=10, sampling_seed=1)
    assert (after.output, after.logprobs) == (before.output, before.logprobs)


def test_a_closed_engine_fails_requests_at_once(engine_of: EngineOf) -> None:
    engine = engine_of()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        complete(engine, prompt(5))


def test_a_model_with_sliding_attention_is_refused(tmp_path: Path) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(vocab_size=23, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                           num_attention_heads=2, num_key_value_heads=2, sliding_window=16,
                           max_position_embeddings=64)  # fmt: skip
    MistralForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="sliding"):
        Runner(tmp_path, 8, 64, torch.float32)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        Runner(tmp_path, 8, 64, torch.float32)
    with pytest.raises(UserError, match="safetensors"):
        read_weights_folder(tmp_path, None)
