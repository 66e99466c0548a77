"""What a worker does before it ends because nobody is left to tell it anything.

Imports the standard library alone, so that a worker can watch its lifeline before it imports anything else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)

#: What there is to do; each returns when it is done, or cannot be done.
DUTIES: list[Callable[[], object]] = []


def farewell() -> None:
    """Do what there is to do."""
    for duty in list(DUTIES):
        try:
            duty()
        except Exception:  # the process ends whatever comes of it
            log.exception("finished groups are lost")
