"""The application, as a global that the launcher can put a check before, and what starts SGLang's processes.

A worker of the server; and, worse than SGLang, one that leaves the session and its parent.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from sglang.srt.managers.tokenizer_manager import TokenizerManager

TAKEN = ExitStack()
SLEEP = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
DETACH = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True)"


async def health(request: Request) -> JSONResponse:
    return JSONResponse({}, status_code=200)


async def model_info(request: Request) -> JSONResponse:
    return JSONResponse({"weight_version": app.state.settings.weight_version})


async def about(request: Request) -> JSONResponse:
    return JSONResponse({"settings": vars(app.state.settings), "environment": dict(os.environ)})


async def generate(request: Request) -> JSONResponse:
    try:
        TokenizerManager().tokenize(await request.json())
    except ValueError as error:
        return JSONResponse({"error": {"message": str(error)}}, status_code=400)
    return JSONResponse({})


async def load(request: Request) -> JSONResponse:
    order = await request.json()
    folder = Path(order["model_path"])
    names = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
    app.state.settings.weight_version = order["weight_version"]
    return JSONResponse({"success": True, "message": "", "folder": order["model_path"], "files": names})


async def die(request: Request) -> JSONResponse:
    os._exit(3)


app = Starlette(
    routes=[Route("/health_generate", health), Route("/model_info", model_info), Route("/about", about),
            Route("/die", die), Route("/generate", generate, methods=["POST"]),
            Route("/update_weights_from_disk", load, methods=["POST"])]
)  # fmt: skip


def take_port(host: str, port: int) -> None:
    """Another program that gets the port if the system may give it away."""
    other = TAKEN.enter_context(socket.socket())
    with suppress(OSError):
        other.bind((host, port))
        other.listen()


def meet(settings: argparse.Namespace) -> Any:
    """Join the ranks of all machines, as SGLang does: by torch's rendezvous, as one rank on each machine."""
    from torch.distributed import rendezvous

    where = os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"]
    assert where == f"tcp://{settings.dist_init_addr}"
    store, rank, world = next(rendezvous(where, settings.node_rank, settings.nnodes))
    store.set(f"here/{rank}", "")
    store.wait([f"here/{one}" for one in range(world)])
    return store


def serve_health(settings: argparse.Namespace) -> None:
    """All that a machine after the first listens for; in this process, which SGLang's models live beside."""
    bare = Starlette(routes=[Route("/health_generate", health)])
    uvicorn.run(bare, host=settings.host, port=settings.port, log_level="warning")


def _setup_and_run_http_server() -> None:
    raise AssertionError("SGLang would serve without a tokenizer")


def launch_server(settings: argparse.Namespace, run_scheduler_process_func: Callable[..., None]) -> None:
    if settings.attention_backend == "no-memory":
        print("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", flush=True)
        sys.exit(1)
    if settings.attention_backend == "no-memory-at-first" and not Path("tried").exists():
        Path("tried").touch()
        print("ValueError: Loaded weights leave no GPU memory for the KV cache under ...", flush=True)
        sys.exit(1)
    subprocess.Popen([sys.executable, "-c", SLEEP])
    subprocess.run([sys.executable, "-c", DETACH], check=True)  # its parent ends at once
    schedulers = getattr(run_scheduler_process_func, "func", run_scheduler_process_func)
    assert schedulers.__module__ == "areal_tasks.engines.sglang.scheduler"
    app.state.settings = settings
    if settings.nnodes > 1:
        app.state.store = meet(settings)
    if settings.node_rank:
        serve_health(settings)
        _setup_and_run_http_server()
    if settings.attention_backend == "port-wanted":
        take_port(settings.host, settings.port)
    Path("server.pid").write_text(str(os.getpid()))
    uvicorn.run(
        app,
        host=settings.host,
        port=settings.port,
        log_level="warning",
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
    )
