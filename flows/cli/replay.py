"""`arealflow replay`: builds stages of a recorded run again with changed settings, and compares the two runs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Annotated, Any, get_args

import typer

from areal_tasks.store.backend import open_store
from areal_tasks.store.fork import Origin, ReplayEnd, ReplayStart
from areal_tasks.store.history.diff_curves import Section
from areal_tasks.store.runs import Run, load_run
from flows.cli.diff import show_sections
from flows.cli.fork import changes_text, child_name, parentage
from flows.cli.in_process import call_flow
from flows.cli.inspect import AsJson, StoreUrl
from flows.cli.local import check_start
from schemas.errors import UserError
from schemas.recipe.load import run_and_changes, suggestion


def replay(
    run: Annotated[str, typer.Argument(help="Name of the run to replay.")],
    start: Annotated[
        str, typer.Option("--from", metavar="verify|advantage|train", help="First stage that is built again.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.field=value …; run=NAME names the replay.")
    ] = None,
    until: Annotated[
        str, typer.Option("--until", metavar="verify|advantage", help="Last stage that is built; default: all.")
    ] = "",
    at: Annotated[int, typer.Option("--at", min=0, help="First iteration that is replayed.")] = 0,
    on_policy: Annotated[bool, typer.Option("--on-policy", help="Generate again where weights differ.")] = False,
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """Build only the stages that a change affects again, keeping the recorded rollouts; compare with the original."""
    check_stage("--from", start, get_args(ReplayStart))
    check_stage("--until", until, get_args(ReplayEnd))
    name, changes = run_and_changes(overrides)
    there = load_run(open_store(store), run)
    origin = Origin(run, at, "replay", not on_policy, start, until)
    settings = [
        *changes,
        *([until] if until else []),
        *([f"at {at}"] if at else []),
        *(["on policy"] if on_policy else []),
    ]
    name = name or child_name(f"{run}-{start}", settings)
    check_replay(there, origin, name, changes)

    typer.echo(f"run {name} is {origin}{changes_text(changes)}", err=as_json)
    result = call_flow(
        "replay",
        run,
        start,
        overrides=shlex.join(changes),
        run=name,
        until=until,
        at=at,
        on_policy=on_policy,
        store=there.store.url,
    )
    report(result | parentage(origin), as_json)


def check_stage(option: str, word: str, known: Sequence[str]) -> None:
    """UserError unless the option's value is one of these stages."""
    if word not in known:
        stages = ", ".join(filter(None, known))
        raise UserError(f"{option}: unknown stage '{word}'{suggestion(word, known)}; it should be one of {stages}")


def check_replay(there: Run, origin: Origin, name: str, changes: Sequence[str]) -> None:
    """UserError unless the flow can start this replay."""
    from areal_tasks.stages.replay import replay_segments  # here: it imports torch, as the flow does

    check_start(replay_segments(there, origin, name, changes)[-1][1], name, origin)


def report(result: dict[str, Any], as_json: bool) -> None:
    """Print the comparison, as tables or JSON."""
    if as_json:
        typer.echo(json.dumps(result, default=str, indent=1))
        return
    show_sections([Section(**section) for section in result["comparison"]])
    typer.echo(f"run {result['run']}: {result['iterations']} iterations in {result['store']}")
