"""The JSON records of the store: a file that exists under one of these names is committed."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field, field_validator

from schemas.record import Record, StoredRecord

#: The version of the prompt order of new runs (`areal_tasks.data.sampler.permutation`).
PROMPT_ORDER: Final = 2


class FileRef(Record):
    """An immutable file: path below the store's root, digest and size."""

    path: str
    sha256: str
    bytes: int

    @field_validator("path")
    @classmethod
    def _below_the_root(cls, path: str) -> str:
        """Paths from an untrusted manifest must not leave the store, nor a folder that files are copied to."""
        if {"", ".", ".."} & set(path.split("/")):
            raise ValueError(f"{path!r} does not lie below the store's root: it must be relative, without '.' and '..'")
        return path


class ShardRef(FileRef):
    """One Parquet file of a table."""

    rows: int
    tokens: int


class TableRef(Record):
    """A table: its shards in order, and the digest of its deterministic columns."""

    name: str
    digest: str
    shards: tuple[ShardRef, ...]

    @property
    def rows(self) -> int:
        return sum(s.rows for s in self.shards)

    @property
    def tokens(self) -> int:
        return sum(s.tokens for s in self.shards)


class InputRef(Record):
    """A manifest that a stage read, by path and content digest."""

    path: str
    digest: str


class Provenance(Record):
    """Which code and process made a record, where and when. Never part of a key or a content digest."""

    code_version: str
    host: str
    owner: int
    started: str
    committed: str
    prefect_flow_run_id: str = ""
    prefect_task_run_id: str = ""


class StageManifest(StoredRecord):
    """One committed stage of one iteration: `iteration=K/stage=S/<key>.json`."""

    run: str
    iteration: int
    stage: str
    attempt: str
    key: str
    digest: str = Field(description="content digest over the tables' digests")
    inputs: tuple[InputRef, ...]
    tables: dict[str, TableRef]
    metrics: dict[str, float] = Field(default={})
    provenance: Provenance


class StageRef(Record):
    """A reference to a stage manifest: path, digest of the file's bytes, content digest."""

    stage: str
    key: str
    path: str
    sha256: str
    digest: str


class WeightsManifest(StoredRecord):
    """`weights/version=V/attempt=A.json`: a Hugging Face folder; or a checkpoint, under `checkpoints/`."""

    run: str
    version: int
    attempt: str
    kind: str = Field(description="weights or checkpoint")
    digest: str = Field(description="digest over the files' digests, names included")
    files: tuple[FileRef, ...]
    provenance: Provenance


class WeightsRef(Record):
    """A reference to a weights or checkpoint manifest.

    Weights that were sent to the servers but not written have no path; `digest` is then that of the train stage that
    made them, from whose inputs they can be retrained.
    """

    version: int
    attempt: str
    path: str
    sha256: str
    digest: str

    @property
    def written(self) -> bool:
        """Whether the weights are in the store."""
        return bool(self.path)


class IterationCommit(StoredRecord):
    """`iteration=K/commit.json` commits iteration K, which made weights version K+1. Commits form a hash chain."""

    run: str
    iteration: int
    attempt: str
    previous: str = Field(description="SHA-256 of the previous commit's bytes; of run.json for iteration 0")
    segment: int = Field(description="index of the recipe segment in force")
    stages: tuple[StageRef, ...]
    weights: WeightsRef
    checkpoint: WeightsRef | None = Field(description="newest checkpoint at or before this commit")
    state: dict[str, Any] = Field(default={}, description="state carried to the next iteration, as JSON")
    restored: WeightsRef | None = Field(
        default=None, description="weights of version K that a restored trainer published again, with which it began"
    )
    published: WeightsRef | None = Field(
        default=None, description="weights of version K, if written only after the previous commit"
    )
    log: str = Field(default="", description="SHA-256 of the bytes of the run's last log line then; or empty")
    log_records: int = Field(default=0, description="how many lines the log had, at least")
    provenance: Provenance

    @property
    def stored(self) -> tuple[WeightsRef, ...]:
        """All weights and checkpoints that this commit names and the store has."""
        named = (self.weights, self.restored, self.published, self.checkpoint)
        return tuple(ref for ref in named if ref is not None and ref.written)


class RunRecord(StoredRecord):
    """`run.json`: the properties of a run that never change."""

    run: str
    flow: str
    seed: int
    attempt: str
    parent: str = ""
    parent_iteration: int = 0
    kind: str = Field(default="", description='how it derives from its parent: "fork", "replay"; "" without a parent')
    counterfactual: bool = Field(default=False, description="its rollouts are another policy's, by intention")
    replay_from: str = Field(default="", description="of a replay: the first stage that is built again")
    replay_until: str = Field(default="", description="of a replay: the last stage that is built")
    order: int = Field(default=1, ge=1, le=PROMPT_ORDER, description="version of the prompt order, as in its parent")
    provenance: Provenance


class Change(Record):
    """A change that `arealflow set` has requested: recipe fields by dotted path, the user, host and time."""

    n: int
    values: dict[str, Any]
    user: str
    host: str
    time: str


class ChangeRecord(StoredRecord):
    """`changes/<n>.json`: a requested change of a run in progress. A segment that contains it applies it."""

    attempt: str
    change: Change


class Segment(StoredRecord):
    """`segments/<n>.json`: the recipe in force from iteration `from_iteration` on."""

    n: int
    from_iteration: int
    attempt: str
    recipe: dict[str, Any]
    change: Change | None = Field(default=None, exclude_if=lambda change: change is None, description="that it makes")
    provenance: Provenance


class OwnerRecord(StoredRecord):
    """`owners/<n>.json`, the fencing token: each start of the flow claims the next number; lower ones are refused."""

    n: int
    attempt: str
    host: str
    pid: int
    started: str
    prefect_flow_run_id: str = ""


class ServiceRecord(StoredRecord):
    """`services/owner=<n>/<name>-<restart>.json`: where a service of this run listens."""

    name: str
    restart: int
    url: str
    host: str
    pid: int
    started: str


class NodeRecord(StoredRecord):
    """`nodes/owner=<n>/<name>-<restart>.json`: where the agent of a service on another machine listens."""

    url: str
    host: str
    pid: int
    certificate: str = Field(description="(PEM) that the agent shows; the flow trusts no other there")
    software: dict[str, str] = Field(description="versions that must be the same on all machines of a run")


class Wait(Record):
    """Something that a run waits for."""

    at: str = Field(description="who must act: a service, `the store`, `the verifiers`, `a person`, `this process`")
    what: str
    since: str = Field(description="in UTC, to the second")
    limit: str = Field(description="what ends the wait")
    says: str = Field(description="its last report of progress")


class WaitsRecord(StoredRecord):
    """`waits/owner=<n>/<m>.json`: what a start of the flow waited for at time `told`; the last record counts.

    The next record follows within `seconds`, unless the process is gone or the store unavailable; after an empty one,
    none follows until the next long wait.
    """

    host: str
    pid: int
    told: str
    seconds: float
    waits: tuple[Wait, ...]


class SystemRecord(StoredRecord):
    """`system/owner=<owner>/<n>.json`: samples of a run's services, which a start of its flow has taken."""

    owner: int
    n: int
    shard: ShardRef
    provenance: Provenance


class WatchRecord(StoredRecord):
    """`watches/owner=<owner>/<n>.json`: a user watches the services, so that samples are to be stored immediately."""

    user: str
    provenance: Provenance


class SpooledGroup(Record):
    """A finished group in the spool. `version`: of the weights that sampled its oldest token."""

    index: int
    version: int
    samples: int
    tokens: int = Field(description="generated tokens")


class RejectedGroup(Record):
    """A group that will not be trained on."""

    index: int
    reason: str = Field(description="`failed`, `stale` or the filter's name, a colon, and details")
    reward: float | None = Field(default=None, description="mean over samples with a reward, if a filter computed it")


class SpoolRecord(StoredRecord):
    """`spool/<start>/<n>.json`: which groups a process has finished or rejected, in order.

    The first record opens a start. The successor writes a `closed` record, so that the next write of a predecessor that
    still runs fails. `tables` has the rows of the finished groups.
    """

    start: int
    n: int
    attempt: str
    kind: Literal["opened", "groups", "closed"]
    made_with: str = Field(default="", description="digest of the settings that decide what a group contains")
    finished: tuple[SpooledGroup, ...] = ()
    rejected: tuple[RejectedGroup, ...] = ()
    tables: dict[str, TableRef] = Field(default={})
    provenance: Provenance


class LogRecord(StoredRecord):
    """`log/<n>.json`: an action on the run, with user, host and time. The records form a separate hash chain."""

    n: int
    attempt: str
    action: str = Field(description="one of ACTIONS")
    user: str
    host: str
    time: str
    pid: int
    prefect_flow_run_id: str = ""
    details: dict[str, bool | int | float | str] = Field(default={})
    previous: str = Field(default="", description="SHA-256 of the bytes of the record before it")


#: How a start of the flow begins.
BEGINNINGS: Final = ("started", "resumed")
#: How a start of the flow ends, unless it is killed.
ENDINGS: Final = ("finished", "failed", "cancelled", "suspended", "interrupted")
#: The actions in a log.
ACTIONS: Final = (
    *BEGINNINGS,
    *("placed", "first iteration"),
    *ENDINGS,
    *("extended", "changed", "code changed", "refused", "forked", "replayed"),
    *("removed", "tagged", "protected", "exported", "signed"),
)


class Reference(StoredRecord):
    """`references/<child>.json`: the derived run `child` needs this run's history before `iteration`."""

    child: str
    iteration: int
    attempt: str
    kind: str = Field(default="", description='"fork", "replay", or "weights": it begins with weights of this run')
    provenance: Provenance


class Tag(StoredRecord):
    """`tags/<tag>.json`: a name for weights, which protects them from `gc`."""

    tag: str
    version: int
    weights_attempt: str
    attempt: str
    user: str
    provenance: Provenance


class Tombstone(StoredRecord):
    """`tombstones/<kind>-<version>-<attempt>.json`, or `tombstone.json` for a whole run: removed by `gc`, and by whom.

    It is written before anything is removed. Manifests and commits stay, so that the run can still be audited.
    """

    kind: str = Field(description="weights, checkpoint or run")
    path: str = Field(description="the manifest whose files were removed; the run's name for a run")
    version: int = -1
    bytes: int = 0
    attempt: str
    user: str
    reason: str
    provenance: Provenance


class Signature(StoredRecord):
    """`signatures/<key>-<root>-<lines of the log>.json`: a signature of the run's state after `iteration`."""

    root: str
    iteration: int
    log: str = Field(description="SHA-256 of the last log record's bytes, which covers earlier ones; or empty")
    log_records: int
    algorithm: str
    public_key: str
    signature: str
    attempt: str
    user: str
    provenance: Provenance


#: Records of which the first writer of a name wins: `attempt` identifies the writer.
ClaimedRecord = (
    StageManifest | WeightsManifest | IterationCommit | RunRecord | Segment | OwnerRecord
    | LogRecord | Reference | Tag | Tombstone | Signature | SpoolRecord | ChangeRecord
)  # fmt: skip
