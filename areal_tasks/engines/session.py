"""The engines of one run: starts the services, keeps the trainer at the version that is asked for, and the servers fed.

Engines hold state that only the store can vouch for. So nothing here trusts an engine's memory: each use names the
version it expects, and an engine that is new, or that has lost it, is brought there from the last checkpoint by
re-training the committed iterations after it from their tables (DESIGN §8). The servers' part is in `servers`.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from areal_tasks.engines.ends import Detokenizer, Ends, end_tokens
from areal_tasks.engines.handover import choose_transport
from areal_tasks.engines.models import load_tokenizer
from areal_tasks.engines.recovery import Replayed, replay_stage, restore, worst
from areal_tasks.engines.servers import Servers
from areal_tasks.engines.starting import TRAINER, Early, Services, may_load_early, place_services
from areal_tasks.engines.trainer_client import TrainerClient
from areal_tasks.engines.watchdog import Sign
from areal_tasks.launchers.gpus import Placement, assigned
from areal_tasks.rewards.pool import VerifierPool
from areal_tasks.store.files import materialise, read_weights
from areal_tasks.store.journal import append
from areal_tasks.store.parallel import in_background
from areal_tasks.store.runs import Run
from schemas.manifest import StageManifest, WeightsRef
from schemas.recipe.recipe import Recipe, RlhfRecipe, SftRecipe

log = logging.getLogger(__name__)


class Engines(Servers):
    """Everything resident: trainer, inference servers, verifiers. Use as a context: leaving it stops all of them."""

    def __init__(self, run: Run, recipe: Recipe, logs: Path, *, generates: bool = True) -> None:
        super().__init__(run, recipe, logs, generates)
        self.placement = Placement()
        self.initial: WeightsRef | None = None
        self._early_load = Early("early-load")
        self._replayed: list[Replayed] = []
        self._verifiers: VerifierPool | None = None
        self._trainer_address = ""
        self._scratch = TemporaryDirectory(prefix="arealflow-flow-")

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *error: object) -> None:
        self.watchdog.close()
        with ExitStack() as stack:  # each of them, whatever another raises; the last one first
            stack.callback(self._scratch.cleanup)
            stack.callback(self._fetched.close)
            stack.callback(self._loop.stop)
            stack.callback(self.supervisor.__exit__, *error)
            if self._verifiers is not None:
                stack.callback(self._verifiers.close)
            if self._trainer is not None:
                stack.callback(self._trainer.close)
            if self._inference is not None:
                self._loop.run(self._inference.close())

    def begin(self) -> None:
        """Start what needs no weights in the store: trainer, verifiers, perhaps servers. Does not wait for them."""
        others = bool(self.external) or not self.generates  # no GPU of ours is for servers
        self.placement = place_services(self.recipe, others)
        if (gpus := assigned(self.placement)) or others:  # else the recipe tells that there are none
            append(self.run.store, self.run.name, "placed", {"owner": self.run.owner, **gpus})
        self.transport = choose_transport(self.recipe, self.placement, others) if self.generates else "store"
        if self.store_only and isinstance(self.recipe, RlhfRecipe) and self.recipe.trainer.weights_every > 1:
            log.info("servers get new weights through the store here: all are written, whatever trainer.weights_every")
        self._services = Services(self.supervisor, self.run, self.recipe, self.server_names, self.placement)
        self._services.start_early()
        if not isinstance(self.recipe, SftRecipe):
            in_background(self.verifiers.__enter__, "verifiers")  # an error is raised at their first use

    def start(self, initial: WeightsRef, current: WeightsRef, written: WeightsRef) -> None:
        """Start the servers that `begin` has not started, on `written`. Does not wait for them.

        `current` are the weights in force, and `written` the newest in the store at or before them.
        """
        self.initial, self.serving, self.written = initial, current, written
        self._services.start_servers(written)

    def load_early(self, version: int) -> None:
        """Have the trainer load `version` while servers start, where it may. Does not wait for it."""
        if may_load_early(self.recipe):
            self._early_load.begin(lambda: self.trainer_at(version))

    @property
    def verifiers(self) -> VerifierPool:
        """The verifier processes, started at their first use."""
        if self._verifiers is None:
            assert not isinstance(self.recipe, SftRecipe)
            self._verifiers = VerifierPool(self.recipe.reward)
        return self._verifiers

    def judging(self, samples: int) -> AbstractContextManager[None]:
        """While inside, the run waits for the verifiers' verdicts on so many samples."""
        pool = self.verifiers

        def look() -> dict[str, Sign]:
            return {"the verifiers": Sign(pool.judged, f"{pool.judged} of {samples} judged")}

        return self.watchdog.waiting("verdicts", look, ends=False)  # each has reward.wall_seconds

    def trainer_at(self, version: int) -> TrainerClient:
        """The trainer, holding the policy of `version`: as it stands, or restored if it does not."""
        return self._holding(version, version)

    def trainer_to_step(self, version: int) -> TrainerClient:
        """As `trainer_at`, or one step on: it may have stepped and its answer been lost, which it then repeats."""
        return self._holding(version, version, version + 1)

    def _holding(self, version: int, *welcome: int) -> TrainerClient:
        trainer = self._connected()
        if (held := trainer.health().version) not in welcome:
            now = "nothing" if held is None else f"version {held}"
            log.info("the trainer holds %s; loading version %d", now, version)
            self._note(restore(self.run, trainer, self._initial(), version))
        return trainer

    def restored(self, version: int) -> Replayed | None:
        """Bring the trainer to `version` now; how what was re-trained for it compares, none if nothing was."""
        before = len(self._replayed)
        self.trainer_at(version)
        return worst(self._replayed[before:]) if self._replayed[before:] else None

    def take_replayed(self) -> Replayed | None:
        """The largest differences of all that was re-trained since this was last asked; none if nothing was."""
        found, self._replayed = self._replayed, []
        return worst(found) if found else None

    def _note(self, replayed: Replayed | None) -> None:
        if replayed is not None:
            self._replayed.append(replayed)

    def trainer_after(self, train: StageManifest) -> TrainerClient:
        """The trainer, holding the policy that a train stage made, whose iteration need not be committed yet."""
        trainer = self._connected()
        if trainer.health().version != train.iteration + 1:
            trainer = self.trainer_at(train.iteration)
            self._note(replay_stage(self.run, trainer, train))
        return trainer

    def drop_policy(self) -> None:
        """Forget the policy in memory: another writer's train stage was committed instead of ours."""
        restore(self.run, self._connected(), self._initial(), 0)

    @cached_property
    def _model_folder(self) -> Path:
        """A local folder with the files of the initial weights, but for the weights themselves."""
        manifest = read_weights(self.run.store, self._initial())
        small = [f for f in manifest.files if not f.path.endswith(".safetensors")]
        return materialise(self.run.store, small, Path(self._scratch.name) / "model", verify=True)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the initial weights."""
        return load_tokenizer(self._model_folder)

    @cached_property
    def ends(self) -> Ends:
        """What ends completions, by the configuration and the tokenizer of the initial weights."""
        folder = self._model_folder
        there = (folder / "generation_config.json").is_file()
        generation = GenerationConfig.from_pretrained(folder) if there else None
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        return Ends(end_tokens(config, generation, self.tokenizer), Detokenizer(self.tokenizer))

    def _connected(self) -> TrainerClient:
        self._early_load.wait()
        self._make_room()
        [url] = self._ready([TRAINER])
        if self._trainer is None or self._trainer_address != url:
            if self._trainer is not None:
                self._trainer.close()
            distrust = partial(self.supervisor.end, [url])
            self._trainer = TrainerClient(url, self.supervisor.token, watchdog=self.watchdog, distrust=distrust)
            self._trainer_address = url
        return self._trainer

    def _make_room(self) -> None:
        """Before the trainer takes memory of a GPU that servers share: let those start that are starting.

        They measure what is free there, and would take the trainer's growth for their own. Where the recipe asks for
        it, they lend their cache's memory to the trainer then, also those that were started again since they last did.
        """
        sharing = [name for i, name in enumerate(self.server_names) if self.placement.shared(i)]
        if sharing:
            self._ready(sharing)
        if sharing and self.recipe.inference.release_memory:  # type: ignore[union-attr]
            with self._feeding:
                client = self._servers()
                self.call(client.standing())
                self.call(client.release_memory())

    def _initial(self) -> WeightsRef:
        assert self.initial is not None, "start() comes first"
        return self.initial
