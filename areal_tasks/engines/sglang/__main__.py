"""`python -m areal_tasks.engines.sglang`: starts one SGLang server, says where it listens, and ends with it.

This process stays small: it holds no model and imports no torch. SGLang writes to the same log.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

import httpx

from areal_tasks.engines.lifeline import watch_lifeline
from areal_tasks.engines.ports import loopback_port
from areal_tasks.engines.service import TOKEN, ServiceSpec, read_spec, register, store_may_be_away
from areal_tasks.engines.sglang.child import GUARD
from areal_tasks.engines.sglang.command import arguments, environment, server_index
from areal_tasks.engines.sglang.family import adopt_orphans, end_descendants
from areal_tasks.store.backend import Unavailable, open_store
from areal_tasks.store.files import materialise, read_weights
from schemas.errors import UserError
from schemas.recipe.sections import Inference

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
PROGRESS_SECONDS = 15.0
HEALTH_SECONDS = 30.0  # SGLang answers 503 itself after 20 s without a token


def main() -> None:
    adopt_orphans()
    watch_lifeline(end_descendants)
    signal.signal(signal.SIGTERM, _terminate)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    with store_may_be_away():
        try:
            code = run(read_spec(), os.environ[TOKEN])
        except Unavailable:
            raise
        except UserError as error:
            sys.exit(f"error: {error}")
        finally:
            end_descendants()
    sys.exit(code)


def run(spec: ServiceSpec, token: str) -> int:
    """Serve until SGLang ends; an exit code that says that it failed, since it is never meant to end by itself."""
    port = choose_port(Inference.model_validate(spec.recipe["inference"]).first_port, spec.name)
    url = f"http://127.0.0.1:{port}"
    command = arguments(spec, weights_folder(spec), port)
    log.info("starting SGLang: %s", " ".join(command))
    child = subprocess.Popen(
        [sys.executable, "-m", "areal_tasks.engines.sglang.child", *command],
        env=environment(os.environ, Path(tempfile.mkdtemp(prefix="meeting-"))) | {GUARD: str(os.getpid())},
        stdin=subprocess.DEVNULL,
    )
    if wait_until_ready(child, url, token):
        register(spec, url)
    code = child.wait()
    log.error("SGLang ended with %d", code)
    return code if code > 0 else 128 - code


def weights_folder(spec: ServiceSpec) -> Path:
    """A local folder with the weights of the specification: the store's own if it lies on this machine (no copy)."""
    if spec.weights is None:
        raise UserError("the inference server was given no weights; publish version 0 first")
    store = open_store(spec.store_url)
    manifest = read_weights(store, spec.weights)
    return materialise(store, manifest.files, Path(tempfile.mkdtemp(prefix="weights-")), verify=True)


def choose_port(first: int, name: str) -> int:
    """A free port of the loopback interface, or the one that `inference.first_port` gives this server."""
    port = first + server_index(name) if first else 0
    try:
        return loopback_port(port)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"inference.first_port: {name} cannot listen on port {port} ({error}); choose others"
        ) from error


def wait_until_ready(child: subprocess.Popen[bytes], url: str, token: str) -> bool:
    """Wait until the server generates; False if it ends instead. How long is too long, the supervisor decides."""
    started = said = time.monotonic()
    with httpx.Client(headers={"Authorization": f"Bearer {token}"}, timeout=HEALTH_SECONDS) as client:
        while child.poll() is None:
            if _healthy(client, url):
                log.info("SGLang is ready after %.1f s", time.monotonic() - started)
                return True
            if time.monotonic() - said > PROGRESS_SECONDS:
                said = time.monotonic()
                log.info("SGLang has been starting for %.0f s", said - started)
            time.sleep(POLL_SECONDS)
    return False


def _healthy(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/health_generate").status_code == 200
    except httpx.HTTPError:
        return False


def _terminate(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
