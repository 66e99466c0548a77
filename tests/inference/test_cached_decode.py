"""The embedded server serves a family right, or refuses it by name when it starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_tasks.engines.embedded import process
from areal_tasks.engines.embedded.engine import Engine
from areal_tasks.store.backend import Store, open_store
from schemas.errors import UserError
from tests.inference.helpers import full_logprobs, submit
from tests.inference.test_server import make_spec, publish
from tests.trainer.causal_families import tiny_config
from tests.trainer.families import save_random, save_tokenizer


class Held:
    """Stands for the HTTP server of an engine."""

    engine: Engine

    def __init__(self, engine: Engine, _store: Store) -> None:
        Held.engine = engine

    def app(self) -> None:
        """Nothing is served."""


def started(family: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The engine of a server that has loaded a model of the family."""
    save_random(tiny_config(family), folder / "model", buffers=False)
    save_tokenizer(folder / "model", 64)
    store = open_store(f"file://{folder}/store")
    monkeypatch.setattr(process, "Server", Held)
    process.make_app(make_spec(store, publish(store, folder / "model", 0), 8))
    return Held.engine


@pytest.mark.parametrize("family", ["llama", "nemotron", "mixtral", "cohere"])
def test_what_it_serves_is_right(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started(family, tmp_path, monkeypatch)
    try:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager").eval()
        texts = [[4 + (7 * i + n) % 59 for i in range(n)] for n in (3, 17, 70)]
        for one in [submit(engine, text, max_new_tokens=12) for text in texts]:
            [done] = one.wait()
            expected = full_logprobs(model, done.prompt, done.output, 1.0)
            assert torch.allclose(torch.tensor(done.logprobs), expected, atol=1e-4)
    finally:
        engine.close()


@pytest.mark.parametrize("family", ["rwkv", "lfm2", "gemma2", "bloom"])
def test_others_are_refused_by_name(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=rf"embedded server (cannot serve|supports .*; this) {family} "):
        started(family, tmp_path, monkeypatch)
