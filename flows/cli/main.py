"""The `arealflow` command: what the Prefect CLI lacks. A person's mistake is one message and exit code 1."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from flows.cli import (
    alerts,
    audit,
    compact,
    deploy,
    diff,
    doctor,
    fork,
    gc,
    init,
    inspect,
    local,
    log,
    machine,
    replay,
    report,
    s3_keys,
    weights,
)
from schemas.errors import UserError

app = typer.Typer(
    name="arealflow",
    help="Reinforcement learning of language models whose every stage is a table.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("init")(init.init)
app.command("up")(machine.up)
app.command("down")(machine.down)
app.command("deploy")(deploy.deploy)
app.command("alerts")(alerts.alerts)
app.command("s3-keys")(s3_keys.s3_keys)
app.command("run")(local.run)
app.command("fork")(fork.fork)
app.command("replay")(replay.replay)
app.command("diff")(diff.diff)
app.command("plan")(inspect.plan)
app.command("runs")(inspect.runs)
app.command("sql")(inspect.sql)
app.command("compact")(compact.compact)
app.command("report")(report.report)
app.command("audit")(audit.audit)
app.command("log")(log.log)
app.command("gc")(gc.gc)
app.command("weights")(weights.weights)
app.command("doctor")(doctor.doctor)


def main() -> None:
    """Entry point."""
    try:
        app()
    except UserError as error:
        Console(stderr=True, highlight=False).print(f"[red]error:[/red] {_plain(error)}", soft_wrap=True)
        sys.exit(1)


def _plain(error: UserError) -> str:
    return str(error).replace("[", r"\[")
