"""SGLang's native API as JSON: `/generate` requests and their answers."""

from __future__ import annotations

from itertools import repeat
from typing import Any, Final, Literal

import orjson
from pydantic import Field, ValidationError

from areal_tasks.engines.embedded.engine import Engine
from areal_tasks.engines.embedded.sequence import SamplingParams, Sequence, TokenId, make_sequence
from areal_tasks.engines.ends import Detokenizer
from schemas.errors import UserError
from schemas.record import Record

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"  # decoded from bytes that are no character


class Generate(Record):
    """POST /generate. A list of prompts with one `sampling_params` for all or one for each, answered by a list.

    With `stream` it is one prompt, not in a list, answered by events (see `app.stream`).
    """

    input_ids: list[TokenId] | list[list[TokenId]]
    sampling_params: SamplingParams | list[SamplingParams] = Field(default_factory=SamplingParams)
    return_logprob: Literal[True] = True
    logprob_start_len: list[int] | None = Field(None, description="of each prompt; -1: its tokens are not scored")
    stream: bool = False


class Pause(Record):
    """POST /pause_generation."""

    mode: Literal["abort", "in_place"] = "abort"


class UpdateWeights(Record):
    """POST /update_weights_from_disk. `model_path`: a local folder, or the URL of a weights manifest of the store."""

    model_path: str = Field(min_length=1)
    weight_version: str | int | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


def parse(model: type[Any], body: bytes) -> Any:
    """The body as `model`. Raises UserError with every problem."""
    try:
        return model.model_validate(orjson.loads(body or b"{}"))
    except orjson.JSONDecodeError as error:
        raise UserError(f"the body is not JSON: {error}") from error
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors(include_url=False)]
        raise UserError("; ".join(problems[:5])) from error


def open_request(body: Generate, engine: Engine) -> list[Sequence]:
    """The sequences a request asks for. Raises UserError naming the prompt that cannot be served, and why."""
    if not body.input_ids:
        raise UserError("input_ids is empty")
    if body.stream == isinstance(body.input_ids[0], list):
        raise UserError("input_ids is a list of prompts, and with stream one prompt")
    prompts: list[list[int]] = [body.input_ids] if body.stream else body.input_ids  # type: ignore[list-item, assignment]
    params = body.sampling_params
    each = params if isinstance(params, list) else [params] * len(prompts)
    if len(each) != len(prompts):
        raise UserError(f"sampling_params has {len(each)} elements for {len(prompts)} prompts")
    scored = _scored(body.logprob_start_len, prompts, each)
    for i, prompt in enumerate(prompts):
        _check(i, prompt, engine)
    longest = engine.runner.max_length
    return [make_sequence(p, s, engine.eos, longest, first) for p, s, first in zip(prompts, each, scored, strict=True)]


def _scored(starts: list[int] | None, prompts: list[list[int]], params: list[SamplingParams]) -> list[int | None]:
    """For each prompt the position of its first token that is scored, which is the one after `logprob_start_len`.

    SGLang's scores ignore the temperature, and an end token among them ends nothing.
    """
    if starts is None:
        return [None] * len(prompts)
    if len(starts) != len(prompts):
        raise UserError(f"logprob_start_len has {len(starts)} elements for {len(prompts)} prompts")
    for i, (start, prompt, sampling) in enumerate(zip(starts, prompts, params, strict=True)):
        if start >= len(prompt) - 1:
            raise UserError(f"logprob_start_len of prompt {i} is {start}: no token after it is left to score")
        if start >= 0 and not (sampling.temperature == 1 and sampling.ignore_eos and not sampling.stop):
            raise UserError(f"prompt {i}: logprob_start_len needs temperature 1 and ignore_eos, without stop strings")
    return [None if start < 0 else start + 1 for start in starts]


def _check(i: int, prompt: list[int], engine: Engine) -> None:
    longest, vocabulary = engine.runner.max_length, engine.runner.vocab_size
    if not prompt:
        raise UserError(f"prompt {i} is empty")
    if len(prompt) >= longest:
        raise UserError(
            f"prompt {i} has {len(prompt)} tokens; the context holds {longest}, one of them to be generated. "
            "Shorten the prompt or raise model.max_length"
        )
    if max(prompt) >= vocabulary:
        raise UserError(f"prompt {i} has token id {max(prompt)}; the vocabulary ends at {vocabulary - 1}")


def answer(sequences: list[Sequence], detokenizer: Detokenizer, version: str) -> bytes:
    """The response body once all sequences have finished."""
    texts = _texts(sequences, detokenizer)
    return orjson.dumps([_item(one, text, version) for one, text in zip(sequences, texts, strict=True)])


def partial_answer(now: Sequence, detokenizer: Detokenizer, version: str) -> bytes:
    """The answer so far to a request for one sample; its text ends before a character that is still incomplete."""
    [text] = _texts([now], detokenizer)
    return orjson.dumps(_item(now, text if now.finish is not None else text.rstrip(REPLACEMENT), version))


def _item(sequence: Sequence, text: str, version: str) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "finish_reason": sequence.finish,
        "prompt_tokens": len(sequence.prompt) + len(sequence.given),
        "completion_tokens": len(sequence.output),
        "weight_version": sequence.versions[-1][0] if sequence.versions else version,
        "output_token_logprobs": list(zip(sequence.logprobs, sequence.output, repeat(None), strict=False)),
    }
    if sequence.given:
        first = [(None, sequence.prompt[-1], None)]
        meta["input_token_logprobs"] = first + list(zip(sequence.scores, sequence.given, repeat(None), strict=False))
    if len(sequence.versions) > 1:  # weights changed during generation: [version, tokens], in order
        meta["weight_versions"] = sequence.versions
    if any(stale for stale, _ in sequence.stale_kv):  # sampled with keys and values of older weights: [flag, tokens]
        meta["stale_kv"] = sequence.stale_kv
    return {"text": text, "output_ids": sequence.output, "meta_info": meta}


def _texts(sequences: list[Sequence], detokenizer: Detokenizer) -> list[str]:
    """Each text up to the end of the stop string that ended it, if one did."""
    texts = detokenizer.texts([one.output for one in sequences])
    for i, one in enumerate(sequences):
        if one.finish is not None and isinstance(matched := one.finish.get("matched"), str):
            before, found, _ = texts[i].partition(matched)
            texts[i] = before + found
    return texts
