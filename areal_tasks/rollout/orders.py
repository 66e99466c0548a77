"""What the flow and its rollout workers tell each other. The rows of groups go through the store, never here."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from areal_tasks.engines.sharing import Serving
from areal_tasks.rewards.pool import VerifyResult
from areal_tasks.store.backend import StoreError, Unavailable
from schemas.errors import UserError
from schemas.manifest import SpoolRecord, TableRef, WeightsRef

Cause = Literal["workflow", "mistake", "servers", "verifiers"]


class LeaseOver(Exception):
    """A lease is asked for that is over."""


#: What the status of a worker's answer says of an error; all else is 500.
STATUSES: Final = ((LeaseOver, 410), (Unavailable, 503), (StoreError, 424), (UserError, 400))


class Message(BaseModel):
    """JSON of this program's own."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class Begin(Message):
    """Generate groups of this kind, and forget all that was before."""

    recipe: dict[str, Any]
    folder: str = Field(description="in which the flow works, and users' code with it")
    prompts: TableRef
    order: int = Field(description="of the prompts; see `RunRecord.order`")
    made_with: str = Field(description="see `SpoolRecord.made_with`")
    model: WeightsRef = Field(
        description="the initial weights, which the model's configuration and tokenizer lie beside"
    )
    end_tokens: tuple[int, ...] = Field(description="that end a completion")
    tokenizer: str = Field(description="the fast tokenizer as JSON; empty: it has to be read from beside `model`")
    server_token: str = Field(description="what the inference servers ask for")
    patience_seconds: float | None = Field(description="how long to wait while no server is well; None: for ever")
    serving: Serving


class Lease(Message):
    """A group to generate on servers that hold version `floor`, or a later one. Each lease has a number of its own."""

    number: int
    index: int
    floor: int


class Orders(Message):
    """Groups to begin; and leases that are over, whatever has become of their groups."""

    begin: tuple[Lease, ...] = ()
    forget: tuple[int, ...] = ()


class Generated(Message):
    """The servers are done with a group, which is judged now."""

    kind: Literal["generated"] = "generated"
    number: int
    index: int


class Finished(Message):
    """A group waits in the worker's memory. `version` is that of its oldest token; `verdicts` where it was judged."""

    kind: Literal["finished"] = "finished"
    number: int
    index: int
    version: int
    verdicts: tuple[VerifyResult, ...] = ()


class Rejected(Message):
    """A filter rejects a group."""

    kind: Literal["rejected"] = "rejected"
    number: int
    index: int
    reason: str
    verdicts: tuple[VerifyResult, ...]


class Failed(Message):
    """An attempt at a group has failed; `cause`: its workflow, a mistake of the user's, failed servers or verifiers."""

    kind: Literal["failed"] = "failed"
    number: int
    index: int
    reason: str
    cause: Cause


class Spooled(Message):
    """The groups of these leases are in the store, and not in the worker's memory any more."""

    kind: Literal["spooled"] = "spooled"
    numbers: tuple[int, ...]
    record: SpoolRecord


class Broken(Message):
    """Finished groups cannot be written."""

    kind: Literal["broken"] = "broken"
    reason: str


class Down(Message):
    """A server has failed."""

    kind: Literal["down"] = "down"
    url: str
    reason: str


Event = Annotated[Generated | Finished | Rejected | Failed | Spooled | Broken | Down, Field(discriminator="kind")]


class News(Message):
    """What has happened since the last event that the flow knows."""

    events: tuple[Event, ...]


class Part(Message):
    """Groups that an iteration takes, to be written in order: leases, and groups of records."""

    prefix: str
    label: str = Field(description="what the names of its shards end in; empty where it is the only part")
    numbers: tuple[int, ...]
    groups: tuple[int, ...] = ()
    records: tuple[SpoolRecord, ...] = Field((), description="that hold the rows of `groups`, with these alone")


class Written(Message):
    """A part's tables, and what they count."""

    tables: dict[str, TableRef]
    samples: int
    tokens: int = Field(description="generated tokens")
    truncated: int = Field(description="samples that were cut off")
