"""The engines of one run: inference servers, trainers, verifiers, and their supervisor and watchdog."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from areal_tasks.code_digests import code_digests
from areal_tasks.engines.ends import Detokenizer, Ends, end_tokens
from areal_tasks.engines.handover import choose_transport, sending_ranks
from areal_tasks.engines.models import describing_files, load_tokenizer
from areal_tasks.engines.servers import Servers
from areal_tasks.engines.service import ModelFolder, ServiceSpec, part_name, spec_of
from areal_tasks.engines.starting import (
    ACTOR,
    MODULES,
    ROLES,
    TRAINER,
    Role,
    may_load_early,
    startable_folder,
    trainer_names,
)
from areal_tasks.engines.trainers import ResidentTrainer
from areal_tasks.engines.watchdog import Heartbeat, Watchdog
from areal_tasks.launchers.choice import WORKER, on_this_machine
from areal_tasks.launchers.cluster import Resources
from areal_tasks.launchers.gpus import Placement, assigned, check_joins, describe, place_recipe, visible_gpus
from areal_tasks.launchers.placement import server_needs, trainer_needs, worker_needs
from areal_tasks.launchers.supervisor import Supervisor
from areal_tasks.rewards.pool import VerifierPool
from areal_tasks.store.history.journal import append_log
from areal_tasks.store.parallel import in_background
from areal_tasks.store.runs import Run
from areal_tasks.temporary import OwnedFolder
from schemas.errors import UserError
from schemas.manifest import WeightsRef
from schemas.recipe.recipe import EvaluateRecipe, Recipe, RlhfRecipe, SftRecipe

log = logging.getLogger(__name__)


SUPERVISE_SECONDS: Final = 1.0  # between two polls of trainers and workers while the flow does something else


class Engines:
    """All resident processes: trainers, inference servers, verifiers. Use as a context: leaving it stops them."""

    def __init__(self, run: Run, recipe: Recipe, logs: Path, *, generates: bool = True) -> None:
        self.run = run
        self.recipe = recipe
        self.code = code_digests(recipe.model_dump(mode="json"))  # of the users' code, as this start begins with it
        self.initial: WeightsRef | None = None
        self.supervisor = Supervisor(run.store, recipe.launcher, logs)
        self.watchdog = Watchdog(recipe.launcher, self.supervisor.end_hung)
        common = self.supervisor, self.watchdog, self._initial, lambda loaded: self.servers.make_room(loaded)
        self.trainers = {role: ResidentTrainer(run, trainer_names(recipe, role), *common) for role in ROLES}
        self.servers: Servers = Servers(
            run, recipe, generates, self.supervisor, self.watchdog, self.actor, lambda: self.ends
        )
        self._verifiers = None if isinstance(recipe, SftRecipe) else VerifierPool(recipe.reward, self.code)
        self._scratch = OwnedFolder("flow")
        self._closed = threading.Event()

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
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

    def run_has_changed(self, run: Run) -> None:
        """Use `run`, whose recipes of coming iterations have changed."""
        self.run = self.servers.run = run
        for trainer in self.trainers.values():
            trainer.run = run

    def adapt(self, recipe: Recipe) -> None:
        """Change to this recipe, which may differ from the one before in live fields only."""
        if recipe == self.recipe:
            return
        resizes, self.recipe = self.resizes(recipe), recipe
        self.supervisor.settings = self.watchdog.settings = recipe.launcher
        if not self.supervisor.services:  # nothing has started
            self.servers.recipe = self.servers.workers.recipe = self.servers.evaluators.recipe = recipe
            for role, trainer in self.trainers.items():
                trainer.names = trainer_names(recipe, role)
            return
        placement = self._placement(recipe)
        if placement != self.servers.placement:
            self._log_placement(placement)
        join = self.supervisor.join
        self.servers.adapt(recipe, placement, lambda: self._start_servers(join, weights=self.servers.written))
        for workers in self.servers.all_workers:
            workers.adapt(recipe, lambda name: join(*self._worker(name)))
        if resizes:
            for role, trainer in self.trainers.items():
                log.info("the %s is started again as %d ranks", role, recipe.trainer.ranks)  # type: ignore[union-attr]
                trainer.replace(trainer_names(recipe, role), partial(self._start_trainer, role, join))

    def resizes(self, recipe: Recipe) -> bool:
        """Whether the trainers have another number of ranks or machines with this recipe."""
        if isinstance(recipe, EvaluateRecipe) or isinstance(self.recipe, EvaluateRecipe):
            return False
        before, after = self.recipe.trainer, recipe.trainer
        return (before.ranks, before.nodes) != (after.ranks, after.nodes)

    def check(self, recipe: Recipe) -> None:
        """UserError unless the services that run can change as this recipe wants them to."""
        if not self.supervisor.services or isinstance(recipe, SftRecipe):
            return
        servers, placement = self.servers, self._placement(recipe)
        if servers.external and recipe.inference.servers != self.recipe.inference.servers:  # type: ignore[union-attr]
            raise UserError("inference.servers: the run uses external servers")
        check_joins(servers.placement, placement)
        if servers.generates and choose_transport(recipe, placement, bool(servers.external)) != servers.transport:
            raise UserError("inference.servers: new weights would have to reach them in another way")

    def _placement(self, recipe: Recipe) -> Placement:
        """The GPUs of this machine that the recipe's services use."""
        gpus = visible_gpus() if on_this_machine(recipe.launcher) else ()
        return place_recipe(recipe, gpus, not self.servers.names)

    def begin(self) -> None:
        """Start what needs no weights in the store: servers only if they can read a model's folder. Does not wait."""
        servers = self.servers
        placement = servers.placement = self._placement(self.recipe)
        if assigned(placement) or not servers.names:  # else the recipe says that there are none
            self._log_placement(placement)
        if servers.generates:
            servers.transport = choose_transport(self.recipe, placement, bool(servers.external))
        if servers.store_only and isinstance(self.recipe, RlhfRecipe) and self.recipe.trainer.weights_every > 1:
            log.info("servers get new weights through the store here: all are written, despite trainer.weights_every")
        if not isinstance(self.recipe, EvaluateRecipe):
            for role in self.trainers:
                self._start_trainer(role, self.supervisor.start)
        for name in servers.workers.names:
            self.supervisor.start(*self._worker(name))
        if (folder := startable_folder(self.run, self.recipe)) is not None:
            self._start_servers(self.supervisor.start, folder=folder)
        in_background(self._supervise, "supervise")
        if not isinstance(self.recipe, SftRecipe):
            in_background(self.verifiers.__enter__, "verifiers")  # their first use raises an error

    def _supervise(self) -> None:
        """Restart trainers and rollout workers when they end, whatever the flow does. Errors recur at their next use.

        If one machine of a trainer is lost, this also ends its services on the others, and thereby their command.
        """
        while not self._closed.wait(SUPERVISE_SECONDS):
            for trainer in self.trainers.values():
                with suppress(Exception):
                    self.supervisor.poll([name for name in trainer.names if name in self.supervisor.services])
            for workers in self.servers.all_workers:
                with suppress(Exception):
                    workers.supervise()

    def _log_placement(self, placement: Placement) -> None:
        if described := describe(placement):
            log.info("%s", described)
        append_log(self.run.store, self.run.name, "placed", {"owner": self.run.owner, **assigned(placement)})

    def start(self, initial: WeightsRef, current: WeightsRef, written: WeightsRef) -> None:
        """Start the servers that `begin` has not started, on `written`, and the worker that evaluates. Does not wait.

        `current` are the weights to generate with; `written` are the newest in the store that are not newer than these.
        """
        self.initial, self.servers.serving, self.servers.written = initial, current, written
        for name in self.servers.names:
            if name in self.supervisor.services:
                self.supervisor.began_on(name, written)
        self._start_servers(self.supervisor.start, weights=written)
        for name in self.servers.evaluators.names:  # last: where room is scarce, training comes first
            self.supervisor.start(*self._worker(name))

    def _start_trainer(self, role: Role, start: Callable[..., None]) -> None:
        """Start a trainer's services; `start` is the supervisor's method `start` or `join`."""
        assert not isinstance(self.recipe, EvaluateRecipe)
        sending = sending_ranks(self.servers.transport, self.servers.placement) if role == ACTOR else ()
        placed: dict[str, Any] = {"gpus": self.servers.placement.trainer, "sending": sending}
        for node, name in enumerate(self.trainers[role].names):
            spec = spec_of(self.run, self.recipe, name, node=node, **placed)
            settings, needs = self.recipe.trainer, trainer_needs(self.recipe)
            start(MODULES[TRAINER], spec, settings.threads, needs, group=role)

    def _start_servers(self, start: Callable[..., None], **starts_on: WeightsRef | ModelFolder | None) -> None:
        """Start the servers that do not run; `start` is the supervisor's method `start` or `join`."""
        recipe, placement = self.recipe, self.servers.placement
        for i, server in enumerate(self.servers.names):
            assert not isinstance(recipe, SftRecipe), "there are servers"
            if server in self.supervisor.services:
                continue
            placed: dict[str, Any] = {"gpu_users": placement.users(i), **starts_on}
            for node, gpus in enumerate(placement.parts(i)):
                spec = spec_of(self.run, recipe, part_name(server, node), node=node, gpus=gpus, **placed)
                settings, needs = recipe.inference, server_needs(recipe)
                start(MODULES[settings.engine], spec, settings.threads, needs, group=server)

    def _worker(self, name: str) -> tuple[str, ServiceSpec, int, Resources]:
        """The arguments with which the supervisor starts a rollout worker."""
        return WORKER, spec_of(self.run, self.recipe, name), 1, worker_needs(self.recipe)

    def load_early(self, version: int) -> None:
        """Have the trainers load `version` while servers start, if that is possible. Does not wait for it."""
        if may_load_early(self.recipe):
            for trainer in self.trainers.values():
                in_background(partial(trainer.at, version), "early-load")  # an error recurs at the first use

    @property
    def verifiers(self) -> VerifierPool:
        """The verifier processes, started at their first use."""
        assert self._verifiers is not None, "the recipe has a reward"
        return self._verifiers

    def judging(self, samples: int) -> AbstractContextManager[None]:
        """While inside, the watchdog watches the verifiers, which judge so many samples."""
        pool = self.verifiers

        def poll() -> dict[str, Heartbeat]:
            return {"the verifiers": Heartbeat(pool.judged, f"{pool.judged} of {samples} judged")}

        return self.watchdog.waiting("verdicts", poll, limit="reward.wall_seconds for each")

    @cached_property
    def model_folder(self) -> Path:
        """A local folder with the files of the initial model, except its weights."""
        return describing_files(self.run.store, self._initial(), Path(self._scratch.name) / "model")

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the initial weights."""
        return load_tokenizer(self.model_folder)

    @cached_property
    def ends(self) -> Ends:
        """The end tokens and the detokenizer, by the configuration and the tokenizer of the initial weights."""
        folder = self.model_folder
        exists = (folder / "generation_config.json").is_file()
        generation = GenerationConfig.from_pretrained(folder) if exists else None
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        return Ends(end_tokens(config, generation, self.tokenizer), Detokenizer(self.tokenizer))

    def _initial(self) -> WeightsRef:
        assert self.initial is not None, "start() comes first"
        return self.initial
