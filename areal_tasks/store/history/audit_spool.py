"""Checks of a run's spool, and of the groups that each of its commits counts as settled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from areal_tasks.rollout.settled import Settled, settled_after
from areal_tasks.store import paths
from areal_tasks.store.history.audit_bytes import Work
from areal_tasks.store.history.audit_history import Link
from areal_tasks.store.history.audit_records import Findings
from areal_tasks.store.objects.inventory import entries
from areal_tasks.store.spool import number_of_starts
from schemas.manifest import IterationCommit, SpoolRecord, StageManifest, TableRef

#: Records of a run's spool, by their paths.
Records = Mapping[str, SpoolRecord]


def audit_spool(found: Findings, work: Work, name: str, links: Sequence[Link]) -> dict[str, Records]:
    """Check the spool records of `name` and its parents, and queue the shards in the spool of `name`.

    Returns the records of each run. Of its parents' spools, a child needs only which groups they rejected.
    """
    runs = dict.fromkeys([name, *(link.commit.run for link in links if link.commit)])
    spools = {run: _records(found, run) for run in runs}
    _shards(found, work, name, spools[name], links)
    return spools


def _records(found: Findings, run: str) -> Records:
    listed = [int(child) for child in found.store.children(paths.spool(run)) if child.isdecimal()]
    starts = max([number_of_starts(found.store, run), *(start + 1 for start in listed)])
    return {path: record for start in range(starts) for path, record in _start(found, run, start)}


def _start(found: Findings, run: str, start: int) -> Iterator[tuple[str, SpoolRecord]]:
    """The valid records of a start."""
    folder = f"{paths.spool(run)}/{start}"
    records = found.sequence(folder, lambda n: paths.spool_record(run, start, n), SpoolRecord, 0)
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


def _shards(found: Findings, work: Work, name: str, records: Records, links: Sequence[Link]) -> None:
    """Queue the shards that must exist, with their rows, and those that `gc` may remove but has not."""
    head = links[-1].commit if links else None
    settled, unknown = settled_after(head), bool(links) and head is None
    present = {entry.path for entry in entries(found.store, paths.spool(name))} if records else set()
    for path, record in records.items():
        removable = unknown or all(group.index in settled for group in record.finished)
        for table in record.tables.values():
            if not removable:
                work.add_table(path, table)
            for shard in table.shards if removable else ():
                if shard.path in present:
                    work.add_file(shard, path, "nothing: no later iteration takes these groups")


def check_groups(
    found: Findings,
    work: Work,
    links: Sequence[Link],
    manifests: Mapping[str, StageManifest],
    spools: Mapping[str, Records],
) -> None:
    """After the shards were read, check that they hold the recorded groups, and the settled groups of each commit."""
    for path, record in (item for records in spools.values() for item in records.items()):
        rows = _rows(work, record.tables)
        named = {group.index: group.samples for group in record.finished if group.samples}
        if rows is not None and rows != named:
            found.report(path, f"names these samples of groups: {_counts(named)}; its shards hold {_counts(rows)}")
    damaged = {defect.path for defect in found.defects}
    rejected = {run: _rejected(records) for run, records in spools.items() if not _any_below(damaged, paths.spool(run))}
    before: Settled | None = Settled()
    for link in links:
        commit = link.commit if link.path not in damaged else None
        taken = _taken(work, commit, manifests) if commit else None
        if commit and before and taken is not None:
            for what in _contradictions(before, taken, settled_after(commit), rejected.get(commit.run)):
                found.report(link.path, what)
        before = settled_after(commit) if commit else None


def _rows(work: Work, tables: Mapping[str, TableRef]) -> Counter[int] | None:
    """The rows of each group in the shards of a table `rollout`; None if one of them was not read."""
    shards = [shard.path for shard in tables["rollout"].shards] if "rollout" in tables else []
    read = [work.groups[path] for path in shards if path in work.groups]
    return sum(read, Counter()) if len(read) == len(shards) else None


def _taken(work: Work, commit: IterationCommit, manifests: Mapping[str, StageManifest]) -> set[int] | None:
    """The groups that an iteration has trained on; None if unknown."""
    rollouts = [manifests[ref.path] for ref in commit.stages if ref.stage == "rollout" and ref.path in manifests]
    rows = _rows(work, rollouts[0].tables) if rollouts and "next_group" in commit.state else None
    return set(rows) if rows is not None else None


def _rejected(records: Records) -> set[int]:
    return {group.index for record in records.values() for group in record.rejected}


def _any_below(damaged: Iterable[str], folder: str) -> bool:
    return any(path.startswith(f"{folder}/") for path in damaged)


def _contradictions(before: Settled, taken: set[int], after: Settled, rejected: set[int] | None) -> Iterator[str]:
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


def _some(values: Iterable[object], most: int = 6) -> str:
    """The first of these values; present may be very many."""
    first = [str(value) for value in islice(values, most + 1)]
    return ", ".join(first[:most]) + (", …" if len(first) > most else "")
