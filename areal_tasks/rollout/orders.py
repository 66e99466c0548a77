"""The messages between the flow and its rollout workers. The rows of groups go through the store, not through these."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field

from areal_tasks.engines.sharing import Serving
from areal_tasks.rewards.pool import VerifyResult
from areal_tasks.store.backend import StoreError, Unavailable
from areal_tasks.store.spool import SpoolDamaged
from schemas.errors import UserError
from schemas.manifest import SpoolRecord, TableRef, WeightsRef
from schemas.record import Record

Cause = Literal["workflow", "mistake", "server", "servers", "verifiers"]


class LeaseOver(Exception):
    """The lease that was asked for is over."""


#: The HTTP status of each kind of error in a worker's answer; any other error is 500.
STATUSES: Final = ((LeaseOver, 410), (Unavailable, 503), (SpoolDamaged, 422), (StoreError, 424), (UserError, 400))


class Begin(Record):
    """The first order: generate groups with these settings, and forget earlier groups."""

    recipe: dict[str, Any]
    evaluates: bool = Field(description="groups of an evaluation: each is a held-out prompt, and is not spooled")
    folder: str = Field(description="the flow's working directory, in which users' code runs as well")
    prompts: TableRef
    order: int = Field(description="of the prompts; see `RunRecord.order`")
    made_with: str = Field(description="see `SpoolRecord.made_with`")
    code: dict[str, str] = Field(description="digests of the users' code that the groups are made with")
    model: WeightsRef = Field(description="the initial weights, stored with the model's configuration and tokenizer")
    end_tokens: tuple[int, ...] = Field(description="that end a completion")
    tokenizer: str = Field(description="the fast tokenizer as JSON; empty: it is read from the files of `model`")
    server_token: str = Field(description="for requests to the inference servers")
    server_authority: str = Field("", description="see `Access.authority`")
    patience_seconds: float | None = Field(description="wait while no server is healthy; None: `NO_SERVER_SECONDS`")
    serving: Serving


class Begun(Record):
    """The answer to the first order."""

    start: int | None = Field(description="in the spool, of the groups that follow; None: they are not spooled")


class Lease(Record):
    """A group to generate on servers that hold version `floor`, or a later one. No two leases have the same number.

    A `suspect` may crash the worker, which therefore first writes the finished groups that it holds to the store.
    """

    number: int
    index: int
    floor: int
    suspect: bool = False


class Orders(Record):
    """Leases to begin, and leases that are over, whatever the state of their groups."""

    begin: tuple[Lease, ...] = ()
    forget: tuple[int, ...] = ()


class OfGroup(Record):
    """An event of the group `index`, under the lease `number`."""

    number: int
    index: int


class Generated(OfGroup):
    """A group is generated; the verifiers judge it now."""

    kind: Literal["generated"] = "generated"


class Ended(OfGroup):
    """A group has ended. `verdicts`: if it was verified; `basis`: what they depend on, see `judging.basis`."""

    verdicts: tuple[VerifyResult, ...] = ()
    basis: str = ""


class Finished(Ended):
    """A group waits for its iteration. `version`: of its oldest token."""

    kind: Literal["finished"] = "finished"
    version: int


class Rejected(Ended):
    """A filter rejects a group."""

    kind: Literal["rejected"] = "rejected"
    reason: str


class Failed(OfGroup):
    """An attempt at a group failed; `cause`: its workflow, a user's mistake, one server, all of them, or verifiers."""

    kind: Literal["failed"] = "failed"
    reason: str
    cause: Cause


class Spooled(Record):
    """Groups were written to the store. Those of the leases `numbers` are no longer in the worker's memory.

    The record's other groups are still verified, and follow once they are finished.
    """

    kind: Literal["spooled"] = "spooled"
    numbers: tuple[int, ...]
    record: SpoolRecord


class Broken(Record):
    """Finished groups cannot be written."""

    kind: Literal["broken"] = "broken"
    reason: str


class Leaving(Record):
    """The worker's memory exceeds `rollout.worker_memory_mb`: it takes no further groups, and ends after these."""

    kind: Literal["leaving"] = "leaving"


class Down(Record):
    """An inference server has failed."""

    kind: Literal["down"] = "down"
    url: str
    reason: str


Event = Annotated[
    Generated | Finished | Rejected | Failed | Spooled | Broken | Leaving | Down, Field(discriminator="kind")
]


class Known(Record):
    """A request for news; `known`: how many events the flow has received."""

    known: int


class News(Record):
    """The events after the last one that the flow has received."""

    events: tuple[Event, ...]


class Busy(Record):
    """What a worker is at, besides its groups. `store`: what the store keeps it waiting for; empty: nothing."""

    requests: dict[str, int] = Field({}, description="in flight, by server address")
    store: str = ""


class Part(Record):
    """Groups that an iteration takes, to be written in order: from leases, and from records of the spool."""

    prefix: str
    label: str = Field(description="suffix of its shards' names; empty if it is the only part")
    numbers: tuple[int, ...]
    groups: tuple[int, ...] = ()
    records: tuple[SpoolRecord, ...] = Field((), description="that hold the rows of `groups`; each names these alone")


class Written(Record):
    """A part's tables, and their counts."""

    tables: dict[str, TableRef]
    samples: int
    tokens: int = Field(description="generated tokens")
    truncated: int = Field(description="samples that ended at the length limit")
