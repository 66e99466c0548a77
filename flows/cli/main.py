"""The `arealflow` command: what the Prefect CLI lacks. A UserError is printed as one message, with exit code 1."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, Final

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from areal_tasks.processes import keep_loopback_direct
from flows.cli.output import fit_streams, visible
from schemas.errors import UserError

#: Every command and its function, as `module:function`. Only the called command's module is imported.
COMMANDS: Final = {
    "init": "projects:init",
    "up": "machine:up",
    "down": "machine:down",
    "deploy": "projects:deploy",
    "alerts": "automations:alerts",
    "s3-keys": "s3_keys:s3_keys",
    "run": "start:run",
    "set": "change:change",
    "fork": "start:fork",
    "replay": "start:replay",
    "diff": "compare:diff",
    "plan": "inspect:plan",
    "runs": "inspect:runs",
    "sql": "inspect:sql",
    "compact": "retention:compact",
    "report": "compare:report",
    "audit": "history:audit",
    "log": "history:log",
    "logs": "services:logs",
    "top": "services:top",
    "gc": "retention:gc",
    "weights": "retention:weights",
    "doctor": "doctor:doctor",
    "verify-cases": "verify_cases:verify_cases",
}


def load_command(name: str) -> Any:
    """The command of that name, with its module."""
    module, _, function = COMMANDS[name].partition(":")
    alone = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    alone.command(name)(getattr(import_module(f"flows.cli.{module}"), function))
    return typer.main.get_command(alone)


class Group(TyperGroup):
    """A Typer group whose commands are imported on access."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings | {"commands": dict.fromkeys(COMMANDS)})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return load_command(cmd_name) if cmd_name in COMMANDS else None


app = typer.Typer(
    name="arealflow", cls=Group, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False
)


@app.callback()
def arealflow() -> None:
    """Reinforcement learning of language models whose every stage is a table."""


def main() -> None:
    """Entry point."""
    fit_streams()
    keep_loopback_direct()
    try:
        app()
    except UserError as error:
        Console(stderr=True, highlight=False).print("[red]error:[/red]", Text(visible(str(error))), soft_wrap=True)
        sys.exit(1)
