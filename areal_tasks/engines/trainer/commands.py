"""Request and response bodies of the trainer's HTTP commands: they refer to tables and weights, without tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import Field

from schemas.manifest import FileRef, TableRef, WeightsRef
from schemas.record import Record


class Command(Record):
    """Fields of every command: `owner`, the number of the flow start, and the policy version it expects."""

    owner: int = Field(ge=0)
    version: int = Field(ge=0)

    @property
    def name(self) -> str:
        """The command's HTTP path, and the name of the method of `Trainer` that runs it."""
        return type(self).__name__.lower()


class Load(Command):
    """Replace the policy by `weights`; with `checkpoint`, restore the optimizer and the progress as well."""

    weights: WeightsRef
    checkpoint: WeightsRef | None = None


class Train(Command):
    """Make version + 1 from the tables of one iteration."""

    digest: str = Field(description="key of the input: a retry with the same version and digest makes no second step")
    kind: Literal["grpo", "sft"]
    iteration: int = Field(ge=0)
    recipe: dict[str, Any] | None = None  # of this iteration; None: the one that the trainer was started with
    tables: dict[str, TableRef] = Field(description="grpo: rollout, advantage and perhaps reference; sft: batch")
    plan: TableRef | None = Field(None, description="train_samples of the committed iteration, to repeat its batches")
    prefix: str | None = Field(None, description="where the tables are written; none: a retrain, which writes nothing")
    same_attempt: bool = True  # whether servers sampled tokens of this version with the weights that the trainer holds


class Logprobs(Command):
    """Log-probabilities of a rollout's completions under the policy or the frozen version 0."""

    which: Literal["policy", "reference"]
    table: TableRef
    prefix: str


class Publish(Command):
    """Write the weights below `prefix`."""

    prefix: str


class Checkpoint(Command):
    """Copy the whole training state, and begin to write the copy below `prefix`; later commands change the state."""

    prefix: str


class Finish(Command):
    """Finish the checkpoint below `prefix`, if it is written by now; with `wait`, wait for that."""

    prefix: str
    wait: bool = False


class Keep(Command):
    """Copy the weights of that version, for /publish and /send while training continues."""


class Done(Record):
    """Answer to /load, /keep and /checkpoint."""


class Compare(Command):
    """Compare the policy, as it would be published, with weights of that version in the store."""

    weights: WeightsRef


class Receiver(Record):
    """An inference server that receives weights: its address and how many GPUs hold its model."""

    url: str
    ranks: int = Field(1, ge=1)
    trainer_rank: int = Field(0, ge=0, description="tensor: the rank of the trainer on its GPU")


class Send(Command):
    """Send the weights to servers without the store: as tensors on a shared GPU, or by NCCL."""

    transport: Literal["tensor", "nccl"]
    receivers: tuple[Receiver, ...] = Field(min_length=1)
    leaving: tuple[Receiver, ...] = Field((), description="servers that get no weights now and leave the group")
    token: str = Field("", repr=False, description="the servers' bearer token; only rank 0 uses it")
    authority: str = Field("", description="see `Access.authority`")
    keep_cache: bool = Field(False, description="requests in flight are paused and keep their KV caches")


class Sent(Record):
    """Answer to /send: `gone` maps the address of each failed server to the reason. All others hold the weights."""

    gone: dict[str, str] = Field(default_factory=dict)


class Trained(Record):
    """Answer to /train: the new version, the tables written and their summary."""

    version: int
    tables: dict[str, TableRef]
    metrics: dict[str, float]


class Tables(Record):
    """Answer to /logprobs."""

    tables: dict[str, TableRef]


class Written(Record):
    """Answer to /publish."""

    files: tuple[FileRef, ...]


class Finished(Record):
    """Answer to /finish: the files of the checkpoint; none while they are being written."""

    files: tuple[FileRef, ...] | None


class Compared(Record):
    """Answer to /compare: the largest difference of a weight; 0 if all weights are bitwise identical."""

    difference: float


class Health(Record):
    """Answer to /health. `version` is none before the first /load and after a failed step. `kept`: see /keep.

    The running command, or the last one, has processed `done` of `of` samples. `stored` counts the store's answers;
    `storing` describes the request that the store has not answered.
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


#: The type of each command, by its name.
COMMANDS: Final[Mapping[str, type[Command]]] = {
    kind.__name__.lower(): kind for kind in (Load, Train, Logprobs, Keep, Publish, Send, Checkpoint, Finish, Compare)
}
#: Those that rank 0 runs alone, concurrently with others, if the trainer keeps the weights of their version.
KEPT: Final = frozenset({"publish", "send"})
