"""The embedded inference server as a process."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable

import torch
from starlette.applications import Starlette

from areal_tasks.engines.embedded.app import Server
from areal_tasks.engines.embedded.engine import Engine
from areal_tasks.engines.embedded.runner import Runner, find_detokenizer
from areal_tasks.engines.ends import end_tokens
from areal_tasks.engines.fetching import weights_folder
from areal_tasks.engines.service import ServiceSpec, exit_with_reason, read_spec, serve
from areal_tasks.store.backend import open_store
from areal_tasks.store.objects.files import read_weights
from schemas.errors import UserError
from schemas.recipe.sections import Inference, Model


def make_app(spec: ServiceSpec, on_failure: Callable[[], None] | None = None) -> Starlette:
    """Load the model that `spec` names, start its engine, and return its application. Raises UserError."""
    if spec.weights is None:
        raise UserError("the inference server was given no weights; publish version 0 first")
    settings = Inference.model_validate(spec.recipe.get("inference", {}))
    model = Model.model_validate(spec.recipe["model"])
    store = open_store(spec.store_url)
    read_weights(store, spec.weights)  # the manifest's digest is verified
    torch.set_num_threads(settings.threads or os.cpu_count() or 1)
    with weights_folder(store, store.uri(spec.weights.path)) as folder:
        runner = Runner(folder, settings.slots, model.max_length, getattr(torch, model.dtype))
        detokenizer = find_detokenizer(folder)
    tokenizer = detokenizer.tokenizer if detokenizer else None
    engine = Engine(
        runner,
        settings.slots,
        version=str(spec.weights.version),
        detokenizer=detokenizer,
        eos=end_tokens(runner.model.config, getattr(runner.model, "generation_config", None), tokenizer),
        deterministic=settings.deterministic,
        on_failure=on_failure,
    )
    engine.start()
    return Server(engine, store).app()


def _end() -> None:
    """End the process: its supervisor starts another."""
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Serve until terminated; exits with the reason if the model cannot be served."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    spec = read_spec()
    with exit_with_reason():
        serve(make_app(spec, _end), spec)
