"""Asks a Prefect server, which may take its time on a busy machine."""

from __future__ import annotations

from functools import partial

from waiting import LIMIT

from flows.cli import automations

ask = partial(automations.ask, timeout=LIMIT)
