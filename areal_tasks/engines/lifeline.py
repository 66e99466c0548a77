"""The lifeline of a service: a pipe whose write end only its supervisor has. The service ends at end-of-file.

Imports the standard library alone, so that a service can watch before it spends seconds on importing torch.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

LIFELINE: Final = "AREAL_LIFELINE_FD"
SCRATCH: Final = "AREAL_SERVICE_SCRATCH"  # a folder that the launcher made for this service alone
#: For what is done before the end, since a disk that hangs may keep it: the first is more than a worker's writes take.
DUTY_SECONDS: Final = 90.0
REMOVE_SECONDS: Final = 5.0
#: What a rollout worker does before it ends with its flow; each returns when it has succeeded or cannot succeed.
DUTIES: list[Callable[[], object]] = []

log = logging.getLogger(__name__)


def watch_lifeline(before_death: Callable[[], object] = lambda: None) -> None:
    """Kill this process group when the lifeline pipe reaches end-of-file. Does nothing without a lifeline.

    `before_death` ends processes that the service has started outside its group.
    """
    fd = os.environ.get(LIFELINE)
    if fd is not None:
        threading.Thread(target=_die_at_eof, args=(int(fd), before_death), name="lifeline", daemon=True).start()


def _die_at_eof(fd: int, before_death: Callable[[], object]) -> None:
    with suppress(OSError):  # no pipe: the supervisor had closed it before this process began
        while os.read(fd, 1):
            pass
    for work, seconds in ((before_death, DUTY_SECONDS), (_remove_scratch, REMOVE_SECONDS)):
        last = threading.Thread(target=work, name="last", daemon=True)
        last.start()
        last.join(seconds)
    os.killpg(0, signal.SIGKILL)


def _remove_scratch() -> None:
    if SCRATCH in os.environ:
        shutil.rmtree(os.environ[SCRATCH], ignore_errors=True)


def farewell() -> None:
    """Run `DUTIES`, because the flow has ended."""
    for duty in list(DUTIES):
        try:
            duty()
        except Exception:  # the process ends in any case
            log.exception("finished groups are lost")
