"""The engines of one run: inference servers, trainers by role, verifiers, and their supervisor and watchdog."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from areal_tasks.engines.ends import Detokenizer, Ends, end_tokens
from areal_tasks.engines.handover import choose_transport
from areal_tasks.engines.models import describing_files, load_tokenizer
from areal_tasks.engines.servers import Servers
from areal_tasks.engines.starting import TRAINER, Services, may_load_early, place_services
from areal_tasks.engines.trainers import ResidentTrainer
from areal_tasks.engines.watchdog import Heartbeat, Watchdog
from areal_tasks.launchers.gpus import assigned
from areal_tasks.launchers.supervisor import Supervisor
from areal_tasks.rewards.pool import VerifierPool
from areal_tasks.store.history.journal import append
from areal_tasks.store.parallel import in_background
from areal_tasks.store.runs import Run
from schemas.manifest import WeightsRef
from schemas.recipe.recipe import Recipe, RlhfRecipe, SftRecipe

log = logging.getLogger(__name__)

ACTOR: Final = "actor"  # the role of the trainer whose policy generates


class Engines:
    """All resident processes: trainers, inference servers, verifiers. Use as a context: leaving it stops them."""

    def __init__(self, run: Run, recipe: Recipe, logs: Path, *, generates: bool = True) -> None:
        self.run = run
        self.recipe = recipe
        self.initial: WeightsRef | None = None
        self.supervisor = Supervisor(run.store, recipe.launcher, logs)
        self.watchdog = Watchdog(recipe.launcher, self.supervisor.end_hung)
        actor = ResidentTrainer(
            run, TRAINER, self.supervisor, self.watchdog, self._initial, lambda: self.servers.make_room()
        )
        self.trainers = {ACTOR: actor}
        self.servers = Servers(run, recipe, generates, self.supervisor, self.watchdog, actor, lambda: self.ends)
        self._verifiers: VerifierPool | None = None
        self._scratch = TemporaryDirectory(prefix="arealflow-flow-")

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *error: object) -> None:
        self.watchdog.close()
        with ExitStack() as stack:  # in reverse order, each even if another raises
            stack.callback(self._scratch.cleanup)
            stack.callback(self.servers.closed)
            stack.callback(self.supervisor.__exit__, *error)
            if self._verifiers is not None:
                stack.callback(self._verifiers.close)
            for trainer in self.trainers.values():
                stack.callback(trainer.close)
            self.servers.close()

    @property
    def actor(self) -> ResidentTrainer:
        """The trainer of the policy that generates."""
        return self.trainers[ACTOR]

    def begin(self) -> None:
        """Start what needs no weights in the store: trainer, verifiers, possibly servers. Does not wait for them."""
        servers = self.servers
        serverless = bool(servers.external) or not servers.generates  # this run assigns no GPU to servers
        placement = servers.placement = place_services(self.recipe, serverless)
        if (gpus := assigned(placement)) or serverless:  # else the recipe says that there are none
            append(self.run.store, self.run.name, "placed", {"owner": self.run.owner, **gpus})
        if servers.generates:
            servers.transport = choose_transport(self.recipe, placement, serverless)
        if servers.store_only and isinstance(self.recipe, RlhfRecipe) and self.recipe.trainer.weights_every > 1:
            log.info("servers get new weights through the store here: all are written, despite trainer.weights_every")
        workers = servers.workers.names
        self._services = Services(self.supervisor, self.run, self.recipe, servers.names, workers, placement)
        self._services.start_early()
        if not isinstance(self.recipe, SftRecipe):
            in_background(self.verifiers.__enter__, "verifiers")  # their first use raises an error

    def start(self, initial: WeightsRef, current: WeightsRef, written: WeightsRef) -> None:
        """Start the servers that `begin` has not started, on `written`. Does not wait for them.

        `current` are the weights to generate with, and `written` the newest in the store at or before them.
        """
        self.initial, self.servers.serving, self.servers.written = initial, current, written
        self._services.start_servers(written)

    def load_early(self, version: int) -> None:
        """Have the trainer load `version` while servers start, if that is possible. Does not wait for it."""
        if may_load_early(self.recipe):
            in_background(lambda: self.actor.at(version), "early-load")  # an error recurs at the first use

    @property
    def verifiers(self) -> VerifierPool:
        """The verifier processes, started at their first use."""
        if self._verifiers is None:
            assert not isinstance(self.recipe, SftRecipe)
            self._verifiers = VerifierPool(self.recipe.reward)
        return self._verifiers

    def judging(self, samples: int) -> AbstractContextManager[None]:
        """While inside, the watchdog sees the run wait for the verifiers' verdicts on so many samples."""
        pool = self.verifiers

        def look() -> dict[str, Heartbeat]:
            return {"the verifiers": Heartbeat(pool.judged, f"{pool.judged} of {samples} judged")}

        return self.watchdog.waiting("verdicts", look, limit="reward.wall_seconds for each")

    @cached_property
    def _model_folder(self) -> Path:
        """A local folder with the files of the initial model, except its weights."""
        return describing_files(self.run.store, self._initial(), Path(self._scratch.name) / "model")

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the initial weights."""
        return load_tokenizer(self._model_folder)

    @cached_property
    def ends(self) -> Ends:
        """What ends completions, according to the configuration and the tokenizer of the initial weights."""
        folder = self._model_folder
        exists = (folder / "generation_config.json").is_file()
        generation = GenerationConfig.from_pretrained(folder) if exists else None
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        return Ends(end_tokens(config, generation, self.tokenizer), Detokenizer(self.tokenizer))

    def _initial(self) -> WeightsRef:
        assert self.initial is not None, "start() comes first"
        return self.initial
