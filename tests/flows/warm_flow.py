"""The flow `rlhf` as a worker runs it; it has time to find out why it ends.

A file tells that it has heard of its suspension.
"""

import os
from pathlib import Path
from typing import Any

from prefect._flow_run_suspension import FlowRunSuspensionRequest
from waiting import LIMIT

from flows import ending
from flows.rlhf import rlhf

__all__ = ["rlhf"]

ending.ASK_TIMEOUT = LIMIT  # type: ignore[misc]
mark = FlowRunSuspensionRequest.mark_requested


def mark_and_tell(self: FlowRunSuspensionRequest, state: Any) -> None:
    mark(self, state)
    Path(f"{os.environ['GATE']}.suspended").touch()


FlowRunSuspensionRequest.mark_requested = mark_and_tell  # type: ignore[method-assign]
