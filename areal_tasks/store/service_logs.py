"""Logs of services in the store: readable from any machine, also after the machine that wrote them is gone.

A service appends to a file on the flow's machine. The flow copies new bytes into numbered parts, each created once. A
position in the file is a position in the concatenated parts, also after the disk space of the file's head was freed.
"""

from __future__ import annotations

import ctypes
import re
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from typing import Final

from areal_tasks.store import paths
from areal_tasks.store.backend import Exists, Store
from areal_tasks.store.commit import find_record
from areal_tasks.store.objects.inventory import entries
from schemas.manifest import OwnerRecord

PART_BYTES: Final = 4 << 20
#: The copied part of a local log that takes more disk space is freed, except for its last KEPT_BYTES.
ROTATE_BYTES: Final = 64 << 20
KEPT_BYTES: Final = 1 << 20
_PUNCH_HOLE: Final = 0x3  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_FILE: Final = re.compile(r"(.+)-(\d+)-(\d+)\.log")
_PART: Final = re.compile(r".*/logs/owner=(\d+)/(.+)-(\d+)/(\d+)\.log")


@dataclass(frozen=True, order=True)
class LogName:
    """One start of a service, within one start of the flow (`owner`). The newest one is the largest."""

    service: str
    owner: int
    restart: int

    @property
    def file(self) -> str:
        """The name of its log on the flow's machine."""
        return f"{self.service}-{self.owner}-{self.restart}.log"

    def part(self, run: str, n: int) -> str:
        return paths.log_part(run, self.owner, self.service, self.restart, n)


def local_logs(folder: Path) -> dict[LogName, Path]:
    """The services' logs in a folder of this machine."""
    matched = [(_FILE.fullmatch(file.name), file) for file in sorted(folder.glob("*.log"))]
    return {LogName(m[1], int(m[2]), int(m[3])): file for m, file in matched if m}


class LogCopy:
    """Copies new bytes of one log into the store. `stored`: number of bytes copied."""

    def __init__(self, store: Store, run: str, name: LogName, file: Path) -> None:
        self.stored = 0
        self._store, self._run, self._name, self._file = store, run, name, file
        self._parts = 0

    def __call__(self) -> None:
        """Copy all new bytes, then free disk space of the local file (`rotate`). Raises StoreError or OSError."""
        while part := self._new():
            path, size = self._name.part(self._run, self._parts), len(part)
            try:
                self._store.create(path, part)
            except Exists:  # a shorter one was stored, and the answer was lost
                size = self._store.size(path)
            self._parts += 1
            self.stored += size
        rotate(self._file, self.stored)

    def _new(self) -> bytes:
        with self._file.open("rb") as file:
            file.seek(self.stored)
            return file.read(PART_BYTES)


def rotate(file: Path, copied: int) -> None:
    """Free the disk space of the head of a log of which `copied` bytes are elsewhere, if it takes too much.

    The head becomes a hole: no position changes, and nothing that the service writes meanwhile is lost. On a file
    system without holes the log stays whole.
    """
    stop = (copied - KEPT_BYTES) // KEPT_BYTES * KEPT_BYTES
    if stop > 0 and sys.platform == "linux" and file.stat().st_blocks * 512 > ROTATE_BYTES:
        with file.open("r+b") as opened:
            c_library = ctypes.CDLL(None)
            c_library.fallocate(opened.fileno(), _PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(stop))


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Piece:
    """Consecutive bytes of a log, from position `start` to before `stop`."""

    start: int
    stop: int
    read: Callable[[], bytes]


@dataclass(frozen=True)
class ServiceLog:
    """The log of one start of a service. `file`: on this machine, if this is the flow's."""

    name: LogName
    pieces: tuple[Piece, ...]
    file: Path | None = None

    @property
    def size(self) -> int:
        return self.pieces[-1].stop if self.pieces else 0

    def read_from(self, position: int) -> Iterator[bytes]:
        """The bytes from `position` on, in pieces."""
        for piece in self.pieces:
            if piece.stop > position:
                yield piece.read()[max(0, position - piece.start) :]

    def tail(self, lines: int) -> int:
        """The position at which the last `lines` lines begin."""
        missing = lines  # line ends, counted from the end of the log
        for piece in reversed(self.pieces):
            data = piece.read()
            missing += piece.stop == self.size and data.endswith(b"\n")
            if data.count(b"\n") >= missing:
                return piece.start + len(data.rsplit(b"\n", missing)[0]) + 1
            missing -= data.count(b"\n")
        return 0


def service_logs(store: Store, run: str, folder: Path) -> list[ServiceLog]:
    """The logs of a run's services, by service, the oldest first.

    The store has all but their last minute; the rest is read from `folder` where this machine is the flow's.
    """
    sizes = {entry.path: entry.bytes for entry in entries(store, paths.logs(run))}
    parts, here = stored_parts(sizes), _here(store, run, folder)
    names = sorted(parts.keys() | here.keys())
    return [_joined(store, name, parts.get(name, {}), sizes, here.get(name)) for name in names]


def stored_parts(parts: Iterable[str]) -> dict[LogName, dict[int, str]]:
    """Paths of parts by log and number; other paths are left out."""
    found: dict[LogName, dict[int, str]] = {}
    for path in parts:
        if match := _PART.fullmatch(path):
            name = LogName(match[2], int(match[1]), int(match[3]))
            found.setdefault(name, {})[int(match[4])] = path
    return found


def _here(store: Store, run: str, folder: Path) -> dict[LogName, Path]:
    """The logs of the run's services that lie on this machine."""
    found = local_logs(folder / run)
    owners = {n: find_record(store, paths.owner(run, n), OwnerRecord) for n in {name.owner for name in found}}
    mine = {n for n, owner in owners.items() if owner is not None and owner.host == socket.gethostname()}
    return {name: file for name, file in found.items() if name.owner in mine}


def _joined(
    store: Store, name: LogName, parts: Mapping[int, str], sizes: Mapping[str, int], file: Path | None
) -> ServiceLog:
    """A log whose parts in the store have these sizes, and what `file` has beyond them."""
    pieces, at = list[Piece](), 0
    for path in (parts[n] for n in takewhile(parts.__contains__, count())):
        pieces.append(Piece(at, at + sizes[path], partial(store.read, path)))
        at = pieces[-1].stop
    size = file.stat().st_size if file else 0
    if file is None or size < at:  # a shorter file is of another run of this name
        return ServiceLog(name, tuple(pieces))
    for start in range(at, size, PART_BYTES):
        stop = min(size, start + PART_BYTES)
        pieces.append(Piece(start, stop, partial(_read, file, start, stop)))
    return ServiceLog(name, tuple(pieces), file)


def _read(file: Path, start: int, stop: int) -> bytes:
    with file.open("rb") as opened:
        opened.seek(start)
        return opened.read(stop - start)
