"""What every inference server must do: cases over a running server, whichever engine it is.

Each case is a plain function of a `Target`. They speak HTTP as the client does, and compare with a plain forward pass.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from waiting import LIMIT

from areal_tasks.engines.client import GenerateRequest, InferenceClient
from areal_tasks.engines.external import PROBE, check_temperature
from areal_tasks.engines.server import BadRequest
from schemas.errors import UserError
from tests.sglang.contract_target import Json, Target, reference, scores_of, tokenizer_of


def logprobs_of(answer: Json) -> list[float]:
    return [logprob for logprob, *_ in answer["meta_info"]["output_token_logprobs"]]


def answers_without_the_token_are_refused(t: Target) -> None:
    for path in ("/generate", "/update_weights_from_disk", "/pause_generation"):
        assert t.post(path, {}, token="wrong").status_code == 401, path
    for path in ("/model_info", "/server_info", "/health_generate"):
        assert httpx.get(f"{t.url}{path}", timeout=LIMIT).status_code == 401, path


def health_and_information(t: Target) -> None:
    assert t.version.isdecimal()
    headers = {"Authorization": f"Bearer {t.token}"}
    for path in ("/server_info", "/health_generate"):
        assert httpx.get(f"{t.url}{path}", headers=headers, timeout=LIMIT).status_code == 200


def an_answer_holds_tokens_logprobs_version_and_reason(t: Target) -> None:
    [answer] = t.generate([t.prompt(1)], max_new_tokens=5, ignore_eos=True)
    meta = answer["meta_info"]
    assert len(answer["output_ids"]) == meta["completion_tokens"] == 5
    assert meta["prompt_tokens"] == 12 and meta["weight_version"] == t.version
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert [token for _, token, *_ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(isinstance(x, float) and x <= 0 for x in logprobs_of(answer))
    assert isinstance(answer["text"], str)


def logprobs_are_those_of_the_model_at_the_temperature(t: Target) -> None:
    prompts = [t.prompt(10 + i, 8 + i) for i in range(4)]
    for temperature in (1.0, 0.7, 0.0):
        for prompt, answer in zip(
            prompts, t.generate(prompts, max_new_tokens=24, temperature=temperature), strict=True
        ):
            t.assert_logprobs(prompt, answer["output_ids"], logprobs_of(answer), temperature)


def a_high_temperature_makes_all_tokens_equally_likely(t: Target) -> None:
    """By which the client tells servers that give logprobs before the temperature is applied."""
    answers = t.post("/generate", PROBE).raise_for_status().json()
    assert len({answer["output_ids"][0] for answer in answers}) > 4
    check_temperature(t.url, answers)
    raw = t.generate(PROBE["input_ids"], max_new_tokens=1, temperature=1.0)
    for answer, hot in zip(raw, answers, strict=True):
        [[_, token, *_]] = hot["meta_info"]["output_token_logprobs"]
        answer["meta_info"]["output_token_logprobs"] = [[reference(t.folder, [0], [token], 1.0)[0], token]]
    with pytest.raises(UserError, match="before the temperature is applied"):
        check_temperature(t.url, raw)


def tokens_of_a_prompt_are_scored_and_the_temperature_is_not_applied(t: Target) -> None:
    """Beside prompts whose tokens are not. An end token among those that are scored ends nothing."""
    eos = tokenizer_of(t.folder).eos_token_id
    prompts = [[*t.prompt(60 + i, 6), *([eos] * i), *t.prompt(70 + i, 9 + i)] for i in range(3)]
    body = {
        "input_ids": [*prompts, t.prompt(63)],
        "sampling_params": [{"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True, "no_stop_trim": True}] * 4,
        "return_logprob": True,
        "logprob_start_len": [4, 5, 6, -1],
    }
    *scored, other = t.post("/generate", body).raise_for_status().json()
    for prompt, start, answer in zip(prompts, (4, 5, 6), scored, strict=True):
        unknown, *found = answer["meta_info"]["input_token_logprobs"]
        assert unknown[0] is None and [token for _, token, *_ in found] == prompt[start + 1 :]
        tokens = [*prompt[start + 1 :], *answer["output_ids"]]
        logprobs = [*(logprob for logprob, *_ in found), *logprobs_of(answer)]
        t.assert_logprobs(prompt[: start + 1], tokens, logprobs, 1.0)
        assert answer["meta_info"]["prompt_tokens"] == len(prompt) and answer["meta_info"]["completion_tokens"] == 1
    assert not other["meta_info"].get("input_token_logprobs")


def the_client_has_prompts_scored(t: Target) -> None:
    asked = [GenerateRequest(t.prompt(80 + i, 12), 1, group=i, scored_from=3 + i) for i in range(3)]
    other = GenerateRequest(t.prompt(83), 1)

    async def work(client: InferenceClient) -> None:
        *scored, unscored = await client.generate([*asked, other])
        assert not unscored.prompt_logprobs
        for request, result in zip(asked, scored, strict=True):
            ids, first = request.input_ids, request.scored_from
            t.assert_logprobs(ids[:first], ids[first:], result.prompt_logprobs, 1.0)
            assert result.versions == [int(t.version)]

    with t.client() as call:
        call(work)


def a_mixed_batch_keeps_its_parameters_apart(t: Target) -> None:
    prompts = [t.prompt(20 + i, 5 + 3 * i) for i in range(3)]
    params = [{"max_new_tokens": 2 + 3 * i, "temperature": (0.0, 1.0, 0.5)[i], "ignore_eos": True} for i in range(3)]
    answers = t.generate(prompts, *params)
    assert [len(a["output_ids"]) for a in answers] == [2, 5, 8]
    for prompt, answer, p in zip(prompts, answers, params, strict=True):
        t.assert_logprobs(prompt, answer["output_ids"], logprobs_of(answer), p["temperature"])


def greedy_is_greedy(t: Target) -> None:
    """Each token is the likeliest, up to rounding.

    Whether a near tie falls the same way twice, only a deterministic server promises: SGLang computes a prompt that it
    has in its cache by other kernels, which round differently. A sampled token is whole nats from the likeliest.
    """
    prompts = [t.prompt(30 + i) for i in range(4)]
    for prompt, answer in zip(prompts, t.generate(prompts, max_new_tokens=8, temperature=0.0), strict=True):
        best = scores_of(t.folder, prompt, answer["output_ids"], 1.0).amax(-1)
        t.assert_logprobs(prompt, answer["output_ids"], best.tolist(), 1.0)
        t.assert_logprobs(prompt, answer["output_ids"], logprobs_of(answer), 1.0)


def samples_of_a_group_differ(t: Target) -> None:
    params = [{"sampling_seed": 2**62 + i} for i in range(8)]
    answers = t.generate([t.prompt(31)] * 8, *params, max_new_tokens=16, ignore_eos=True)
    assert len({tuple(a["output_ids"]) for a in answers}) > 4


def what_is_deterministic_repeats_itself_where_the_server_promises_it(t: Target) -> None:
    info = t.get("/server_info")
    promised = info.get("deterministic", info.get("enable_deterministic_inference"))
    for params in ({"sampling_seed": 7}, {"temperature": 0.0}):
        [first], [second] = (t.generate([t.prompt(32)], params, max_new_tokens=16) for _ in range(2))
        assert not promised or first["output_ids"] == second["output_ids"]


def the_end_token_ends_and_is_kept(t: Target) -> None:
    eos = tokenizer_of(t.folder).eos_token_id
    for answer in t.generate([t.prompt(40 + i) for i in range(32)], max_new_tokens=24, temperature=1.5):
        output, reason = answer["output_ids"], answer["meta_info"]["finish_reason"]
        assert eos not in output[:-1]
        if len(output) < 24:
            assert reason["type"] == "stop" and reason["matched"] == output[-1]


def a_stop_token_ends_and_is_kept(t: Target) -> None:
    prompts = [t.prompt(50 + i) for i in range(8)]
    free = t.generate(prompts, max_new_tokens=12, temperature=0.0, ignore_eos=True)
    stops = [answer["output_ids"][5] for answer in free]
    params = [{"stop_token_ids": [stop]} for stop in stops]
    ended = 0
    for stop, answer in zip(stops, t.generate(prompts, *params, max_new_tokens=12, temperature=0.0), strict=True):
        output = answer["output_ids"]
        assert stop not in output[:-1]
        if output[-1] == stop and len(output) < 12:
            assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
            ended += 1
    assert ended >= 4, "greedy again, most meet the token that they met before"
    ignoring = t.generate(prompts, *params, max_new_tokens=12, temperature=0.0, ignore_eos=True)
    assert [len(answer["output_ids"]) for answer in ignoring] == [12] * 8, "ignore_eos ignores stop tokens too"
    assert sum(stop in answer["output_ids"][:-1] for stop, answer in zip(stops, ignoring, strict=True)) >= 4


def a_stop_string_ends_and_is_kept(t: Target) -> None:
    prompts, tokenizer = [t.prompt(51 + i) for i in range(8)], tokenizer_of(t.folder)
    free = t.generate(prompts, max_new_tokens=24, temperature=0.0, ignore_eos=True)
    words = [_word(tokenizer, answer["output_ids"]) for answer in free]
    asked = [(prompt, {"stop": [word]}) for prompt, word in zip(prompts, words, strict=True) if word]
    answers = t.generate(
        [prompt for prompt, _ in asked],
        *(stop for _, stop in asked),
        max_new_tokens=24,
        temperature=0.0,
        ignore_eos=True,
    )
    ended = 0
    for stop, answer in zip(filter(None, words), answers, strict=True):
        output = answer["output_ids"]
        assert stop not in tokenizer.decode(output[:-1]) and len(logprobs_of(answer)) == len(output)
        if len(output) < 24:
            assert stop in tokenizer.decode(output) and stop in answer["text"]
            assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
            ended += 1
    assert ended >= 4, "greedy again, most meet the word that they met before"


def _word(tokenizer: Any, output: list[int]) -> str:
    """The text of a token in the middle of `output` that is whole characters and not special; empty if none is."""
    ids = (i for i in output[6:20] if i not in tokenizer.all_special_ids)
    words = (tokenizer.decode([i]) for i in ids)
    return next((word for word in words if word.strip() and word.isprintable() and "�" not in word), "")


def a_sample_may_fill_the_models_length(t: Target) -> None:
    room = 4
    prompts = [t.prompt(60, t.max_length - room), t.prompt(61, t.max_length - 1)]
    long, longest = t.generate(prompts, {"max_new_tokens": room}, {"max_new_tokens": 1}, ignore_eos=True)
    assert (len(long["output_ids"]), len(longest["output_ids"])) == (room, 1)


def a_prompt_that_is_too_long_is_refused_with_the_reason(t: Target) -> None:
    body = {"input_ids": [t.prompt(62, t.max_length + 50)], "sampling_params": {"max_new_tokens": 4}}
    answer = t.post("/generate", body)
    assert answer.status_code == 400 and str(t.max_length + 50) in answer.text

    async def ask(client: InferenceClient) -> None:
        try:
            await client.generate([GenerateRequest(t.prompt(63, t.max_length + 50), 4)])
        except BadRequest as refused:
            assert "400" in str(refused)
        else:
            raise AssertionError("it was not refused")

    with t.client() as run:
        run(ask)


def an_unknown_token_is_refused(t: Target) -> None:
    for unknown in (t.vocabulary, t.vocabulary + 7, -1):
        body = {"input_ids": [[3, unknown]], "sampling_params": {"max_new_tokens": 4}}
        assert t.post("/generate", body).status_code == 400, unknown
    assert t.generate([[3, t.vocabulary - 1]], max_new_tokens=4, ignore_eos=True), "it goes on serving"


def sixty_four_requests_at_once(t: Target) -> None:
    asked = [GenerateRequest(t.prompt(70 + i // 4, 6 + i // 4), 16, seed=i, group=i // 4) for i in range(256)]

    async def ask(client: InferenceClient) -> Any:
        return await client.generate(asked)

    with t.client() as run:
        results = run(ask)
    assert all(r.stop_reason in ("stop", "length") and r.output_ids for r in results)
    for request, result in list(zip(asked, results, strict=True))[::32]:
        assert result.versions == [int(t.version)] * len(result.output_ids)
        t.assert_logprobs(request.input_ids, result.output_ids, result.logprobs, 1.0)


def new_weights_have_their_version_and_their_logprobs(t: Target) -> None:
    version, prompt = int(t.version), t.prompt(90)
    try:
        answer = t.update(t.other, version + 1)
        assert answer.status_code == 200 and answer.json()["success"]
        assert t.version == str(version + 1)
        [found] = t.generate([prompt], max_new_tokens=12)
        assert found["meta_info"]["weight_version"] == str(version + 1)
        t.assert_close(logprobs_of(found), reference(t.other, prompt, found["output_ids"], 1.0))
    finally:
        assert t.update(t.folder, version).json()["success"]
    [found] = t.generate([prompt], max_new_tokens=12)
    t.assert_logprobs(prompt, found["output_ids"], logprobs_of(found), 1.0)


def weights_that_are_not_there_change_nothing(t: Target) -> None:
    before = t.version
    assert t.update(t.folder / "nothing", int(before) + 5).status_code >= 400
    assert t.version == before
    [answer] = t.generate([t.prompt(91)], max_new_tokens=8, temperature=0.0)
    t.assert_logprobs(t.prompt(91), answer["output_ids"], logprobs_of(answer), 0.0)


CASES = (
    answers_without_the_token_are_refused,
    health_and_information,
    an_answer_holds_tokens_logprobs_version_and_reason,
    logprobs_are_those_of_the_model_at_the_temperature,
    a_high_temperature_makes_all_tokens_equally_likely,
    tokens_of_a_prompt_are_scored_and_the_temperature_is_not_applied,
    the_client_has_prompts_scored,
    a_mixed_batch_keeps_its_parameters_apart,
    greedy_is_greedy,
    samples_of_a_group_differ,
    what_is_deterministic_repeats_itself_where_the_server_promises_it,
    the_end_token_ends_and_is_kept,
    a_stop_token_ends_and_is_kept,
    a_stop_string_ends_and_is_kept,
    a_sample_may_fill_the_models_length,
    a_prompt_that_is_too_long_is_refused_with_the_reason,
    an_unknown_token_is_refused,
    sixty_four_requests_at_once,
    new_weights_have_their_version_and_their_logprobs,
    weights_that_are_not_there_change_nothing,
)
