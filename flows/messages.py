"""In logs a person's mistake is its message, without a traceback: what is wrong is not in the code."""

from __future__ import annotations

import logging

from schemas.errors import UserError


def without_traceback(record: logging.LogRecord) -> bool:
    """A logging filter that lets every record pass, those about a `UserError` without their traceback."""
    if record.exc_info and isinstance(record.exc_info[1], UserError):
        record.exc_info = None
    return True


def hide_tracebacks() -> None:
    """Have Prefect's own log of failed flows and tasks be so too."""
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(without_traceback)
