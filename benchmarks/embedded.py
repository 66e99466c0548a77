"""Tokens per second of the embedded server, everything included, against `transformers.generate`.

    python -m benchmarks.embedded [--rounds 20] [--threads 2]

The quickstart's model and batch: 32 groups of 8 samples, prompts of 9 tokens, completions of 4 and of 16. The server is
a process of its own behind HTTP, driven by the client; `generate` is called once per group with the same settings, in
this process, and returns no logprobs (the server does). Rounds alternate, so that both see the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from areal_tasks.data.scratch import make_scratch
from areal_tasks.engines.client import GenerateRequest, InferenceClient
from areal_tasks.engines.service import ServiceSpec
from areal_tasks.launchers.supervisor import Supervisor
from areal_tasks.store.backend import open_store
from areal_tasks.store.commit import new_attempt
from areal_tasks.store.objects.files import commit_weights, upload
from areal_tasks.store.paths import weights_attempt
from areal_tasks.store.provenance import make_provenance, now
from schemas.recipe.launcher import Launcher
from schemas.recipe.sections import Inference, ScratchModel

GROUPS, SIZE, PROMPT, MAX_LENGTH = 32, 8, 9, 32
Prompts = list[list[int]]


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    new_tokens: int
    slots: int
    groups_per_request: int


CASES = (Case(4, 256, 32), Case(4, 256, 8), Case(4, 64, 32), Case(16, 256, 32), Case(16, 256, 8), Case(16, 64, 32))


def make_model(folder: Path, max_length: int = MAX_LENGTH) -> Path:
    """The quickstart's model, without an end token: every completion has its full length."""
    make_scratch(ScratchModel(), 1, max_length, folder)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(settings | {"eos_token_id": None, "eos_token": None}))
    return folder


@contextmanager
def server(folder: Path, work: Path, case: Case, threads: int) -> Iterator[InferenceClient]:
    """A server process, and a client to it."""
    store = open_store(f"file://{work}/store-{case.slots}-{case.groups_per_request}-{case.new_tokens}")
    attempt = new_attempt()
    files = upload(store, weights_attempt("b", 0, attempt), folder)
    weights = commit_weights(store, "b", 0, attempt, "weights", files, make_provenance(1, now()))
    settings = Inference(slots=case.slots, groups_per_request=case.groups_per_request, threads=threads)
    recipe = {"model": {"max_length": MAX_LENGTH}, "inference": settings.model_dump()}
    spec = ServiceSpec(name="bench", restart=0, store_url=store.url, run="b", owner=1, recipe=recipe, weights=weights)
    with Supervisor(store, Launcher(), work) as supervisor:
        supervisor.start("areal_tasks.engines.embedded", spec, threads)
        yield InferenceClient(supervisor.wait(["bench"]), supervisor.access, settings)


def prompts(round_number: int) -> Prompts:
    generator = torch.Generator().manual_seed(round_number)
    return torch.randint(4, 16, (GROUPS, PROMPT), generator=generator).tolist()


async def serve_round(client: InferenceClient, case: Case, number: int) -> float:
    """Seconds for all groups through the server."""
    requests = [
        GenerateRequest(p, case.new_tokens, seed=number * 10_000 + g * SIZE + i, group=number * GROUPS + g)
        for g, p in enumerate(prompts(number))
        for i in range(SIZE)
    ]
    started = time.perf_counter()
    results = await client.generate(requests)
    seconds = time.perf_counter() - started
    assert all(len(r.output_ids) == len(r.logprobs) == case.new_tokens for r in results)
    return seconds


def generate_round(model: Any, case: Case, number: int) -> float:
    """Seconds for all groups through transformers, one call per group."""
    inputs = [torch.tensor([p]) for p in prompts(number)]
    started = time.perf_counter()
    with torch.inference_mode():
        for ids in inputs:
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, temperature=1.0,
                num_return_sequences=SIZE, max_new_tokens=case.new_tokens, pad_token_id=0,
            )  # fmt: skip
            assert output.shape == (SIZE, PROMPT + case.new_tokens)
    return time.perf_counter() - started


async def measure(client: InferenceClient, model: Any, case: Case, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of each round of the server and of transformers."""
    for number in range(5):
        await serve_round(client, case, number)
    generate_round(model, case, 0)
    served, generated = [], []
    for number in range(5, 5 + rounds):
        served.append(await serve_round(client, case, number))
        if number % 4 == 1:
            generated.append(generate_round(model, case, number))
    await client.close()
    return served, generated


def _restart_without_spinning() -> None:
    """OpenMP reads its wait policy when torch is imported; with the server's, neither side starves the other."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.embedded", *sys.argv[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    _restart_without_spinning()
    torch.set_num_threads(arguments.threads)
    load = os.getloadavg()[0]
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores (load {load:.1f} at the start), "
          f"{arguments.threads} threads, Python {platform.python_version()}, torch {torch.__version__}")  # fmt: skip
    print(f"{GROUPS} groups × {SIZE} samples, prompts of {PROMPT} tokens; generated tokens/s, median (best)\n")
    print("| new tokens | slots | groups a request | server over HTTP | transformers.generate | ratio |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as work:
        folder = make_model(Path(work) / "model")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for case in CASES:
            with server(folder, Path(work), case, arguments.threads) as client:
                print(line(case, *asyncio.run(measure(client, model, case, arguments.rounds))), flush=True)


def line(case: Case, served: list[float], generated: list[float]) -> str:
    tokens = GROUPS * SIZE * case.new_tokens
    ours, theirs = ([tokens / f(seconds) for f in (statistics.median, min)] for seconds in (served, generated))
    rates = " | ".join(f"{median:,.0f} ({best:,.0f})" for median, best in (ours, theirs))
    return f"| {case.new_tokens} | {case.slots} | {case.groups_per_request} | {rates} | {ours[0] / theirs[0]:.1f} × |"


if __name__ == "__main__":
    main()
