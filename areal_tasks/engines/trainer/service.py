"""Runs the trainer's commands, on every rank of a trainer group; only rank 0 listens (see `process`)."""

from __future__ import annotations

import functools
import gc
import logging
import math
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import torch

from areal_tasks.engines.service import ServiceSpec
from areal_tasks.engines.trainer import commands
from areal_tasks.engines.trainer.alone import check_alone
from areal_tasks.engines.trainer.checkpoint import METADATA, Fetch, Progress, Saving
from areal_tasks.engines.trainer.fencing import Fence, StaleCommand
from areal_tasks.engines.trainer.forward import one_core
from areal_tasks.engines.trainer.fsdp2 import Fsdp2Backend
from areal_tasks.engines.trainer.group import Group
from areal_tasks.engines.trainer.learner import Learner, Work
from areal_tasks.engines.trainer.local import LocalBackend, ReplicatedBackend
from areal_tasks.engines.trainer.memory import names_memory_knobs
from areal_tasks.engines.trainer.plan import plan_and_batch, plan_and_texts
from areal_tasks.engines.trainer.ranks import end_group, gather
from areal_tasks.engines.trainer.rows import logprobs_table
from areal_tasks.engines.trainer.scoring import Part, read_part, score, score_part, scored_table
from areal_tasks.engines.trainer.settings import Settings, read_settings
from areal_tasks.engines.trainer.snapshot import Snapshot, largest_difference, read_description
from areal_tasks.engines.trainer.tables import SharedTables
from areal_tasks.engines.trainer.transport import Sender, handles_of
from areal_tasks.engines.trainer.writing import CheckpointWriter
from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.in_flight import LEDGER
from areal_tasks.store.objects.files import common_folder, materialise, read_weights
from areal_tasks.store.shards import write_table
from areal_tasks.temporary import OwnedFolder
from schemas.errors import UserError, listed
from schemas.manifest import TableRef, WeightsRef
from schemas.record import Record

log = logging.getLogger(__name__)


def make_backend(settings: Settings) -> LocalBackend:
    """The backend that the recipe names, as a rank of the process group. UserError: DeepSpeed is not installed."""
    plain = {"local": LocalBackend, "fsdp2": Fsdp2Backend, "deepspeed": ReplicatedBackend}
    if settings.trainer.backend != "deepspeed" or settings.trainer.zero_stage == 0:
        return plain[settings.trainer.backend](settings.trainer, settings.model)
    try:  # it is optional, and imported only if a recipe names it
        from areal_tasks.engines.trainer.deepspeed_backend import DeepSpeedBackend
    except ModuleNotFoundError as error:
        raise UserError(f"trainer.backend: deepspeed needs {error.name}; pip install 'arealflow[deepspeed]'") from error
    return DeepSpeedBackend(settings.trainer, settings.model)


@dataclass
class Change:
    """The result of one /train, kept for retries. `written` is empty until the tables are."""

    metrics: dict[str, float]
    tables: dict[str, pa.Table]
    written: dict[str, TableRef]


class Trainer:
    """The state that commands act on. Not thread-safe: `process` runs one command at a time (see `commands.KEPT`)."""

    def __init__(self, spec: ServiceSpec, group: Group | None = None) -> None:
        self.group = group or Group()
        self.store: Store = open_store(spec.store_url)
        self.settings: Settings = read_settings(spec.recipe)
        self.backend = make_backend(self.settings)
        self.fence: Fence[Change] = Fence()
        self.fence.admit(spec.owner)
        self.progress = Progress()
        self.work = Work()
        self._scratch = OwnedFolder("trainer")
        own = Path(self._scratch.name)
        self.tables = SharedTables(self.group, own / "tables")
        self.fetched = own / "weights"  # on the first rank of each machine, for all there
        self.description: dict[str, bytes] = {}  # on rank 0: of model and tokenizer, published with new weights
        self.initial = spec.weights
        self.compared = False  # with transformers, since weights were loaded
        self.snapshot = Snapshot()
        self.writer = CheckpointWriter(self.store, self.group)
        self.sending = spec.sending
        self.handles: list[str] = []  # of the snapshots of all ranks, if any of them is `sending`
        self.sender = Sender(functools.partial(end_group, self.group), address=spec.address)

    def run(self, command: commands.Command) -> Record:
        """Run the command, by the method of its name, unless a later owner has superseded the command's."""
        self.fence.admit(command.owner)
        with names_memory_knobs():
            answer: Record = getattr(self, command.name)(command)
            return answer

    def load(self, command: commands.Load) -> commands.Done:
        """Replace policy and optimizer. Without a checkpoint the optimizer is new, at the step the version implies."""
        source = command.checkpoint or command.weights
        if source.version != command.version:
            raise StaleCommand(
                f"version {command.version} was asked for, but {source.path} holds version {source.version}"
            )
        weights = self._fetch(command.weights)
        dtype, is_first = self.backend.dtype, self.group.rank == 0
        self.description = self.group.together(lambda: read_description(weights, dtype) if is_first else {})
        saved = self._saved(command.checkpoint) if command.checkpoint else None
        self.fence.restart(None)
        with self.snapshot.lock:
            self.snapshot.version = None  # the policy that is loaded may have the same version number
        self.backend.load(weights, self.settings.seed)
        fresh = Progress(step=command.version * self.settings.minibatches)
        self.progress = self.backend.load_checkpoint(*saved) if saved else fresh
        self.work, self.compared = Work(), False
        self.initial = command.weights if command.weights.version == 0 else self.initial
        self.fence.restart(command.version)
        return commands.Done()

    def train(self, command: commands.Train) -> commands.Trained:
        """Train the next version, or recall the result in a retry; write the tables unless this is a retrain."""
        done = self.fence.recall(command.version, command.digest)
        if done is None:
            self.fence.expect(command.version)
            with one_core(self.backend.device, self.settings.trainer):
                learner, part = self._learner(command)
                work = functools.partial(self._learn, learner, part, command.version)
                done = self.fence.change(command.version, command.digest, work)
            if self.backend.copies_early:
                self.writer.prepare(self._plan_checkpoint)
        if command.prefix is not None and not done.written and self.group.rank == 0:
            of = done.tables
            done.written = {name: write_table(self.store, command.prefix, name, of[name]) for name in of}
        return commands.Trained(version=command.version + 1, tables=done.written, metrics=done.metrics)

    def logprobs(self, command: commands.Logprobs) -> commands.Tables:
        """Score a rollout under the policy of that version (table `proximal`) or version 0 (table `reference`)."""
        if command.which == "policy":
            self.fence.expect(command.version)
        elif "reference" not in self.backend.models:
            if self.initial is None:
                raise UserError("the trainer does not know where version 0 is: name it in the service's `weights`")
            self.backend.load_reference(self._fetch(self.initial))
        name = "proximal" if command.which == "policy" else "reference"
        tables = self.tables.fetch(self.store, {"rollout": command.table}, keeps=True)
        plan, batch = plan_and_texts(tables, self.settings)
        with one_core(self.backend.device, self.settings.trainer):
            self.work = Work(len(batch.lengths))
            layout, temperature = self.settings.trainer.layout, self.settings.temperature
            whole = score(self.backend, command.which, temperature, batch.sequences, plan, layout, self.work)
            self._make_room()
        if whole is None:
            return commands.Tables(tables={})
        scored = logprobs_table(name, batch.ids, batch.lengths, whole)
        return commands.Tables(tables={name: write_table(self.store, command.prefix, name, scored)})

    def keep(self, command: commands.Keep) -> commands.Done:
        """Copy the weights, to be published or sent while later commands run."""
        with self._kept(command):
            return commands.Done()

    def publish(self, command: commands.Publish) -> commands.Written:
        """Write the weights as a Hugging Face folder, with the tokenizer they were loaded with."""
        with self._kept(command) as snapshot:
            if self.group.rank > 0:
                return commands.Written(files=())
            return commands.Written(files=snapshot.save(self.store, command.prefix, self.description))

    def send(self, command: commands.Send) -> commands.Sent:
        """Send the weights to inference servers directly; returns when all servers that did not fail hold them."""
        started = time.perf_counter()
        with self._kept(command) as snapshot:
            gathered = time.perf_counter()
            gone = self.sender.send(snapshot.tensors, command, self.handles) if self.backend.rank == 0 else {}
        ended = time.perf_counter()
        log.info(
            "weights %d: gathered in %.3f s, sent in %.3f s", command.version, gathered - started, ended - gathered
        )
        return commands.Sent(gone=gone)

    def checkpoint(self, command: commands.Checkpoint) -> commands.Done:
        """Copy the whole training state, and begin to write it. Nothing is visible until the caller commits it."""
        self.fence.expect(command.version)
        self.writer.begin(command.prefix, self._plan_checkpoint)
        return commands.Done()

    def finish(self, command: commands.Finish) -> commands.Finished:
        """The files of the checkpoint that was begun last, once all ranks have written theirs."""
        return commands.Finished(files=self.writer.finish(command.prefix, command.wait))

    def compare(self, command: commands.Compare) -> commands.Compared:
        """Compare the policy, as it would be published, with weights of that version in the store."""
        self.fence.expect(command.version)
        folder = self._fetch(command.weights)
        with self._kept(command) as snapshot:
            apart = largest_difference(snapshot.host(), folder) if self.group.rank == 0 else 0.0
        return commands.Compared(difference=apart)

    def clear(self) -> None:
        """Delete what a command has fetched from the store, once all ranks have ended the command.

        Not a rollout that was scored, which the next command may train on. What cannot be deleted now is deleted
        after the next command; the one that has ended does not fail for it.
        """
        self.tables.clear()
        shutil.rmtree(self.fetched, ignore_errors=True)

    def state(self) -> str:
        """What all ranks must agree on after a command."""
        return f"version {self.fence.version}, step {self.progress.step}, owner {self.fence.owner}"

    def health(self, busy: bool) -> commands.Health:
        """The trainer's state. Safe while a command runs."""
        asked = LEDGER.in_flight()
        return commands.Health(
            version=self.fence.version,
            step=self.progress.step,
            owner=self.fence.owner,
            busy=busy,
            kept=self.snapshot.version,
            done=self.work.done,
            of=self.work.of,
            stored=LEDGER.ended,
            storing=asked[0].describe() if asked else "",
        )

    def _learner(self, command: commands.Train) -> tuple[Learner, Part | None]:
        """Read and check the input, and the part to score: all that can fail without changing the state."""
        if command.kind != self.settings.kind:
            raise UserError(f"this trainer was started for {self.settings.kind}, not for {command.kind}")
        settings = self.settings if command.recipe is None else read_settings(command.recipe)
        plans = {} if command.plan is None else {"train_samples": command.plan}
        tables = self.tables.fetch(self.store, {**command.tables, **plans}, keeps=False)
        plan, batch = plan_and_batch(command, settings, tables)
        if plans:
            settings = replace(settings, max_logprob_gap=math.inf)  # it passed the threshold of its time
        if settings.kind == "sft" and not self.compared:
            check_alone(self.backend, batch, settings.trainer)
            self.compared = True
        learner = Learner(self.backend, settings, batch, plan, command.same_attempt)
        if learner.comparable or command.prefix is None or settings.max_lag is None:
            return learner, None
        return learner, read_part(tables, settings.model.max_length - 1)

    def _learn(self, learner: Learner, part: Part | None, version: int) -> Change:
        self.work = learner.work
        learned = learner.learn(version, self.progress)
        self.progress = learned.progress
        tables = {"train_steps": learned.train_steps, "train_samples": learned.train_samples}
        if learner.settings.max_lag is not None:
            scores = None
            if part is not None:
                self.work = Work(len(part.input_ids))
                scores = score_part(self.backend, part, learner.settings.trainer, self.work)
            tables["scored"] = scored_table(part, version + 1, scores)
        self._make_room()
        return Change(learned.metrics, tables, {})

    def _plan_checkpoint(self, folder: Path) -> Saving:
        return self.backend.plan_checkpoint(folder, self.progress)

    def _make_room(self) -> None:
        """Release the GPU memory that torch caches, for servers on that GPU."""
        if self.settings.makes_room:
            gc.collect()
            torch.cuda.empty_cache()

    @contextmanager
    def _kept(self, command: commands.Command) -> Iterator[Snapshot]:
        """The full weights of the command's version, locked inside the context.

        They are gathered once per version, by all ranks. The first rank keeps them, and those whose GPU servers share.
        """
        if self.snapshot.version != command.version:
            self.fence.expect(command.version)
            held, shares = self.backend.named_weights(), self.backend.rank in self.sending
            keep = shares or self.backend.rank == 0
            with self.snapshot.lock:
                self.group.together(lambda: None)  # no server reads those of another rank while the first has the lock
                named = self.backend.master.names.to_checkpoint(held) if keep else held
                self.snapshot.take(command.version, named, keep)
                if self.sending:
                    self.handles = gather(handles_of(self.snapshot.tensors) if shares else "")
        with self.snapshot.lock:
            yield self.snapshot

    def _saved(self, ref: WeightsRef) -> tuple[Path, Fetch]:
        """A checkpoint's folder, where its index is, and how to get the files that the ranks of this machine read."""

        def fetch(names: Collection[str]) -> None:
            first = self.group.first_here
            self._fetch(ref, set().union(*gather(set(names))[first : first + self.group.ranks_here]))

        return self._fetch(ref, {METADATA}), fetch

    def _fetch(self, ref: WeightsRef, names: Collection[str] | None = None) -> Path:
        """The files of `ref`, or those named, in a local folder; each machine's first rank fetches them for all."""
        return Path(self.group.from_first_here(lambda: str(self._materialise(ref, names))))

    def _materialise(self, ref: WeightsRef, names: Collection[str] | None) -> Path:
        into = self.fetched / f"{ref.digest[:16]}-{ref.version}"
        into.mkdir(parents=True, exist_ok=True)
        files = read_weights(self.store, ref).files
        named = {file.path.removeprefix(f"{common_folder(files)}/"): file for file in files}
        if lacking := set(names or ()) - named.keys():
            raise UserError(f"{self.store.uri(ref.path)} does not name files that are needed: {listed(lacking)}")
        wanted = files if names is None else [named[name] for name in names]
        return materialise(self.store, wanted, into, verify=True)
