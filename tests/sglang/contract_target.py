"""A running server for the contract: how to ask it, and the plain forward pass that its logprobs are compared with."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from time import sleep
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from waiting import LIMIT, wait_until

from areal_tasks.engines.access import Access
from areal_tasks.engines.client import GenerateResult, InferenceClient
from areal_tasks.engines.ends import Detokenizer, Ends
from schemas.recipe.derived import Interruption
from schemas.recipe.sections import Inference

Json = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """A running server, the folder of its weights, another folder of the same shape, and how exact it computes."""

    url: str
    token: str
    folder: Path
    other: Path
    max_length: int
    mean_gap: float  # |Δ logprob| to the reference, in nats
    largest_gap: float
    process: int  # the server's, or that of the process which guards it

    @cached_property
    def vocabulary(self) -> int:
        return int(json.loads((self.folder / "config.json").read_text())["vocab_size"])

    def prompt(self, seed: int, length: int = 12) -> list[int]:
        """Token ids without special ones at the start of the vocabulary."""
        source = random.Random(seed)
        return [source.randrange(3, self.vocabulary) for _ in range(length)]

    def post(self, path: str, body: Json | None = None, token: str | None = None) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.token if token is None else token}"}
        return httpx.post(f"{self.url}{path}", json=body or {}, headers=headers, timeout=LIMIT)

    def get(self, path: str) -> Json:
        headers = {"Authorization": f"Bearer {self.token}"}
        answer: Json = httpx.get(f"{self.url}{path}", headers=headers, timeout=LIMIT).raise_for_status().json()
        return answer

    def generate(self, prompts: list[list[int]], *params: Json, **common: Any) -> list[Json]:
        """One batched request with logprobs, as the client sends it."""
        each = [{"no_stop_trim": True, **common, **p} for p in params or ({},) * len(prompts)]
        body = {"input_ids": prompts, "sampling_params": each, "return_logprob": True}
        answers: list[Json] = self.post("/generate", body).raise_for_status().json()
        return answers

    @contextmanager
    def streaming(self, count: int, prompt: list[int], **params: Any) -> Iterator[list[Iterator[Json]]]:
        """The events of so many streams of one prompt each, under way together until the end of the block."""
        body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True, "stream": True}
        headers = {"Authorization": f"Bearer {self.token}"}
        with httpx.Client(base_url=self.url, headers=headers, timeout=LIMIT) as http, ExitStack() as open_streams:
            streams = [http.stream("POST", "/generate", json=body) for _ in range(count)]
            yield [_events(open_streams.enter_context(stream)) for stream in streams]

    @property
    def version(self) -> str:
        return str(self.get("/model_info")["weight_version"])

    @cached_property
    def tells_its_load(self) -> bool:
        """Whether it says at once how much it generates; SGLang says it later."""
        return "running" in self.get("/server_info")

    def load(self) -> tuple[int, int]:
        """How many samples are being generated, and how many wait. Only of a server that tells its load."""
        info = self.get("/server_info")
        return info["running"], info["queued"]

    def await_load(self, reached: Callable[[int, int], bool], seconds: float) -> None:
        """Return when the load is such; of a server that does not tell it, after so many seconds."""
        if self.tells_its_load:
            wait_until(lambda: reached(*self.load()), "the load")
        else:
            sleep(seconds)  # SGLang does not tell

    def update(self, folder: Path, version: int, **more: Any) -> httpx.Response:
        body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True, **more}
        return self.post("/update_weights_from_disk", body)

    @contextmanager
    def client(
        self, interruption: Interruption | None = None
    ) -> Iterator[Callable[[Callable[[InferenceClient], Any]], Any]]:
        """Runs a coroutine function of the product's own client."""

        async def call(work: Callable[[InferenceClient], Any]) -> Any:
            settings = Inference(max_concurrent_requests=256)
            ends = Ends(frozenset(), Detokenizer(tokenizer_of(self.folder)))
            client = InferenceClient([self.url], Access(self.token), settings, None, lambda: ends, interruption)
            try:
                return await asyncio.wait_for(work(client), 3 * LIMIT)
            finally:
                await client.close()

        yield lambda work: asyncio.run(call(work))

    def assert_logprobs(self, prompt: list[int], output: list[int], found: list[float], temperature: float) -> None:
        scale = max(1.0, 1 / temperature) if temperature else 1.0  # logits are divided by it, and so is their rounding
        self.assert_close(found, reference(self.folder, prompt, output, temperature), scale)

    def assert_cut(self, prompt: list[int], result: GenerateResult, version: int) -> None:
        """The first tokens are of `version` and the folder's weights, the others of the next and the other folder's."""
        cut = result.versions.count(version)
        assert result.versions == [version] * cut + [version + 1] * (len(result.output_ids) - cut)
        before, after = (reference(folder, prompt, result.output_ids, 1.0) for folder in (self.folder, self.other))
        self.assert_close(result.logprobs, [*before[:cut], *after[cut:]])

    def assert_close(self, found: list[float], expected: list[float], scale: float = 1.0) -> None:
        gaps = [abs(a - b) / scale for a, b in zip(found, expected, strict=True)]
        assert sum(gaps) / len(gaps) <= self.mean_gap and max(gaps) <= self.largest_gap, (found, expected)


def _events(response: httpx.Response) -> Iterator[Json]:
    """What each event of a stream holds; the last one says that it is the last."""
    lines = (line for line in response.raise_for_status().iter_lines() if line)
    for line in lines:
        assert line.startswith("data: "), line
        if line == "data: [DONE]":
            assert next(lines, None) is None
            return
        yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended before it said so")


@cache
def model_of(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@cache
def tokenizer_of(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def scores_of(folder: Path, prompt: list[int], output: list[int], temperature: float) -> torch.Tensor:
    """Log-softmax(logits / temperature) before each token of `output`, by one forward pass in float32."""
    ids = torch.tensor([[*prompt, *output]])
    with torch.inference_mode():
        logits = model_of(folder)(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / (temperature or 1.0), dim=-1)


def reference(folder: Path, prompt: list[int], output: list[int], temperature: float) -> list[float]:
    """The logprobs of `output` itself."""
    scores = scores_of(folder, prompt, output, temperature)
    return list(scores.gather(1, torch.tensor(output)[:, None])[:, 0].tolist())
