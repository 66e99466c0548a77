"""The trainer as a process, or as one of several (see `ranks`)."""

from __future__ import annotations

import logging
import os
import signal
import sys

from areal_tasks.engines.service import ServiceSpec, read_spec, serve, store_may_be_away
from areal_tasks.engines.trainer.app import follow, make_app
from areal_tasks.engines.trainer.group import Group, GroupBroken
from areal_tasks.engines.trainer.ranks import join
from areal_tasks.engines.trainer.settings import read_settings

__all__ = ["main", "make_app"]  # the inline launcher takes `make_app` from here
log = logging.getLogger(__name__)


def main() -> None:
    """Serve, or follow rank 0, until terminated."""
    spec = read_spec()
    group = join(read_settings(spec.recipe).trainer)
    if group.rank == 0:
        with store_may_be_away():
            serve(make_app(spec, group), spec)
    else:
        _follow(spec, group)


def _follow(spec: ServiceSpec, group: Group) -> None:
    """Run as another rank until rank 0 ends, which ends this process; earlier signals to its group are ignored."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    try:
        follow(spec, group)
    except GroupBroken as error:
        log.error("rank %d ends: %s", group.rank, error)
        sys.stderr.flush()
        os._exit(1)  # without cleanup: the other ranks may be stuck in a collective
