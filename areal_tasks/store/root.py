"""The root hash of a run: one value that vouches for its recipes and for every byte that its commits select."""

from __future__ import annotations

from collections.abc import Iterator

from areal_tasks.store import paths
from areal_tasks.store.commit import bytes_digest
from areal_tasks.store.keys import combine_digests
from areal_tasks.store.parallel import parallel
from areal_tasks.store.runs import Run


def root_hash(run: Run, iterations: int) -> str:
    """SHA-256 over the last of the first `iterations` commits, and over `run.json` and the recipe segments until then.

    A commit names the one before it and, through manifests, every file: it vouches for the whole history. What comes
    later (more iterations, lines of the log, tags) does not change the root of what was there.

    Raises:
        StoreError: one of these files is missing.
    """
    named = [*([run.commit_path(iterations - 1)] if iterations else []), *_records(run, iterations)]
    digests = parallel(lambda path: bytes_digest(run.store, path), named)
    return combine_digests(dict(zip(named, digests, strict=True)))


def _records(run: Run, iterations: int) -> Iterator[str]:
    yield paths.run_record(run.name)
    yield from (paths.segment(run.name, s.n) for s in run.segments if s.from_iteration < iterations)
    if run.parent is not None:
        yield from _records(run.parent, min(run.first, iterations))
