"""`python -m areal_tasks.engines.sglang`: starts one SGLang server, registers its address, and ends with it.

This process stays small: it holds no model and imports no torch. SGLang writes to the same log.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx

from areal_tasks.engines import service
from areal_tasks.engines.access import Access
from areal_tasks.engines.fetching import local_weights, remove_unused
from areal_tasks.engines.lifeline import watch_lifeline
from areal_tasks.engines.models import file_states, link_wanted
from areal_tasks.engines.ports import HOST, hold_port, url_host
from areal_tasks.engines.sglang.child import GUARD
from areal_tasks.engines.sglang.command import arguments, environment
from areal_tasks.engines.tls import AUTHORITY
from areal_tasks.launchers.gpus import memory_used
from areal_tasks.processes import adopt_orphans, end_descendants
from areal_tasks.secret import TOKEN, handed_over, secret, without_secrets
from areal_tasks.store.backend import open_store
from areal_tasks.store.objects.files import read_weights
from schemas.errors import UserError
from schemas.recipe.sections import Inference

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
PROGRESS_SECONDS = 15.0
ATTEMPTS = 3
#: GPU memory that other processes may take while SGLang starts without counting as the cause of its failure.
TAKEN_BYTES = 1 << 30
HEALTH_SECONDS = 30.0  # SGLang answers 503 itself after 20 s without a token


def main() -> None:
    """Run one SGLang server until it ends; exits with its code, or with the reason why it could not start."""
    adopt_orphans()
    watch_lifeline(end_sglang)
    service.exit_at_sigterm()
    with service.as_service():
        try:
            code = run(service.read_spec(), secret(TOKEN))
        finally:
            end_sglang()
    sys.exit(code)


def end_sglang() -> None:
    """End its processes, which leave their weights in memory."""
    end_descendants()
    remove_unused()


def run(spec: service.ServiceSpec, token: str) -> int:
    """Serve until SGLang ends; returns an exit code of failure, since it is never meant to end by itself."""
    settings = Inference.model_validate(spec.recipe["inference"])
    # on machines after the first SGLang only says whether it is healthy
    own = spec.model_copy(update={"address": HOST, "tls": ""}) if spec.node else spec
    first_port = 0 if spec.node else settings.first_port
    with meeting_point(spec, settings.nodes) as meeting, choose_port(first_port, spec.name, own.address) as held:
        port = held.getsockname()[1]  # SGLang listens only once it has loaded its model
        url = service.url_at(own, port)
        access = Access(token, (Path(own.tls) / AUTHORITY).read_text() if own.tls else "")
        with first_weights(spec) as folder:
            command = arguments(own, folder, port, meeting)
            child, ready = start_within_attempts(spec, command, url, access, meeting)
        if ready:
            service.register(spec, url)
        code = child.wait()
    log.error("SGLang ended with %d", code)
    return code if code > 0 else 128 - code


def start_within_attempts(
    spec: service.ServiceSpec, command: Sequence[str], url: str, access: Access, meeting: str
) -> tuple[subprocess.Popen[bytes], bool]:
    """Start SGLang. Returns its process and whether it is ready, once it is or has ended before that.

    SGLang measures free memory twice and counts the difference as its own. If it ended and other processes took memory
    meanwhile, such as another run's trainer that starts, it is restarted. With a `meeting` point the supervisor
    restarts all parts of the server instead.
    """
    for attempt in range(ATTEMPTS):
        log.info("starting SGLang: %s", " ".join(command))
        used, private = memory_used(spec.gpus), Path(tempfile.mkdtemp(prefix="rendezvous-"))
        own = {GUARD: str(os.getpid()), "AREALFLOW_STORE": spec.store_url}  # it ends with this process
        with handed_over(**{TOKEN: access.token}) as (secrets, named):
            child = subprocess.Popen(
                [sys.executable, "-m", "areal_tasks.engines.sglang.child", *command],
                env=environment(without_secrets(os.environ), private, spec.address, meeting) | own | named,
                stdin=subprocess.DEVNULL,
                pass_fds=[secrets],
            )
        if ready := wait_until_ready(child, url, access):
            break
        end_descendants()  # its remaining processes hold memory
        taken = memory_used(spec.gpus) - used
        if meeting or taken < TAKEN_BYTES or attempt + 1 == ATTEMPTS:
            break
        log.warning("SGLang ended during startup while other processes took %.1f GB; restarting it", taken / 1e9)
    return child, ready


@contextmanager
def meeting_point(spec: service.ServiceSpec, nodes: int) -> Iterator[str]:
    """Where the parts of a server over several machines meet, `host:port`; empty if it is on one.

    The first part registers the address and holds the port, inside this context, until its child listens there.
    """
    name = f"{service.server_of(spec.name)}-meeting"
    with ExitStack() as stack:
        if nodes > 1 and spec.node == 0:
            at = stack.enter_context(hold_port(0, spec.address)).getsockname()[:2]
            service.register_meeting(spec, name, *at)
        elif nodes > 1:
            at = service.await_meeting(spec, name)
        yield f"{url_host(at[0])}:{at[1]}" if nodes > 1 else ""


def choose_port(first: int, name: str, address: str) -> socket.socket:
    """Holds a free port at this address, or the one that `inference.first_port` gives this server."""
    port = first + int(name.rpartition("-")[2]) if first else 0  # for `inference-3` the fourth
    try:
        return hold_port(port, address)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"inference.first_port: {name} cannot listen on port {port} ({error}); choose others"
        ) from error


def wait_until_ready(child: subprocess.Popen[bytes], url: str, access: Access) -> bool:
    """Wait until the server generates; False if it ends instead. The supervisor limits the time."""
    started = reported = time.monotonic()
    with httpx.Client(headers=access.headers, verify=access.trust, timeout=HEALTH_SECONDS, trust_env=False) as client:
        while child.poll() is None:
            with suppress(httpx.HTTPError):
                if client.get(f"{url}/health_generate").status_code == 200:
                    log.info("SGLang is ready after %.1f s", time.monotonic() - started)
                    return True
            if time.monotonic() - reported > PROGRESS_SECONDS:
                reported = time.monotonic()
                log.info("SGLang has been starting for %.0f s", reported - started)
            time.sleep(POLL_SECONDS)
    return False


# ── the weights it starts with ──────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def first_weights(spec: service.ServiceSpec) -> Iterator[Path]:
    """A local folder with the weights that `spec` names, which SGLang reads inside this context.

    They are those of a store, or the model's own folder while it is copied into the store. UserError: it names none;
    or, on leaving, the bytes in the folder are not the intended ones.
    """
    if spec.weights is not None:
        store = open_store(spec.store_url)
        with local_weights(store, read_weights(store, spec.weights).files) as folder:
            yield folder
        return
    if spec.folder is None:
        raise UserError("the inference server was given no weights; publish version 0 first")
    yield link_wanted(Path(spec.folder.path), Path(tempfile.mkdtemp(prefix="weights-")))
    now, before = file_states(Path(spec.folder.path)), spec.folder.files
    changed = sorted(name for name in now.keys() | before.keys() if now.get(name) != before.get(name))
    if changed:  # SGLang may have read other bytes than the store has
        raise UserError(
            f"model.path: {changed[0]} in {spec.folder.path} was changed while the run started with it; run again "
            "under another name once the folder is complete"
        )


if __name__ == "__main__":
    main()
