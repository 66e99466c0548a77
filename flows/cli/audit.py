"""`arealflow audit` and `arealflow log`: is every byte what was written, and who did what to a run."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from areal_tasks.store.audit import Report
from areal_tasks.store.audit import audit as check
from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.signing import Verified, read_signatures, sign, unsigned_lines, verify
from flows.cli.inspect import AsJson, StoreUrl
from schemas.manifest import Signature

RunName = Annotated[str, typer.Argument(help="Name of the run.")]


def audit(
    run: RunName,
    store: StoreUrl = "",
    as_json: AsJson = False,
    sign_with: Annotated[
        Path | None, typer.Option("--sign", help="Sign the root with this private Ed25519 key (PEM or OpenSSH).")
    ] = None,
    verify_with: Annotated[
        Path | None, typer.Option("--verify", help="Check the signatures by this key, public or private.")
    ] = None,
) -> None:
    """Check every byte of a run, and print its root hash. Exits 1 if anything is damaged."""
    place = open_store(store)
    report = _with_progress(place, run)
    signatures = verify(place, run, verify_with) if verify_with and report.root else []
    made = sign(place, run, report.root, report.iterations, sign_with) if sign_with and report.sound else None
    if made is not None:
        signatures = [*(found for found in signatures if found.signature != made[0]), Verified(made[0])]
    if as_json:
        typer.echo(json.dumps(_as_json(report, signatures), indent=1))
    else:
        _print(report, signatures, _coverage(place, report, made))
    if sign_with and not report.sound:
        typer.echo("not signed: mend the run first", err=True)
    if not report.sound or any(found.problem for found in signatures):
        raise typer.Exit(1)


def _with_progress(store: Store, run: str) -> Report:
    """The audit, with a bar on the terminal if there is one."""
    columns = (TextColumn("audit"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("audit", total=None)
        return check(store, run, lambda done, total: bar.update(task, completed=done, total=total))


def _as_json(report: Report, signatures: list[Verified]) -> dict[str, Any]:
    return {
        **asdict(report),
        "sound": report.sound,
        "signatures": [
            {
                **s.signature.model_dump(),
                "holds": not s.problem,
                "problem": s.problem,
                "unsigned_iterations": report.iterations - 1 - s.signature.iteration,
            }
            for s in signatures
        ],
    }


def _print(report: Report, signatures: list[Verified], coverage: str) -> None:
    for defect in report.defects:
        typer.echo(str(defect))
    for removed in report.removed:
        typer.echo(
            f"{removed.path}: files removed by {removed.user} on {removed.time[:19]} ({removed.reason}); no damage"
        )
    for found in signatures:
        by = f"{found.signature.user}@{found.signature.provenance.host}, key {found.signature.public_key[:16]}…"
        until = f"signature of {by} until iteration {found.signature.iteration}"
        typer.echo(f"{until}: {found.problem or 'holds'}")
    if coverage:
        typer.echo(coverage)
    if report.unselected_files:
        typer.echo(
            f"{report.unselected_files} files ({report.unselected_bytes:,} bytes) belong to no commit: "
            "unfinished or abandoned work, which arealflow gc removes"
        )
    if report.old_schema:
        typer.echo("written by schema 1, which had no seals: run.json, owners and the last commit are only parsed")
    verdict = "sound" if report.sound else f"{len(report.defects)} files damaged"
    typer.echo(
        f"{report.run}: {verdict} · {report.iterations} iterations, {report.files} files, {report.bytes:,} bytes"
    )
    typer.echo(f"root {report.root or '(none: the chain has no end)'}")


def _coverage(store: Store, report: Report, made: tuple[Signature, bool] | None) -> str:
    """What was signed now, or already; else what the newest of the run's signatures leaves out. Empty for none."""
    if made is not None:
        until = f"iteration {made[0].iteration} and line {made[0].log_records} of the log"
        said = "signed until" if made[1] else "not signed again: nothing has come since the signature until"
        return f"{said} {until}"
    if not report.sound or not (signatures := read_signatures(store, report.run)):
        return ""
    newest = max(signatures, key=lambda s: (s.iteration, s.log_records))
    return left_out(report, newest, unsigned_lines(store, report.run, newest))


def left_out(report: Report, newest: Signature, lines: int) -> str:
    """What the newest signature of a run leaves out: later iterations, and that many lines of its log."""
    iterations = report.iterations - 1 - newest.iteration
    told = f"newest signature: key {newest.public_key[:16]}…, until iteration {newest.iteration}"
    left = [f"{n} {what}" for n, what in ((iterations, "later iterations"), (lines, "lines of the log")) if n > 0]
    if not left:
        return f"{told}, which is all"
    return f"{told}; NOT signed: {' and '.join(left)}. `arealflow audit {report.run} --sign KEY` signs them"
