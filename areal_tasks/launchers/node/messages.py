"""What a flow and a node agent send each other."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from areal_tasks.engines.service import ServiceSpec
from areal_tasks.launchers.usage import Usage

JOB: Final = "AREAL_NODE_JOB"
#: Packages whose versions change what a service computes, or whether its messages are understood.
PACKAGES: Final = ("torch", "transformers", "tokenizers", "numpy", "pyarrow", "pydantic", "sglang", "deepspeed")


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NodeJob(Message):
    """What an agent gets at its start, through the cluster system. Contains no secret."""

    module: str
    spec: ServiceSpec
    threads: int
    authority: str = Field(description="the flow's certificate: only who shows one that it has signed is answered")
    network: str = Field(description="see `launcher.network`")
    lease_seconds: float


class Start(Message):
    """/start: start the service, unless it has been started."""

    token: str = Field(repr=False)
    certificate: str = Field(description="for the agent's key, by the flow's authority")


class Look(Message):
    """/look, which renews the lease: answered at the service's end, else after `seconds`."""

    seconds: float
    log_from: int = Field(description="the position in the service's log from which it is wanted")


class State(Message):
    """Answer to /look: the next part of the log, and after the last part the exit code of a service that has ended."""

    exit_code: int | None
    log: str
    log_from: int
    usage: Usage | None = Field(description="what the service takes of this machine, while it runs")


class Stop(Message):
    """/stop: end the service, and then the agent."""

    grace_seconds: float


@cache
def software() -> dict[str, str]:
    """What must be the same on all machines of a run: the code's digest, and versions of Python and packages."""
    return {"arealflow": _code_digest(), "python": python_version(), **{name: _version(name) for name in PACKAGES}}


def difference(mine: dict[str, str], theirs: dict[str, str]) -> str:
    """How a machine's software differs from this one's, in words; empty if it does not."""
    names = [name for name in mine if mine[name] != theirs.get(name)]
    return ", ".join(f"{name} {theirs.get(name) or 'none'} instead of {mine[name] or 'none'}" for name in names)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _code_digest() -> str:
    """A digest of this program's files, for a checkout may be changed without a change of version."""
    root = Path(__file__).resolve().parents[3]
    files = sorted(path for room in ("areal_tasks", "schemas") for path in (root / room).rglob("*.py"))
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]
