"""The flow `rlhf` as a worker runs it; its services are forked, and it has time to find out why it ends."""

import httpx
import warm_processes
from waiting import LIMIT

from flows import execute
from flows.rlhf import rlhf

__all__ = ["rlhf"]

warm_processes.install()
execute.ASK_TIMEOUT = httpx.Timeout(LIMIT)  # type: ignore[misc]
