"""Checks of the chain of commits, back to `run.json` and through the parents of a fork; of the log; and of the spool,
with the groups that each commit counts as settled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from areal_tasks.rollout.settled import SettledGroups, settled_after
from areal_tasks.store import paths
from areal_tasks.store.backend import Store
from areal_tasks.store.commit import last_number, listed_numbers
from areal_tasks.store.history.audit_records import Findings
from areal_tasks.store.history.journal import log_digest
from areal_tasks.store.objects.inventory import entries
from areal_tasks.store.parallel import parallel
from areal_tasks.store.runs import read_commit, run_digest
from areal_tasks.store.spool import number_of_starts
from schemas.manifest import IterationCommit, LogRecord, RunRecord, Segment, SpoolRecord, StageManifest, TableRef


@dataclass(frozen=True)
class Link:
    """A commit in the chain: the digest of its bytes (empty: damaged), and the commit (None: damaged)."""

    path: str
    digest: str
    commit: IterationCommit | None


def audit_history(found: Findings, name: str, stop: int | None = None) -> list[Link]:
    """Check the commits of `name` before iteration `stop` (all of them), those of its parents, and their segments."""
    record = found.record(paths.run_record(name), RunRecord)
    first = record.parent_iteration if record else 0
    shared = first if stop is None else min(first, stop)
    inherited = audit_history(found, record.parent, shared) if record and record.parent else []
    last = committed(found.store, name, first)
    numbers = range(first, last if stop is None else min(stop, last))
    own = parallel(lambda k: _link(found, name, k), numbers)
    root = run_digest(found.store, name) if record else ""
    _check_links(found, inherited[-1] if inherited else Link(paths.run_record(name), root, None), own)
    named = max((link.commit.segment for link in own if link.commit), default=-1)
    found.sequence(partial(paths.segment, name), Segment, 0, named)
    return [*inherited, *own]


def committed(store: Store, name: str, first: int) -> int:
    """The iteration after the last commit, even if an earlier commit is missing."""
    path = partial(paths.iteration_commit, name)
    last = last_number(store, path, first)
    return max([last, *(k for k in listed_numbers(store, path) if k > last and store.exists(path(k)))]) + 1


def _link(found: Findings, name: str, k: int) -> Link:
    path = paths.iteration_commit(name, k)
    affects = f"everything that iteration {k} selects, and the chain from there on"

    def read() -> Link:
        commit, digest = read_commit(found.store, name, k)
        return Link(path, digest, found.checked(path, commit))

    return found.attempt(path, affects, read) or Link(path, "", None)


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


def audit_log(found: Findings, name: str, links: list[Link]) -> None:
    """Check that each log line has the digest of the line before it, and that what it records still exists.

    Each commit names the last line that it knows: so many are there.
    """
    named = {c.log_records: c.log for c in (link.commit for link in links) if c and c.run == name and c.log_records}
    log = found.sequence(partial(paths.log, name), LogRecord, 1, max(named, default=0))
    for n in named.keys() & log.keys():
        if log_digest(found.store, name, n) != named[n]:
            found.report(paths.log(name, n), "replaced: a commit records another digest")
    for n, record in log.items():
        if (path := _written_before(name, record)) and not found.store.exists(path):
            found.report(path, f"missing: line {n} of the log says that it was written")
        if (n - 1 in log or n == 1) and record.previous != log_digest(found.store, name, n - 1):
            found.report(paths.log(name, max(n - 1, 1)), f"replaced: line {n} of the log records another digest")
        iterations, head = record.details.get("iterations"), record.details.get("head")  # of the last commit
        if not isinstance(iterations, int) or not iterations or not isinstance(head, str):
            continue
        if iterations > len(links):  # commits are never undone
            what = f"missing: line {record.n} of the log says that {iterations} iterations were committed"
            found.report(paths.iteration_commit(name, iterations - 1), what)
        elif links[iterations - 1].digest not in ("", head):
            found.report(links[iterations - 1].path, f"replaced: line {record.n} of the log records another digest")


def _written_before(name: str, line: LogRecord) -> str:
    """The path of the record that was written before this line of the log about it; empty for most lines."""
    if line.action in ("tagged", "protected"):
        return paths.tag(name, str(line.details["tag"]))
    if line.action in ("forked", "replayed"):
        return paths.reference(str(line.details["parent"]), str(line.details["child"]))
    return ""


# ── the spool ─────────────────────────────────────────────────────────────────────────────────────────────────────────


#: Records of a run's spool, by their paths.
Records = Mapping[str, SpoolRecord]


def audit_spool(found: Findings, name: str, links: Sequence[Link]) -> dict[str, Records]:
    """Check the spool records of `name` and its parents, and queue the shards in the spool of `name`.

    Returns the records of each run. Of its parents' spools, a derived run needs only which groups they rejected.
    """
    runs = dict.fromkeys([name, *(link.commit.run for link in links if link.commit)])
    spools = {run: _records(found, run) for run in runs}
    _shards(found, name, spools[name], links)
    return spools


def _records(found: Findings, run: str) -> Records:
    listed = listed_numbers(found.store, lambda n: paths.spool_record(run, n, 0))
    starts = max([number_of_starts(found.store, run), *(start + 1 for start in listed)])
    return {path: record for start in range(starts) for path, record in _start(found, run, start)}


def _start(found: Findings, run: str, start: int) -> Iterator[tuple[str, SpoolRecord]]:
    """The valid records of a start."""
    records = found.sequence(partial(paths.spool_record, run, start), SpoolRecord, 0)
    if not records:
        found.record(paths.spool_record(run, start, 0), SpoolRecord)
    closed = next((n for n, record in records.items() if record.kind == "closed"), None)
    for n, record in records.items():
        path = paths.spool_record(run, start, n)
        if record.start != start:
            found.report(path, f"holds a record of start {record.start}, not {start}")
        elif (record.kind == "opened") != (n == 0):
            found.report(path, f"is of the kind {record.kind!r}, as record {n} of its start")
        elif closed is not None and n > closed:
            found.report(path, f"comes after record {closed}, which has closed the start")
        else:
            yield path, record


def _shards(found: Findings, name: str, records: Records, links: Sequence[Link]) -> None:
    """Queue the shards that must exist, with their rows, and those that `gc` may remove but has not."""
    head = links[-1].commit if links else None
    settled, unknown = settled_after(head), bool(links) and head is None
    present = {entry.path for entry in entries(found.store, paths.spool(name))} if records else set()
    for path, record in records.items():
        removable = unknown or all(group.index in settled for group in record.finished)
        for table in record.tables.values():
            if not removable:
                found.add_table(path, table)
            for shard in table.shards if removable else ():
                if shard.path in present:
                    found.add_file(shard, "nothing: no later iteration takes these groups")


def check_groups(
    found: Findings,
    links: Sequence[Link],
    manifests: Mapping[str, StageManifest],
    spools: Mapping[str, Records],
) -> None:
    """After the shards were read, check that they hold the recorded groups, and the settled groups of each commit."""
    for path, record in (item for records in spools.values() for item in records.items()):
        rows = _rows(found, record.tables)
        named = {group.index: group.samples for group in record.finished if group.samples}
        if rows is not None and rows != named:
            found.report(path, f"names these samples of groups: {_counts(named)}; its shards hold {_counts(rows)}")
    damaged = {defect.path for defect in found.defects}
    rejected = {
        run: {group.index for record in records.values() for group in record.rejected}
        for run, records in spools.items()
        if not any(path.startswith(f"{paths.spool(run)}/") for path in damaged)
    }
    before: SettledGroups | None = SettledGroups()
    for link in links:
        commit = link.commit if link.path not in damaged else None
        taken = _taken(found, commit, manifests) if commit else None
        if commit and before and taken is not None:
            for what in _contradictions(before, taken, settled_after(commit), rejected.get(commit.run)):
                found.report(link.path, what)
        before = settled_after(commit) if commit else None


def _rows(found: Findings, tables: Mapping[str, TableRef]) -> Counter[int] | None:
    """The rows of each group in the shards of a table `rollout`; None if one of them was not read."""
    shards = [shard.path for shard in tables["rollout"].shards] if "rollout" in tables else []
    read = [found.groups[path] for path in shards if path in found.groups]
    return sum(read, Counter()) if len(read) == len(shards) else None


def _taken(found: Findings, commit: IterationCommit, manifests: Mapping[str, StageManifest]) -> set[int] | None:
    """The groups that an iteration has trained on; None if unknown."""
    rollouts = [manifests[ref.path] for ref in commit.stages if ref.stage == "rollout" and ref.path in manifests]
    rows = _rows(found, rollouts[0].tables) if rollouts and "next_group" in commit.state else None
    return set(rows) if rows is not None else None


def _contradictions(
    before: SettledGroups, taken: set[int], after: SettledGroups, rejected: set[int] | None
) -> Iterator[str]:
    """Errors in the groups that a commit counts as settled; `rejected` ones may be among them (None: unknown)."""
    expected = before.add(taken)
    if twice := sorted(group for group in taken if group in before):
        yield f"trains on groups that were settled before: {_some(twice)}"
    if lost := _some(expected.without(after)):
        yield f"does not count as settled groups that are: {lost}"
    if rejected is not None and (more := _some(i for i in after.without(expected) if i not in rejected)):
        yield f"counts as settled groups that no iteration has trained on and the spool has not rejected: {more}"


def _counts(rows: Mapping[int, int]) -> str:
    return _some(f"{count} of {group}" for group, count in sorted(rows.items())) or "none"


def _some(values: Iterable[object]) -> str:
    """The first six of these values; present may be very many."""
    first = [str(value) for value in islice(values, 7)]
    return ", ".join(first[:6]) + (", …" if len(first) > 6 else "")
