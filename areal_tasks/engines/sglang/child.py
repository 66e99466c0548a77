"""`python -m areal_tasks.engines.sglang.child FLAGS`: `sglang.launch_server` behind the service's bearer token, with
answers that report the weights of their tokens (`token_weights`) and weights from the store (`from_store`).

A user may start it, too, with the token in `AREAL_LLM_SERVER_TOKEN`. SGLang accepts a key only on its command line,
which every user of the machine can read, and logs it. So its application gets our own check instead, and SGLang never
receives the token. (Its processes import this module again when they start, so it imports nothing slow at the top.)
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from functools import partial, wraps
from time import monotonic
from typing import Any

from areal_tasks.secret import TOKEN, keys, secret

GUARD = "AREAL_GUARD_PID"
log = logging.getLogger(__name__)


def main() -> None:
    """Start SGLang's server with the flags of the command line, behind the token that it was handed."""
    from areal_tasks.processes import die_with_parent

    if supervised := GUARD in os.environ:
        die_with_parent(int(os.environ.pop(GUARD)))
    from areal_tasks.engines.service import BearerAuth
    from areal_tasks.engines.sglang.from_store import FromStore
    from areal_tasks.store.backend import open_store

    token = take_token()
    from sglang.srt.plugins import load_plugins  # type: ignore[import-not-found,unused-ignore]
    from sglang.srt.server_args import prepare_server_args  # type: ignore[import-not-found,unused-ignore]

    load_plugins()
    settings = prepare_server_args(sys.argv[1:])
    from sglang.srt.entrypoints import http_server  # type: ignore[import-not-found,unused-ignore]
    from sglang.srt.managers.tokenizer_manager import (  # type: ignore[import-not-found,unused-ignore]
        TokenizerManager,
    )

    from areal_tasks.engines.sglang.parts import meet
    from areal_tasks.engines.sglang.scheduler import run_scheduler
    from areal_tasks.engines.sglang.token_weights import report_weights

    refuse_unknown_tokens(TokenizerManager)
    report_weights(TokenizerManager)
    abort_quickly(TokenizerManager)
    parts = meet(settings) if supervised and settings.nnodes > 1 else None
    if settings.node_rank:  # SGLang would serve this process's application once its schedulers have ended
        http_server._setup_and_run_http_server = lambda *_, **__: sys.exit("the model's processes have ended")
    http_server.app.add_middleware(FromStore, store=open_store(), parts=parts)
    http_server.app.add_middleware(BearerAuth, token=token)
    handed = keys()  # its schedulers are started with this process's environment, which has none
    schedulers = partial(run_scheduler, handed=handed) if handed else run_scheduler
    http_server.launch_server(settings, run_scheduler_process_func=schedulers)


def take_token() -> str:
    """The bearer token that clients must show, in no environment of processes that this one starts."""
    from areal_tasks.engines.external import SERVER_TOKEN

    if token := secret(TOKEN) or os.environ.pop(SERVER_TOKEN, ""):
        return token
    sys.exit(f"error: {SERVER_TOKEN} is not set: choose a token, and set it for the flow, too")


def refuse_unknown_tokens(manager: Any) -> None:
    """Make the class TokenizerManager refuse prompts with tokens outside the model's vocabulary (HTTP 400).

    SGLang 0.5.17 accepts them (its `_validate_input_ids_in_vocab` is never called): reading their embeddings fails on
    the GPU, which ends the server, and then every other server that the request is retried on.
    """
    validate = manager._validate_one_request

    @wraps(validate)
    def checked(self: Any, request: Any, input_ids: list[int] | None) -> None:
        """`_validate_one_request` after the check of all token ids."""
        known = self.model_config.vocab_size
        if input_ids and not 0 <= min(input_ids) <= max(input_ids) < known:
            unknown = next(token for token in input_ids if not 0 <= token < known)
            raise ValueError(f"the prompt has token id {unknown}; the vocabulary ends at {known - 1}")
        validate(self, request, input_ids)

    manager._validate_one_request = checked


def abort_quickly(manager: Any, seconds: float = 0.02) -> None:
    """Make the class TokenizerManager poll more often for the end of aborted requests: SGLang does it once a second."""
    pause = manager.pause_generation

    @wraps(pause)
    async def paused(self: Any, order: Any) -> None:
        """`pause_generation` after all requests have been aborted."""
        if order.mode == "abort":
            begun = monotonic()
            self.is_pause = True  # new requests wait
            self.abort_request(abort_all=True)
            while await self.model_update_lock.is_locked():
                await asyncio.sleep(seconds)
                self.abort_request(abort_all=True)
            log.info("All requests aborted, seconds: %.3f", monotonic() - begun)
        await pause(self, order)  # finds nothing in flight then

    manager.pause_generation = paused


if __name__ == "__main__":
    main()
