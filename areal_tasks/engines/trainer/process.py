"""The trainer as a process, or as one of several (see `ranks`)."""

from __future__ import annotations

import logging
import os
import signal
import sys

import torch

from areal_tasks.engines.service import ServiceSpec, exit_with_reason, read_spec, register, serve
from areal_tasks.engines.trainer.app import make_app
from areal_tasks.engines.trainer.commands import COMMANDS, Command
from areal_tasks.engines.trainer.group import Group, GroupBroken
from areal_tasks.engines.trainer.ranks import cpu_threads, join
from areal_tasks.engines.trainer.service import Trainer
from areal_tasks.engines.trainer.settings import read_settings

__all__ = ["main", "make_app"]  # the inline launcher takes `make_app` from here
log = logging.getLogger(__name__)


def main() -> None:
    """Serve, or follow rank 0, until terminated."""
    spec = read_spec()
    with exit_with_reason():
        group = join(spec, read_settings(spec.recipe).trainer)
        if group.rank == 0:
            serve(make_app(spec, group), spec)
            return
        if group.leads_its_machine:
            register(spec, f"rank://{group.rank}")  # ready; only rank 0 is asked
    _follow(spec, group)


def _follow(spec: ServiceSpec, group: Group) -> None:
    """Run the commands that rank 0 passes on, until it ends, which ends this process; earlier signals are ignored."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    try:
        trainer = Trainer(spec, group)
        torch.set_num_threads(cpu_threads(trainer.settings.trainer))
        while True:
            group.follow(lambda text: trainer.run(_parsed(text)), trainer.state)
            if group.leads_its_machine:
                trainer.clear()  # all ranks have ended the command by now
    except GroupBroken as error:
        log.error("rank %d ends: %s", group.rank, error)
        sys.stderr.flush()
        os._exit(1)  # without cleanup: the other ranks may be stuck in a collective


def _parsed(text: str) -> Command:
    """A command as `app` passes it on."""
    name, _, body = text.partition(" ")
    return COMMANDS[name].model_validate_json(body)
