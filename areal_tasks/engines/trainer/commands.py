"""The bodies of the trainer's HTTP commands and of its answers. They name tables and weights; they hold no tensors."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from schemas.manifest import FileRef, TableRef, WeightsRef


class Message(BaseModel):
    """A command or an answer. Unknown keys are refused; numbers that are not finite are text in JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class Command(Message):
    """What every command carries: the number of the flow start that sends it, and the policy version it expects."""

    owner: int = Field(ge=0)
    version: int = Field(ge=0)

    def for_ranks(self) -> str:
        """The command as rank 0 passes it to the other ranks: without secrets, since their store asks for no token."""
        return self.model_dump_json()


class Load(Command):
    """Throw the policy away and load `weights`; with `checkpoint`, the optimizer and its progress as well."""

    weights: WeightsRef
    checkpoint: WeightsRef | None = None


class Train(Command):
    """Make version + 1 from the tables of one iteration."""

    digest: str = Field(description="key of the input: a repeat with the same version and digest never steps twice")
    kind: Literal["grpo", "sft"]
    iteration: int = Field(ge=0)
    recipe: dict[str, Any] | None = Field(
        None, description="in force in this iteration; none: the one that this trainer was started with"
    )
    tables: dict[str, TableRef] = Field(description="grpo: rollout, advantage and perhaps reference; sft: batch")
    plan: TableRef | None = Field(None, description="train_samples of the committed iteration, to repeat its batches")
    prefix: str | None = Field(None, description="where the tables go; none: it is retrained, and nothing is written")


class Logprobs(Command):
    """Log-probabilities of a rollout's completions under the policy or the frozen version 0."""

    which: Literal["policy", "reference"]
    table: TableRef
    prefix: str


class Write(Command):
    """Write the weights (/publish) or the whole training state (/checkpoint) below `prefix`."""

    prefix: str


class Keep(Command):
    """Copy the weights of that version, so that /publish and /send have them while the trainer trains on."""


class Kept(Message):
    """Answer to /keep: the version that is kept."""

    version: int


class Compare(Command):
    """Compare the policy, as it would be published, with weights of that version in the store."""

    weights: WeightsRef


class Receiver(Message):
    """An inference server that takes weights: its address and how many GPUs hold its model."""

    url: str
    ranks: int = Field(1, ge=1)


class Send(Command):
    """Hand the weights to servers (/send) without the store: as tensors on a GPU that they share, or by NCCL."""

    transport: Literal["tensor", "nccl"]
    receivers: tuple[Receiver, ...] = Field(min_length=1)
    token: str = Field("", repr=False, description="the servers' bearer token; rank 0 alone talks to them")
    keep_cache: bool = Field(False, description="requests under way stand still and go on with their caches")

    def for_ranks(self) -> str:
        return self.model_dump_json(exclude={"token"})


class Sent(Message):
    """Answer to /send: `gone` says why servers did not take the weights, by their addresses. All others hold them."""

    seconds: float
    gone: dict[str, str] = Field(default_factory=dict)


class Loaded(Message):
    """Answer to /load."""

    version: int
    step: int


class Trained(Message):
    """Answer to /train: the new version, the tables written and their summary."""

    version: int
    tables: dict[str, TableRef]
    metrics: dict[str, float]


class Tables(Message):
    """Answer to /logprobs."""

    tables: dict[str, TableRef]


class Written(Message):
    """Answer to /publish and /checkpoint."""

    files: tuple[FileRef, ...]
    seconds: float


class Compared(Message):
    """Answer to /compare: the largest difference between two weights; 0 where all of them are bitwise identical."""

    difference: float


class Health(Message):
    """Answer to /health. `version` is none before the first /load and after a failed step. `kept`: see /keep.

    `done` of `of` samples have been through the command that is running, or that ran last. `stored` counts what the
    store has answered, and `storing` says what it has not.
    """

    version: int | None
    step: int
    owner: int
    busy: bool
    kept: int | None = None
    done: int = 0
    of: int = 0
    stored: int = 0
    storing: str = ""

    @property
    def progress(self) -> tuple[int | None, ...]:
        """What changes while the trainer gets on with a command."""
        return self.version, self.step, self.done, self.of, self.stored

    def describe(self) -> str:
        """For people: where a command is."""
        asked = f"; its store has not answered: {self.storing}" if self.storing else ""
        return f"it answers: {self.done} of {self.of} samples done{asked}"
