"""What a run waits for, as other processes see it: the flow writes a record into the run whenever that changes.

Only long waits are recorded, so that a run whose stages take seconds writes none.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final

from areal_tasks.processes import alive
from areal_tasks.store import paths
from areal_tasks.store.backend import Exists
from areal_tasks.store.commit import checked_last_number, last_owner, read_record
from areal_tasks.store.history.journal import end_of_start
from areal_tasks.store.provenance import now
from areal_tasks.store.runs import Run
from schemas.manifest import OwnerRecord, Wait, WaitsRecord

#: How late a record may be: the store is slow.
GRACE_SECONDS: Final = 60.0


def waits_record(waits: Sequence[Wait], seconds: float) -> WaitsRecord:
    """A record of what this process waits for now. `seconds`: the next one follows within this time."""
    return WaitsRecord(host=socket.gethostname(), pid=os.getpid(), told=now(), seconds=seconds, waits=tuple(waits))


def write_waits(run: Run, n: int, record: WaitsRecord) -> None:
    """Store the n-th record of this start of the flow. Raises StoreError."""
    path = paths.waits(run.name, run.owner, n)
    with suppress(Exists):  # it was stored before, and the answer was lost
        run.store.create(path, record.encode(path))


def current_waits(run: Run) -> WaitsRecord | None:
    """What the run waits for, as far as is known; None if there is no long wait, or the flow that waited has ended."""
    store, name = run.store, run.name
    owner = last_owner(store, name)
    n = checked_last_number(store, partial(paths.waits, name, owner))
    record = read_record(store, paths.waits(name, owner, n), WaitsRecord) if n else None
    if record is None or not record.waits or not is_current(record, datetime.now(UTC)):
        return None
    return record if end_of_start(store, name, owner) is None else None


def is_current(record: WaitsRecord, time: datetime) -> bool:
    """Whether the process that wrote the record may still wait at `time`, by this machine's clock: it may run, and its
    next record is not overdue. Of another machine's process that is unknown: its clock may differ.
    """
    if record.host != socket.gethostname():
        return True
    due = datetime.fromisoformat(record.told) + timedelta(seconds=record.seconds + GRACE_SECONDS)
    return time <= due and may_run(record)


def may_run(record: WaitsRecord | OwnerRecord) -> bool:
    """Whether the process that wrote the record runs, as far as this machine knows: of another one's, nothing."""
    return record.host != socket.gethostname() or alive(record.pid)
