"""Starts what SGLang starts: a worker beside the server; and, worse, one that leaves the session and its parent."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import uvicorn

SLEEP = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
DETACH = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True)"


def run_server(settings: argparse.Namespace) -> None:
    if settings.attention_backend == "no-memory":
        print("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", flush=True)
        sys.exit(1)
    if settings.attention_backend == "no-memory-at-first" and not Path("tried").exists():
        Path("tried").touch()
        print("ValueError: Loaded weights leave no GPU memory for the KV cache under ...", flush=True)
        sys.exit(1)
    subprocess.Popen([sys.executable, "-c", SLEEP])
    subprocess.run([sys.executable, "-c", DETACH], check=True)  # its parent ends at once
    from sglang.srt.entrypoints.http_server import app

    app.state.settings = settings
    Path("server.pid").write_text(str(os.getpid()))
    uvicorn.run(app, host=settings.host, port=settings.port, log_level="warning")
