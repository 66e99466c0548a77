"""A small service that does what its name says: `ready`, `dies`, `storeless`, `silent`, `parent`, `secrets`.

At its first start `killed-9` is ended by signal 9, and `always-9` at every start.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from areal_tasks.engines.lifeline import watch_lifeline
from areal_tasks.engines.service import ServiceSpec, as_service, read_spec, serve
from areal_tasks.secret import keys
from areal_tasks.store.backend import Unavailable


def open_descriptors() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]


def make_app(spec: ServiceSpec) -> Starlette:
    async def about(request: Request) -> JSONResponse:
        secrets = sum("memfd:secrets" in os.readlink(f"/proc/self/fd/{fd}") for fd in open_descriptors())
        own = {"pid": os.getpid(), "keys": keys(), "descriptors": secrets}
        return JSONResponse(spec.model_dump(mode="json") | own)

    return Starlette(routes=[Route("/about", about)])


def main() -> None:
    watch_lifeline()
    spec = read_spec()
    for line in range(40):
        print(f"line {line} of {spec.name}")
    if spec.name == "dies":
        sys.exit("error: there is no such model")
    if spec.name == "storeless":
        with as_service():
            raise Unavailable("the store does not answer")
    if spec.name == "silent":
        time.sleep(3600)  # it never says that it is ready
    if (spec.name.startswith("killed-") and not spec.restart) or spec.name.startswith("always-"):
        os.kill(os.getpid(), int(spec.name.partition("-")[2]))
    if spec.name in ("parent", "secrets"):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    serve(make_app(spec), spec)


if __name__ == "__main__":
    main()
