"""What every GPU measurement shares: a line of JSON per result, the machine it ran on, and a time limit.

Results are appended as they come, so that nothing is lost when a later measurement fails or is cut off.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import psutil

PACKAGES: Final = ("torch", "transformers", "sglang", "deepspeed", "prefect")
Record = dict[str, Any]


def default_file() -> Path:
    """`GPU_RESULTS`, else results.jsonl in `OUT` or the current folder."""
    return Path(os.environ.get("GPU_RESULTS", Path(os.environ.get("OUT", ".")) / "results.jsonl"))


def add_results_option(parser: argparse.ArgumentParser) -> None:
    """`--results FILE`."""
    parser.add_argument("--results", type=Path, default=default_file(), help="results are appended to this file")


def record(file: Path, what: str, **values: Any) -> Record:
    """Append one result and print it; returns it as written."""
    row = {"what": what, **values, **machine()}
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as sink:
        sink.write(json.dumps(row) + "\n")
    print(json.dumps({"what": what, **values}), flush=True)
    return row


def load(*files: Path) -> list[Record]:
    """All results of these files, in order; a last line that was cut off is left out."""
    return [row for file in files for row in _lines(file)]


def _lines(file: Path) -> Iterator[Record]:
    for line in file.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            print(f"{file}: left out a line that is no JSON: {line[:80]!r}", file=sys.stderr)


def machine() -> dict[str, Any]:
    """Device, date and versions."""
    return {
        "device": device_name(),
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "versions": {"python": platform.python_version()} | {p: v for p in PACKAGES if (v := _version(p))},
    }


def device_name() -> str:
    """As the driver calls the first GPU; the processor's architecture where there is none."""
    return of_first_gpu("name") or f"CPU {platform.machine()}, {os.cpu_count()} cores"


def of_first_gpu(what: str) -> str:
    """What the driver says of the first GPU that is visible; empty where there is none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    query = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    query += ["-i", visible] if visible else []
    try:
        return subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0].strip()
    except FileNotFoundError:
        return ""


def wait_for_free_gpu(most_mib: int = 2048, seconds: float = 60.0) -> None:
    """Until what ended has given its memory back: a server that starts meanwhile would measure wrongly what is free."""
    deadline = time.monotonic() + seconds
    while (used := of_first_gpu("memory.used")).isdigit() and int(used) > most_mib:
        if time.monotonic() > deadline:
            print(f"{used} MiB of the GPU are in use by something else; the measurement goes on", file=sys.stderr)
            return
        time.sleep(0.5)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def run_limited(command: Sequence[str], seconds: float) -> int:
    """Run a measurement in a session of its own, and end all of it after `seconds`. Its exit code; 124: cut off."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        print(f"cut off after {seconds:.0f} s: {' '.join(command)}", file=sys.stderr, flush=True)
        return 124
    finally:
        end_group(process)


def end_group(process: subprocess.Popen[Any], grace: float = 10.0) -> None:
    """End a process that leads a session, with everything in it."""
    for number, patience in ((15, grace), (9, grace)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
    process.wait(grace)


def end_tree(process: subprocess.Popen[Any], grace: float = 8.0) -> None:
    """End a process of our own group, with everything below it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        process.terminate()
        _, alive = psutil.wait_procs(family, grace)
        for left in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
    process.wait(grace)


def measure(module: str, arguments: Sequence[str], seconds: float) -> int:
    """`run_limited` for a module of this folder, once the GPU is free; says so when it fails."""
    wait_for_free_gpu()
    code = run_limited([sys.executable, "-m", f"benchmarks.gpu.{module}", *arguments], seconds)
    if code:
        print(f"benchmarks.gpu.{module} {' '.join(arguments)} ended with {code}", file=sys.stderr, flush=True)
    return code
