"""Where a completion ends: the same token whatever an engine has looked at, and however often it was interrupted."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from aiohttp import web
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from areal_tasks.data.scratch import character_tokenizer
from areal_tasks.engines.client import GenerateRequest, GenerateResult, InferenceClient
from areal_tasks.engines.ends import Detokenizer, Ends, end_tokens
from areal_tasks.engines.session import Engines
from areal_tasks.store.backend import open_store
from areal_tasks.store.commit import new_attempt
from areal_tasks.store.objects.files import commit_weights, upload
from areal_tasks.store.opening import open_run
from areal_tasks.store.paths import weights_attempt
from areal_tasks.store.provenance import make_provenance, now
from schemas.recipe.load import load_recipe
from tests.inference.fake_server import Fake, run, serving

VOCABULARY = ["<pad>", "<eos>", "a", "b", "ab", "ba", "c", "<also>"]
EOS, ALSO, ASKED = 1, 7, 6
PROMPT = [2, 2]


def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({text: i for i, text in enumerate(VOCABULARY)}, unk_token="<pad>"))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")


DETOKENIZER = Detokenizer(tokenizer())
ENDS = Ends(frozenset({EOS, ALSO}), DETOKENIZER)


class Scripted(Fake):
    """Generates a given text, and ends it by SGLang's rules: an abort is looked for first, then the number of tokens,
    then stop strings in what this answer holds, then end tokens. Each of its first answers is aborted after a while."""

    def __init__(self, script: list[int], aborts: list[int]) -> None:
        super().__init__()
        self.script, self.aborts = script, list(aborts)
        self.on_generate = self.scripted

    async def scripted(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        abort_after = self.aborts.pop(0) if self.aborts else 0
        if not body.get("stream"):
            prompts = zip(body["input_ids"], body["sampling_params"], strict=True)
            return web.json_response([list(self.answers(*one, abort_after))[-1] for one in prompts])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for answer in self.answers(body["input_ids"], body["sampling_params"], abort_after):
            await response.write(b"data: " + orjson.dumps(answer) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def answers(self, prompt: list[int], params: dict[str, Any], abort_after: int) -> Any:
        """An answer for each token."""
        done: list[int] = []
        reason: dict[str, Any] | None = None
        while reason is None:
            done.append(self.script[len(prompt) - len(PROMPT) + len(done)])
            text = DETOKENIZER.texts([done], skip_special_tokens=False)[0]
            ends = set() if params.get("ignore_eos") else {EOS, ALSO, *params.get("stop_token_ids", [])}
            if len(done) == abort_after:
                reason = {"type": "abort"}
            elif len(done) >= params["max_new_tokens"]:
                reason = {"type": "length"}
            elif any(stop in text for stop in params.get("stop", [])) or done[-1] in ends:
                reason = {"type": "stop"}
            meta = {"finish_reason": reason, "weight_version": "0", "completion_tokens": len(done)}
            meta["output_token_logprobs"] = [[-0.1 * i, token, None] for i, token in enumerate(done)]
            yield {"text": DETOKENIZER.texts([done])[0], "output_ids": list(done), "meta_info": meta}


def ideal(script: list[int], request: GenerateRequest) -> tuple[list[int], str]:
    """The rule: the last token is the first that is an end token or completes a stop string, else the last allowed."""
    ends = set() if request.ignore_eos else {EOS, ALSO, *request.stop_token_ids}
    for n in range(1, request.max_new_tokens + 1):
        text = DETOKENIZER.texts([script[:n]], skip_special_tokens=False)[0]
        ended = script[n - 1] in ends or any(stop in text for stop in request.stop)
        if ended:
            return script[:n], "stop"
    return script[: request.max_new_tokens], "length"


async def streamed(client: InferenceClient, request: GenerateRequest) -> GenerateResult:
    """The pieces as one result."""
    found = GenerateResult()
    async with aclosing(client.stream(request)) as pieces:
        async for piece in pieces:
            found.output_ids += piece.output_ids
            found.logprobs += piece.logprobs
            found.versions += piece.versions
            found.stop_reason = piece.stop_reason or "abort"
    found.text = DETOKENIZER.texts([found.output_ids])[0]
    return found


A, B, AB, C = (VOCABULARY.index(text) for text in ("a", "b", "ab", "c"))


@settings(max_examples=150, deadline=None)
@given(
    script=st.lists(st.integers(1, len(VOCABULARY) - 1), min_size=12, max_size=12),
    most=st.integers(1, 12),
    stops=st.sampled_from([(), ("bab",), ("aaa",), ("ab", "cc"), ("abcab",)]),
    stop_ids=st.sampled_from([(), (ASKED,)]),
    aborts=st.lists(st.integers(0, 5), max_size=4),
    stream=st.booleans(),
    ignore_eos=st.booleans(),
)
@example([A, A, EOS, *[A] * 9], 3, (), (), [], False, False)  # the end token is the last that there may be
@example([A, A, ALSO, *[A] * 9], 3, (), (), [], True, False)  # another end token
@example([A, A, EOS, *[A] * 9], 3, (), (ASKED,), [], False, True)  # it ends nothing there
@example([A, A, C, *[A] * 9], 3, (), (ASKED,), [], False, False)  # one that the request names
@example([A, B, AB, *[A] * 9], 3, ("bab",), (), [], False, False)  # a stop string
@example([B, AB, *[C] * 10], 9, ("bab",), (), [2], False, False)  # aborted with the token that completes it
@example([C, B, A, AB, *[C] * 8], 9, ("bab",), (), [3], False, False)  # interrupted within it
@example([C, B, A, B, *[C] * 8], 9, ("bab",), (), [3], True, False)
def test_a_completion_ends_where_the_rule_says(
    script: list[int],
    most: int,
    stops: tuple[str, ...],
    stop_ids: tuple[int, ...],
    aborts: list[int],
    stream: bool,
    ignore_eos: bool,
) -> None:
    request = GenerateRequest(PROMPT, most, stop=stops, stop_token_ids=stop_ids, ignore_eos=ignore_eos)
    expected, reason = ideal(script, request)

    async def test() -> None:
        async with serving(Scripted(script, aborts)) as client:
            client._ends = lambda: ENDS
            [result] = [await streamed(client, request)] if stream else await client.generate([request])
            assert (result.output_ids, result.stop_reason) == (expected, reason)
            assert len(result.logprobs) == len(result.versions) == len(expected)
            assert result.text == DETOKENIZER.texts([expected])[0]

    run(test)


def test_end_tokens_are_those_of_both_configurations_and_the_tokenizer() -> None:
    config, generation = LlamaConfig(eos_token_id=5), GenerationConfig(eos_token_id=[5, 9])
    assert end_tokens(config, generation, tokenizer()) == {5, 9, EOS}
    assert end_tokens(config, None, None) == {5}
    assert end_tokens(LlamaConfig(eos_token_id=None), None, SimpleNamespace(get_added_vocab=dict)) == frozenset()
    odd = tokenizer()
    odd.add_tokens(["<|eom_id|>"])
    assert end_tokens(config, None, odd) == {5, EOS, len(VOCABULARY)}


def test_a_client_that_knows_no_tokenizer_leaves_it_to_the_engine() -> None:
    assert Ends().found([A, B, AB], 2, True, ("bab",), ()) is None
    assert Ends().found([A, C], 1, True, (), (C,)) == 2


def test_the_engines_read_them_from_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    character_tokenizer("ab", 12).save_pretrained(folder)
    LlamaConfig(eos_token_id=5).save_pretrained(folder)
    GenerationConfig(eos_token_id=[5, 4]).save_pretrained(folder)
    recipe = load_recipe("gsm8k")
    made = open_run(open_store(f"file://{tmp_path}/store"), "r", recipe)
    attempt = new_attempt()
    files = upload(made.store, weights_attempt("r", 0, attempt), folder)
    with Engines(made, recipe, tmp_path / "logs") as engines:
        engines.initial = commit_weights(made.store, "r", 0, attempt, "weights", files, make_provenance(1, now()))
        assert engines.ends.tokens == {2, 4, 5}
        assert engines.ends.found([4, 5], 1, False, ("ab",), ()) == 2


@pytest.mark.parametrize("text", ["", "x" * 40])
def test_windows_hold_every_stop_string(text: str) -> None:
    """Found however far apart its tokens were generated, as long as they are its own."""
    alphabet = character_tokenizer("abx", 200)
    ends = Ends(detokenizer=Detokenizer(alphabet))
    ids = alphabet(text + "abba" + text)["input_ids"]
    for begun in range(len(text) + 1, len(text) + 4):
        assert ends.found(ids, begun, False, ("abba",), ()) == len(text) + 4
