"""Paths of records and files below the store's root."""

from __future__ import annotations

import re
from typing import Final

_VERSION: Final = re.compile(r"[^/]+/(weights|checkpoint)s?/version=(\d+)/attempt=(\w+)\.json")
_ATTEMPT: Final = re.compile(r".*?/attempt=[^/]+(?=/)")


def run_record(run: str) -> str:
    return f"{run}/run.json"


def owner(run: str, n: int) -> str:
    return f"{run}/owners/{n}.json"


def segment(run: str, n: int) -> str:
    return f"{run}/segments/{n}.json"


def change(run: str, n: int) -> str:
    """The n-th change, from 1, that `arealflow set` has requested."""
    return f"{run}/changes/{n}.json"


def log(run: str, n: int) -> str:
    """The n-th line of the run's log, from 1."""
    return f"{run}/log/{n}.json"


def reference(run: str, derived: str) -> str:
    """The record in `run` that the run `derived` needs a part of its history."""
    return f"{run}/references/{derived}.json"


def tag(run: str, name: str) -> str:
    return f"{run}/tags/{name}.json"


def tombstone(run: str, kind: str, version: int, attempt: str) -> str:
    """The record that the files of weights or a checkpoint were removed on purpose."""
    return f"{run}/tombstones/{kind}-{version:06d}-{attempt}.json"


def run_tombstone(run: str) -> str:
    """The record that the whole run was removed on purpose."""
    return f"{run}/tombstone.json"


def signature(run: str, key: str, root: str) -> str:
    return f"{run}/signatures/{key}-{root}.json"


def by_owner(run: str, folder: str, owner: int) -> str:
    """The folder of the records of one kind that a start of the flow has written."""
    return f"{run}/{folder}/owner={owner}"


def service(run: str, owner: int, name: str, restart: int) -> str:
    return f"{run}/services/owner={owner}/{name}-{restart}.json"


def node(run: str, owner: int, name: str, restart: int) -> str:
    return f"{run}/nodes/owner={owner}/{name}-{restart}.json"


def logs(run: str) -> str:
    return f"{run}/logs"


def log_part(run: str, owner: int, name: str, restart: int, n: int) -> str:
    """The n-th part, from 0, of the log of a service's start."""
    return f"{logs(run)}/owner={owner}/{name}-{restart}/{n}.log"


def waits(run: str, owner: int, n: int) -> str:
    """The n-th record, from 1, of what a start of the flow waited for."""
    return f"{run}/waits/owner={owner}/{n}.json"


def system(run: str, owner: int, n: int, kind: str = "json") -> str:
    """The n-th record, from 1, of samples of a run's services; `parquet`: the samples themselves."""
    return f"{run}/system/owner={owner}/{n}.{kind}"


def watch(run: str, owner: int, n: int) -> str:
    """The n-th record, from 1, that a user watches the services of a start of the flow."""
    return f"{run}/watches/owner={owner}/{n}.json"


def spool(run: str) -> str:
    """The folder of records of finished groups that wait for their iteration, and of rejected groups."""
    return f"{run}/spool"


def spool_record(run: str, start: int, n: int) -> str:
    return f"{spool(run)}/{start}/{n}.json"


def spool_attempt(run: str, start: int, attempt: str) -> str:
    """The folder of a record's shards."""
    return f"{spool(run)}/{start}/attempt={attempt}"


def iteration(run: str, k: int) -> str:
    return f"{run}/iteration={k:06d}"


def iteration_commit(run: str, k: int) -> str:
    return f"{iteration(run, k)}/commit.json"


def stage_manifest(run: str, k: int, stage: str, key: str) -> str:
    return f"{iteration(run, k)}/stage={stage}/{key}.json"


def stage_attempt(run: str, k: int, stage: str, attempt: str) -> str:
    return f"{iteration(run, k)}/stage={stage}/attempt={attempt}"


def weights(run: str, version: int, attempt: str) -> str:
    """The manifest of one attempt at weights version `version`."""
    return f"{weights_attempt(run, version, attempt)}.json"


def weights_attempt(run: str, version: int, attempt: str) -> str:
    return f"{run}/weights/version={version:06d}/attempt={attempt}"


def checkpoint(run: str, version: int, attempt: str) -> str:
    """The manifest of one attempt at a checkpoint of version `version`."""
    return f"{checkpoint_attempt(run, version, attempt)}.json"


def checkpoint_attempt(run: str, version: int, attempt: str) -> str:
    return f"{run}/checkpoints/version={version:06d}/attempt={attempt}"


def compactions(run: str) -> str:
    """The folder of a run's compactions, which are derived from its other files."""
    return f"{run}/compact"


def compaction(run: str, first: int, stop: int, generation: int, attempt: str) -> str:
    """The record of a compaction of the iterations from `first` to before `stop`."""
    return f"{compactions(run)}/{first:06d}-{stop:06d}-{generation:03d}-{attempt}.json"


def compact_attempt(run: str, attempt: str) -> str:
    return f"{compactions(run)}/attempt={attempt}"


def attempt_folder(path: str) -> str:
    """The folder of the attempt that wrote a file; empty for a file outside of attempts."""
    found = _ATTEMPT.match(path)
    return found[0] if found else ""


def version_of(manifest: str) -> tuple[str, int, str]:
    """What a manifest of weights or of a checkpoint is of: the kind (`weights`, `checkpoint`), version and attempt.

    Raises ValueError: this is no path of such a manifest.
    """
    found = _VERSION.fullmatch(manifest)
    if found is None:
        raise ValueError(f"{manifest} is no manifest of weights or of a checkpoint")
    return found[1], int(found[2]), found[3]
