"""The `arealflow` command: what the Prefect CLI lacks. A UserError is printed as one message, with exit code 1."""

from __future__ import annotations

import sys
from collections import UserDict
from importlib import import_module
from typing import Any, Final

import typer
from rich.console import Console
from typer.core import TyperGroup

from schemas.errors import UserError

#: Every command and its function, as `module:function`. Only the called command's module is imported.
COMMANDS: Final = {
    "init": "init:init",
    "up": "machine:up",
    "down": "machine:down",
    "deploy": "deploy:deploy",
    "alerts": "alerts:alerts",
    "s3-keys": "s3_keys:s3_keys",
    "run": "local:run",
    "set": "change:change",
    "fork": "fork:fork",
    "replay": "replay:replay",
    "diff": "diff:diff",
    "plan": "inspect:plan",
    "runs": "inspect:runs",
    "sql": "inspect:sql",
    "compact": "compact:compact",
    "report": "report:report",
    "audit": "audit:audit",
    "log": "log:log",
    "logs": "logs:logs",
    "top": "top:top",
    "gc": "gc:gc",
    "weights": "weights:weights",
    "doctor": "doctor:doctor",
}


class Commands(UserDict[str, Any]):
    """The commands by name, each imported on access."""

    def __getitem__(self, name: str) -> Any:
        module, _, function = COMMANDS[name].partition(":")
        alone = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
        alone.command(name)(getattr(import_module(f"flows.cli.{module}"), function))
        return typer.main.get_command(alone)


class Group(TyperGroup):
    """A Typer group whose commands are imported on access."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = Commands(COMMANDS)


app = typer.Typer(
    name="arealflow",
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback()
def arealflow() -> None:
    """Reinforcement learning of language models whose every stage is a table."""


def main() -> None:
    """Entry point."""
    try:
        app()
    except UserError as error:
        Console(stderr=True, highlight=False).print(f"[red]error:[/red] {_plain(error)}", soft_wrap=True)
        sys.exit(1)


def _plain(error: UserError) -> str:
    return str(error).replace("[", r"\[")
