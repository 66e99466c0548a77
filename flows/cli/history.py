"""`arealflow audit` and `log`: the integrity of a run, its signatures, and its log."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from areal_tasks.store import paths
from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.history.audit import AuditReport
from areal_tasks.store.history.audit import audit as check
from areal_tasks.store.history.journal import read_log
from areal_tasks.store.history.signing import CheckedSignature, sign, unsigned_lines, verify
from areal_tasks.store.runs import check_name, load_run
from flows.cli.output import AsJson, RunName, StoreUrl, echo, print_json, show
from schemas.errors import UserError
from schemas.manifest import LogRecord, Signature


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
    """Check every byte of a run and its signatures, and print its root hash. Exits 1 if anything is wrong."""
    place = open_store(store)
    report = _with_progress(place, run)
    signatures = _signatures(place, report, verify_with)
    as_signed = not any(found.problem for found in signatures)
    may_sign = sign_with if report.sound and as_signed else None
    made = sign(place, run, report.root, report.iterations, may_sign) if may_sign else None
    if made is not None:
        signatures = [*(s for s in signatures if s.signature != made[0]), CheckedSignature(made[0], known=True)]
    if as_json:
        print_json(_as_json(place, report, signatures))
    else:
        _print(report, signatures, _coverage(place, report, signatures, made))
    if sign_with and not may_sign:
        echo("not signed: repair the run first, or delete the invalid signature", err=True)
    if not (report.sound and as_signed):
        raise typer.Exit(1)


def _signatures(store: Store, report: AuditReport, key: Path | None) -> list[CheckedSignature]:
    """The signatures, checked; none if the history has no end, or if one is damaged, which the report says."""
    try:
        return verify(store, report.run, key) if report.root else []
    except UserError:
        if report.sound or key:
            raise
        return []


def _with_progress(store: Store, run: str) -> AuditReport:
    """Run the audit, with a progress bar if stderr is a terminal."""
    columns = (TextColumn("audit"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("audit", total=None)
        return check(store, run, lambda done, total: bar.update(task, completed=done, total=total))


def _as_json(store: Store, report: AuditReport, signatures: list[CheckedSignature]) -> dict[str, Any]:
    return {
        **asdict(report),
        "removed": [tombstone.model_dump() for tombstone in report.removed],
        "sound": report.sound,
        "signatures": [
            {
                **s.signature.model_dump(),
                "holds": not s.problem,
                "problem": s.problem,
                "known": s.known,
                "unsigned_iterations": max(0, report.iterations - 1 - s.signature.iteration),
                "unsigned_log_lines": unsigned_lines(store, report.run, s.signature) if report.sound else None,
            }
            for s in signatures
        ],
    }


def _print(report: AuditReport, signatures: list[CheckedSignature], coverage: str) -> None:
    for defect in report.defects:
        echo(str(defect))
    for removed in report.removed:
        made = removed.provenance
        by = f"{removed.user}@{made.host} on {made.committed[:19]}"
        echo(f"{removed.path}: files removed by {by} ({removed.reason}); no damage")
    for found in signatures:
        if found.known or found.problem:
            echo(_verdict(found))
    if coverage:
        echo(coverage)
    if report.unselected_files:
        echo(
            f"{report.unselected_files} files ({report.unselected_bytes:,} bytes) belong to no commit: "
            "unfinished or abandoned work, which arealflow gc removes"
        )
    if report.old_schema:
        echo("written by schema 1, which had no seals: run.json, owners and the last commit are only parsed")
    whole = "its files are sound, its signatures are not" if any(s.problem for s in signatures) else "sound"
    verdict = whole if report.sound else f"{len(report.defects)} files damaged"
    echo(f"{report.run}: {verdict} · {report.iterations} iterations, {report.files} files, {report.bytes:,} bytes")
    echo(f"root {report.root or '(none: the chain has no end)'}")


def _verdict(found: CheckedSignature) -> str:
    """Who signed up to which iteration, and whether the signature holds."""
    signed = found.signature
    by = f"{signed.user}@{signed.provenance.host}, key {signed.public_key[:16]}…"
    holds = f"does NOT hold: {found.problem}" if found.problem else "holds"
    return f"signature of {by} until iteration {signed.iteration}: {holds}"


def _coverage(
    store: Store, report: AuditReport, signatures: list[CheckedSignature], made: tuple[Signature, bool] | None
) -> str:
    """What is signed by now; or what the newest signature that holds does not cover. Empty without a signature."""
    if made is not None:
        until = f"iteration {made[0].iteration} and line {made[0].log_records} of the log"
        verdict = "signed until" if made[1] else "not signed again: nothing was added since the signature until"
        return f"{verdict} {until}"
    any_known = any(found.known for found in signatures)
    holding = [found for found in signatures if not found.problem and found.known == any_known]
    if not report.sound or not holding:
        return ""
    return _left_out(report, holding[-1], unsigned_lines(store, report.run, holding[-1].signature))


def _left_out(report: AuditReport, newest: CheckedSignature, lines: int) -> str:
    """What a signature that holds does not cover: later iterations, and `lines` lines of the run's log."""
    iterations = report.iterations - 1 - newest.signature.iteration
    whose = "" if newest.known else " by a key that was not verified here"
    signed = (
        f"newest signature that holds: key {newest.signature.public_key[:16]}…{whose}, "
        f"until iteration {newest.signature.iteration}"
    )
    left = [f"{n} {what}" for n, what in ((iterations, "later iterations"), (lines, "lines of the log")) if n > 0]
    if not left:
        return f"{signed}, which is all"
    return f"{signed}; NOT signed: {' and '.join(left)}. `arealflow audit {report.run} --sign KEY` signs them"


def log(run: RunName, store: StoreUrl = "", as_json: AsJson = False) -> None:
    """The log of a run, also of a removed one, oldest line first."""
    place = open_store(store)
    check_name(run)
    if not place.exists(paths.run_tombstone(run)):
        load_run(place, run)  # raises a UserError with the names of the runs, if there is none of this name
    show([line.model_dump() if as_json else _log_row(line) for line in read_log(place, run)], as_json)


def _log_row(line: LogRecord) -> dict[str, object]:
    return {
        "n": line.n,
        "time": line.time[:19],
        "action": line.action,
        "who": f"{line.user}@{line.host}",
        "flow run": line.prefect_flow_run_id or "-",
        "details": ", ".join(f"{name} {_short(value)}" for name, value in line.details.items()),
    }


def _short(value: object) -> str:
    text = str(value)
    return f"{text[:12]}…" if len(text) == 64 else text
