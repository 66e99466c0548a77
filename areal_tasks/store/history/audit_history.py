"""Checks of the chain of commits, back to `run.json` and through the parents of a fork, and of the log."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from areal_tasks.store import paths
from areal_tasks.store.backend import Store
from areal_tasks.store.history.audit_records import Findings
from areal_tasks.store.history.journal import log_digest
from areal_tasks.store.parallel import parallel
from areal_tasks.store.search import last_present
from schemas.manifest import IterationCommit, LogRecord, RunRecord, Segment


@dataclass(frozen=True)
class Link:
    """A commit in the chain: the digest of its bytes (empty: unreadable), and the commit (None: damaged)."""

    path: str
    digest: str
    commit: IterationCommit | None


def audit_history(found: Findings, name: str, stop: int | None = None) -> list[Link]:
    """Check the commits of `name` before iteration `stop` (all of them), and those of its parents."""
    record = found.record(paths.run_record(name), RunRecord)
    segments = found.sequence(f"{name}/segments", lambda n: paths.segment(name, n), Segment, 0)
    first = record.parent_iteration if record else 0
    shared = first if stop is None else min(first, stop)
    inherited = audit_history(found, record.parent, shared) if record and record.parent else []
    last = committed(found.store, name, first)
    numbers = range(first, last if stop is None else min(stop, last))
    own = parallel(lambda k: _link(found, name, k), numbers)
    root = hashlib.sha256(found.store.read(paths.run_record(name))).hexdigest() if record else ""
    _check_links(found, inherited[-1] if inherited else Link(paths.run_record(name), root, None), own)
    _check_segments(found, name, own, segments)
    return [*inherited, *own]


def committed(store: Store, name: str, first: int) -> int:
    """The iteration after the last commit, even if an earlier commit is missing."""
    last = last_present(lambda k: store.exists(paths.iteration_commit(name, k)), first)
    folders = (child.removeprefix("iteration=") for child in store.children(name) if child.startswith("iteration="))
    numbers = (int(folder) for folder in folders if folder.isdecimal())
    beyond = [k for k in numbers if k > last and store.exists(paths.iteration_commit(name, k))]
    return max([last, *beyond]) + 1


def _link(found: Findings, name: str, k: int) -> Link:
    path = paths.iteration_commit(name, k)
    affects = f"everything that iteration {k} selects, and the chain from there on"
    data = found.read(path, affects)
    if data is None:
        return Link(path, "", None)
    commit = found.decode(path, IterationCommit, data, affects)
    if commit is not None and (commit.run, commit.iteration) != (name, k):
        found.report(path, f"is the commit of iteration {commit.iteration} of run {commit.run!r}", affects)
        commit = None
    return Link(path, hashlib.sha256(data).hexdigest(), commit)


def _check_links(found: Findings, before: Link, own: list[Link]) -> None:
    """Check that each commit has the digest of the one before it: for the first, the parent's last or `run.json`."""
    for link in own:
        if link.commit is not None and before.digest not in ("", link.commit.previous):
            found.report(
                before.path,
                f"altered or replaced: {link.path} records another digest",
                f"the chain from iteration {link.commit.iteration} on",
            )
        before = link


def _check_segments(found: Findings, name: str, own: list[Link], segments: dict[int, Segment]) -> None:
    """Check that the recipe segments that commits name exist."""
    for n in sorted({link.commit.segment for link in own if link.commit} - segments.keys()):
        path = paths.segment(name, n)
        if path not in found.seen:
            found.report(path, "missing", "the recipe of the iterations that were committed under it")


def audit_log(found: Findings, name: str, links: list[Link]) -> None:
    """Check that each log line has the digest of the line before it, and that the commits it records still exist."""
    log = found.sequence(f"{name}/log", lambda n: paths.log(name, n), LogRecord, 1)
    for n, record in log.items():
        if (n - 1 in log or n == 1) and record.previous != log_digest(found.store, name, n - 1):
            found.report(paths.log(name, max(n - 1, 1)), f"replaced: line {n} of the log records another digest")
        _check_witness(found, name, record, links)


def _check_witness(found: Findings, name: str, record: LogRecord, links: list[Link]) -> None:
    """Check that the commit that a log line records as the last one exists: commits are never undone."""
    iterations, head = record.details.get("iterations"), record.details.get("head")
    if not isinstance(iterations, int) or not iterations or not isinstance(head, str):
        return
    if iterations > len(links):
        what = f"missing: line {record.n} of the log says that {iterations} iterations were committed"
        found.report(paths.iteration_commit(name, iterations - 1), what)
    elif links[iterations - 1].digest not in ("", head):
        found.report(links[iterations - 1].path, f"replaced: line {record.n} of the log records another digest")
