"""SGLang's native API as JSON: `/generate` requests and their answers."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Final, Literal
from uuid import uuid4

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from areal_tasks.engines.embedded.sequence import SamplingParams, Sequence, TokenId, make_sequences
from areal_tasks.engines.ends import Detokenizer, trim

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"  # decoded from bytes that are no character


class BadRequest(Exception):
    """The request cannot be served; the message says why (HTTP 400)."""


class Body(BaseModel):
    """A request body. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid")


class Generate(Body):
    """POST /generate. One prompt, or a list of them with one `sampling_params` for all or one for each.

    With `stream` it is one prompt with one sample, answered by events (see `streaming`).
    """

    input_ids: list[TokenId] | list[list[TokenId]]
    sampling_params: SamplingParams | list[SamplingParams] = Field(default_factory=SamplingParams)
    return_logprob: bool | list[bool] = False
    rid: str | list[str] | None = None
    stream: bool = False


class Pause(Body):
    """POST /pause_generation."""

    mode: Literal["abort", "in_place", "retract"] = "abort"


class Abort(Body):
    """POST /abort_request."""

    rid: str = ""
    abort_all: bool = False


class UpdateWeights(Body):
    """POST /update_weights_from_disk. `model_path`: a local folder, or the URL of a weights manifest of the store."""

    model_path: str = Field(min_length=1)
    weight_version: str | int | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


def parse(model: type[Any], body: bytes) -> Any:
    """The body as `model`. Raises BadRequest with every problem."""
    try:
        return model.model_validate(orjson.loads(body or b"{}"))
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors(include_url=False)]
        raise BadRequest("; ".join(problems[:5])) from error


@dataclass(frozen=True)
class Limits:
    """The running model's limits."""

    vocab_size: int
    max_length: int
    eos: frozenset[int]
    has_text: bool


@dataclass(eq=False)
class Answerable:
    """A checked `/generate` request: its sequences, and what else the answer needs."""

    sequences: list[Sequence]
    batched: bool
    logprobs: list[bool]
    started: float = field(default_factory=time.perf_counter)


def open_request(body: Generate, limits: Limits) -> Answerable:
    """The sequences a request asks for. Raises BadRequest naming the prompt that cannot be served, and why."""
    batched = not body.input_ids or isinstance(body.input_ids[0], list)
    prompts: list[list[int]] = body.input_ids if batched else [body.input_ids]  # type: ignore[assignment, list-item]
    if not prompts:
        raise BadRequest("input_ids is empty")
    params = _one_each(body.sampling_params, len(prompts), "sampling_params")
    logprobs = _one_each(body.return_logprob, len(prompts), "return_logprob")
    rids = _rids(body.rid, len(prompts))
    sequences: list[Sequence] = []
    for i, prompt in enumerate(prompts):
        _check(i, prompt, params[i], limits)
        sequences += make_sequences(rids[i], prompt, params[i], limits.eos, limits.max_length)
    if body.stream and (batched or len(sequences) > 1):
        raise BadRequest("a stream holds one sample: send one prompt, not in a list, with n = 1")
    flags = [logprobs[i] for i, p in enumerate(params) for _ in range(p.n)]
    return Answerable(sequences, batched or len(sequences) > 1, flags)


def _one_each(value: Any, n: int, name: str) -> list[Any]:
    if not isinstance(value, list):
        return [value] * n
    if len(value) != n:
        raise BadRequest(f"{name} has {len(value)} elements for {n} prompts")
    return value


def _rids(rid: str | list[str] | None, n: int) -> list[str]:
    if isinstance(rid, list):
        return _one_each(rid, n, "rid")
    stem = rid or uuid4().hex
    return [stem] if n == 1 else [f"{stem}_{i}" for i in range(n)]


def _check(i: int, prompt: list[int], params: SamplingParams, limits: Limits) -> None:
    if not prompt:
        raise BadRequest(f"prompt {i} is empty")
    if len(prompt) >= limits.max_length:
        raise BadRequest(
            f"prompt {i} has {len(prompt)} tokens; the context holds {limits.max_length}, one of them to be generated. "
            "Shorten the prompt or raise model.max_length"
        )
    if max(prompt) >= limits.vocab_size:
        raise BadRequest(f"prompt {i} has token id {max(prompt)}; the vocabulary ends at {limits.vocab_size - 1}")
    if params.stops and not limits.has_text:
        raise BadRequest("stop strings need a tokenizer, and the model's folder has none; use stop_token_ids")


def answer(request: Answerable, detokenizer: Detokenizer | None, version: str) -> bytes:
    """The response body once all sequences have finished."""
    texts = _texts(request.sequences, detokenizer)
    items = [
        _item(sequence, text, logprobs, version, request.started)
        for sequence, text, logprobs in zip(request.sequences, texts, request.logprobs, strict=True)
    ]
    return orjson.dumps(items if request.batched else items[0])


def partial_answer(request: Answerable, now: Sequence, detokenizer: Detokenizer | None, version: str) -> bytes:
    """The answer so far to a request for one sample; `now`: a recent copy of the sequence.

    An unfinished text ends before a character that is still incomplete.
    """
    [text] = _texts([now], detokenizer)
    shown = text if now.finish is not None else text.rstrip(REPLACEMENT)
    return orjson.dumps(_item(now, shown, request.logprobs[0], version, request.started))


def _item(sequence: Sequence, text: str, logprobs: bool, version: str, started: float) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "id": sequence.rid,
        "finish_reason": sequence.finish,
        "prompt_tokens": len(sequence.prompt),
        "completion_tokens": len(sequence.output),
        "cached_tokens": 0,
        "weight_version": sequence.versions[-1][0] if sequence.versions else version,
        "e2e_latency": time.perf_counter() - started,
    }
    if len(sequence.versions) > 1:  # weights changed during generation: [version, tokens], in order
        meta["weight_versions"] = sequence.versions
    if any(stale for stale, _ in sequence.stale_kv):  # sampled with keys and values of older weights: [flag, tokens]
        meta["stale_kv"] = sequence.stale_kv
    if logprobs:
        meta["output_token_logprobs"] = [
            (logprob, token, None) for logprob, token in zip(sequence.logprobs, sequence.output, strict=True)
        ]
    return {"text": text, "output_ids": sequence.output, "meta_info": meta}


def _texts(sequences: list[Sequence], detokenizer: Detokenizer | None) -> list[str]:
    if detokenizer is None:
        return [""] * len(sequences)
    shown = [_shown_tokens(s) for s in sequences]
    skip = [s.params.skip_special_tokens for s in sequences]
    if len(set(skip)) == 1:
        texts = detokenizer.texts(shown, skip[0])
    else:
        texts = [detokenizer.texts([ids], flag)[0] for ids, flag in zip(shown, skip, strict=True)]
    return [_trimmed(s, text) for s, text in zip(sequences, texts, strict=True)]


def _matched(sequence: Sequence) -> object:
    return (sequence.finish or {}).get("matched")


def _shown_tokens(sequence: Sequence) -> list[int]:
    trimmed = isinstance(_matched(sequence), int) and not sequence.params.no_stop_trim
    return sequence.output[:-1] if trimmed else sequence.output


def _trimmed(sequence: Sequence, text: str) -> str:
    """The text up to the stop string that ended it, or to its end with `no_stop_trim`."""
    matched = _matched(sequence)
    return trim(text, matched, sequence.params.no_stop_trim) if isinstance(matched, str) else text
