"""The JSON records of the store: whatever exists under these names is a commit (DESIGN §4)."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION: Final = 1


class Record(BaseModel):
    """A JSON file of the store. Written once; unknown keys are refused, a newer schema is named."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")

    def encode(self) -> bytes:
        """The bytes that are stored (and hashed)."""
        return self.model_dump_json(indent=1).encode()


class FileRef(Record):
    """An immutable file: path below the store's root, digest and size."""

    path: str
    sha256: str
    bytes: int


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
    """A manifest a stage read, by path and content digest."""

    path: str
    digest: str


class Provenance(Record):
    """Who made a record, where and when. Never part of a key or a content digest."""

    code_version: str
    host: str
    owner: int
    started: str
    committed: str
    prefect_flow_run_id: str = ""
    prefect_task_run_id: str = ""


class StageManifest(Record):
    """One committed stage of one iteration: `iteration=K/stage=S/<key>.json`."""

    schema_version: int = SCHEMA_VERSION
    run: str
    iteration: int
    stage: str
    attempt: str
    key: str
    digest: str = Field(description="content digest over the tables' digests")
    inputs: tuple[InputRef, ...]
    tables: dict[str, TableRef]
    metrics: dict[str, float] = {}
    provenance: Provenance


class StageRef(Record):
    """A stage manifest as another record names it: path, digest of the file's bytes, content digest."""

    stage: str
    key: str
    path: str
    sha256: str
    digest: str


class WeightsManifest(Record):
    """`weights/version=V/attempt=A.json`: a Hugging Face folder; or a checkpoint, under `checkpoints/`."""

    schema_version: int = SCHEMA_VERSION
    run: str
    version: int
    attempt: str
    kind: str = Field(description="weights or checkpoint")
    digest: str = Field(description="digest over the files' digests, names included")
    files: tuple[FileRef, ...]
    provenance: Provenance


class WeightsRef(Record):
    """A weights or checkpoint manifest as another record names it.

    Weights that were handed to the servers and not written have no path; `digest` is then that of the train stage
    that made them, from whose inputs they can be made again.
    """

    version: int
    attempt: str
    path: str
    sha256: str
    digest: str

    @property
    def written(self) -> bool:
        """Whether the store has them."""
        return bool(self.path)


class IterationCommit(Record):
    """`iteration=K/commit.json` closes iteration K, which made weights version K+1. The commits are one hash chain."""

    schema_version: int = SCHEMA_VERSION
    run: str
    iteration: int
    attempt: str
    previous: str = Field(description="SHA-256 of the previous commit's bytes; of run.json for iteration 0")
    segment: int = Field(description="index of the recipe segment that was in force")
    stages: tuple[StageRef, ...]
    weights: WeightsRef
    checkpoint: WeightsRef | None = Field(description="newest checkpoint at or before this commit")
    state: dict[str, Any] = Field(default={}, description="state carried to the next iteration, as JSON")
    provenance: Provenance


class RunRecord(Record):
    """`run.json`: what never changes about a run."""

    schema_version: int = SCHEMA_VERSION
    run: str
    flow: str
    seed: int
    attempt: str
    parent: str = ""
    parent_iteration: int = 0
    provenance: Provenance


class Segment(Record):
    """`segments/<n>.json`: the recipe in force from an iteration on."""

    schema_version: int = SCHEMA_VERSION
    n: int
    from_iteration: int
    attempt: str
    recipe: dict[str, Any]
    provenance: Provenance


class OwnerRecord(Record):
    """`owners/<n>.json`: each start of the flow claims the next number; lower owners are refused for ever."""

    schema_version: int = SCHEMA_VERSION
    n: int
    attempt: str
    host: str
    pid: int
    started: str
    prefect_flow_run_id: str = ""


class ServiceRecord(Record):
    """`services/owner=<n>/<name>-<restart>.json`: where a service of this run listens."""

    schema_version: int = SCHEMA_VERSION
    name: str
    restart: int
    url: str
    host: str
    pid: int
    started: str
