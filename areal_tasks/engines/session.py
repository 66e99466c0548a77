"""The engines of one run: starts the services, keeps the trainer at the version that is asked for, and the servers fed.

Engines hold state that only the store can vouch for. So nothing here trusts an engine's memory: each use names the
version it expects, and an engine that is new, or that has lost it, is brought there from the last checkpoint by
re-training the committed iterations after it from their tables (DESIGN §8).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from areal_tasks.engines.answers import ServerDown
from areal_tasks.engines.client import InferenceClient, WrongVersion
from areal_tasks.engines.external import external_servers, external_token
from areal_tasks.engines.handover import (
    Fetched,
    Published,
    Transport,
    choose_transport,
    draft_weights,
    load_ahead,
    local_draft,
    local_weights,
    send_command,
)
from areal_tasks.engines.lending import Lent
from areal_tasks.engines.loop_thread import LoopThread
from areal_tasks.engines.models import load_tokenizer
from areal_tasks.engines.recovery import Replayed, replay_stage, restore, worst
from areal_tasks.engines.starting import TRAINER, Early, Services, may_load_early, place_services
from areal_tasks.engines.trainer_client import TrainerClient
from areal_tasks.engines.watchdog import Sign, Watchdog
from areal_tasks.launchers.gpus import Placement
from areal_tasks.launchers.supervisor import Supervisor
from areal_tasks.rewards.pool import VerifierPool
from areal_tasks.store.files import materialise, read_weights
from areal_tasks.store.runs import Run
from schemas.manifest import StageManifest, WeightsRef
from schemas.recipe.recipe import Recipe, RlhfRecipe, SftRecipe

log = logging.getLogger(__name__)
T = TypeVar("T")

SIGN_SECONDS = 60.0  # looks at all servers, side by side


class Engines:
    """Everything resident: trainer, inference servers, verifiers. Use as a context: leaving it stops all of them."""

    def __init__(self, run: Run, recipe: Recipe, logs: Path, *, generates: bool = True) -> None:
        self.run = run
        self.recipe = recipe
        self.generates = generates and not isinstance(recipe, SftRecipe)  # else there are no servers
        self._embedded = self.generates and recipe.inference.engine == "embedded"  # type: ignore[union-attr]
        self.supervisor = Supervisor(run.store, recipe.launcher, logs)
        self.watchdog = Watchdog(recipe.launcher, self.supervisor.end_hung)
        self.external = external_servers() if self.generates else []
        self.placement = Placement()
        self.initial: WeightsRef | None = None
        self.serving: WeightsRef | None = None
        self.written: WeightsRef | None = None  # what a server that starts can load
        self.transport: Transport = "store"
        self._early_load = Early("early-load")
        self._replayed: list[Replayed] = []
        self._doubted = False  # servers may hold files of which nobody knows that they are whole and committed
        self._fetched = Fetched()  # written weights in memory, while a server has yet to load them
        self._feeding = threading.RLock()  # stages that run side by side both want the servers
        self._trainer: TrainerClient | None = None
        self._inference: InferenceClient | None = None
        self._verifiers: VerifierPool | None = None
        self._starts: dict[str, int] = {}  # the servers that the client knows, by address: whoever heals restarts all
        self._trainer_address = ""
        self._loop = LoopThread()
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
                self.call(self._inference.close())

    def begin(self) -> None:
        """Start what needs no weights in the store: trainer, verifiers, perhaps servers. Does not wait for them."""
        others = bool(self.external) or not self.generates  # no GPU of ours is for servers
        self.placement = place_services(self.recipe, others)
        self.transport = choose_transport(self.recipe, self.placement, others) if self.generates else "store"
        if self.store_only and isinstance(self.recipe, RlhfRecipe) and self.recipe.trainer.weights_every > 1:
            log.info("servers get new weights through the store here: all are written, whatever trainer.weights_every")
        self._services = Services(self.supervisor, self.run, self.recipe, self.server_names, self.placement)
        self._services.start_early()
        if not isinstance(self.recipe, SftRecipe):
            Early("verifiers").begin(self.verifiers.__enter__)  # an error is raised at their first use

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
    def server_names(self) -> list[str]:
        """The servers that this run starts; none where it uses servers that run already."""
        if self.external or not self.generates or isinstance(self.recipe, SftRecipe):
            return []
        return [f"inference-{i}" for i in range(self.recipe.inference.servers)]

    @property
    def has_servers(self) -> bool:
        """Whether there are inference servers, of this run or of somebody else."""
        return bool(self.external) or bool(self.server_names)

    @property
    def store_only(self) -> bool:
        """Whether there are servers that get new weights through the store, and not otherwise."""
        return self.transport == "store" and self.has_servers

    @property
    def verifiers(self) -> VerifierPool:
        """The verifier processes, started at their first use."""
        if self._verifiers is None:
            assert not isinstance(self.recipe, SftRecipe)
            self._verifiers = VerifierPool(self.recipe.reward)
        return self._verifiers

    def inference(self) -> InferenceClient:
        """The servers, all of them running on the weights in force; those that had ended are started again.

        Raises:
            UserError: the weights in force are damaged, as often as this is called.
        """
        with self._feeding:
            client = self._servers()
            while self._doubted or client.version != self._serving().version:
                self._catch_up(client)
                client = self._servers()
            if self.recipe.inference.release_memory:  # type: ignore[union-attr]
                self.call(client.resume_memory())
        return client

    def _servers(self) -> InferenceClient:
        """A client of the servers, whatever they hold."""
        if self._inference is not None and not self.external:
            lost = self._inference.lost()  # as that client knew them: a new start may have the port of the old one
            self.supervisor.end([url for url in lost if self._starts[url] == self.supervisor.restarts(url)])
        self.supervisor.heal(self.written)
        servers = self.external or self._ready(self.server_names)
        starts = {url: self.supervisor.restarts(url) for url in servers}
        if self._inference is None or self._starts != starts:
            lent = Lent()
            if (old := self._inference) is not None:
                lent = old.lent({url for url in starts if self._starts.get(url) == starts[url]})
                self._doubted |= not old.known()
                self.call(old.close())
            token = external_token() if self.external else self.supervisor.token
            self._inference = InferenceClient(servers, token, self.recipe.inference, lent)  # type: ignore[union-attr]
            self._starts = starts
        return self._inference

    def _catch_up(self, client: InferenceClient) -> None:
        """Bring servers that this client does not know yet, or that are doubted, to the weights in force."""
        ref = self._serving()
        trusted = ref == self.written and not self.external and not self._doubted  # what they say of themselves
        if trusted and self._met(client) == ref.version:
            return
        if ref.written:
            self._load_written(client, ref)
        else:
            trainer = self.trainer_at(ref.version)  # which may start servers again, too
            self._give(self._servers(), ref, trainer)

    def _met(self, client: InferenceClient) -> int | None:
        """The version that all servers hold; None if they differ, as after a failed update and a new start."""
        try:
            return self.call(client.meet())
        except WrongVersion as error:
            log.warning("%s", error)
            return None

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the inference client in the one loop it belongs to."""
        with self.watchdog.waiting("generation or new weights", self._server_signs, ends=not self.external):
            return self._loop.run(work)

    def _server_signs(self, everyone: bool = False) -> dict[str, Sign]:
        """How the servers get on that have something to do for us, by name; those of others by their address."""
        if self._inference is None:
            return {}
        found = self._loop.run(self._inference.signs(everyone), SIGN_SECONDS)
        return {self.supervisor.name_at(url): sign for url, sign in found.items()}

    def judging(self, samples: int) -> AbstractContextManager[None]:
        """While inside, the run waits for the verifiers' verdicts on so many samples."""
        pool = self.verifiers

        def look() -> dict[str, Sign]:
            return {"the verifiers": Sign(pool.judged, f"{pool.judged} of {samples} judged")}

        return self.watchdog.waiting("verdicts", look, ends=False)  # each has reward.timeout_seconds

    def serve_weights(self, ref: WeightsRef, trainer: TrainerClient | None = None, handed: bool = False) -> list[float]:
        """Make every server generate with `ref`; seconds for each. Nothing to do without servers, or if they hold it.

        What the store does not have comes from `trainer`, which holds it.
        """
        with self._feeding:
            self.serving = ref
            if ref.written:
                self.written = ref
            if handed or not self.has_servers:
                return []
            return self._give(self._servers(), ref, trainer)

    def write_weights(self, trainer: TrainerClient, version: int, handed: bool = False) -> Published:
        """Have the trainer write the weights it holds, and the servers load them unless they were `handed` them.

        Servers that load a folder do so while the weights are committed (in a store on this machine: also hashed):
        until all of it has succeeded the older weights are in force there, and servers that hold the new are doubted.
        """
        if handed or not self.has_servers or (self._embedded and self.run.store.local("") is None):
            done = draft_weights(self.run, trainer, version).commit()
            return replace(done, load_seconds=self.serve_weights(done.ref, handed=handed))
        draft = local_draft(self.run, trainer, version)
        with self._feeding:
            self._fetched.keep(draft.memory)
            client = self._servers()
            with self._doubting():
                done = load_ahead(draft, lambda folder: self.call(client.update_weights(folder, version)))
            self.serving = self.written = done.ref
            self._fetched.loaded(done.load_seconds, len(self._starts))
        return done

    @contextmanager
    def _doubting(self) -> Iterator[None]:
        """While inside, and if it fails, nobody is to believe the version that servers say they hold (`inference`)."""
        self._doubted = True
        yield
        self._doubted = False

    def _give(self, client: InferenceClient, ref: WeightsRef, trainer: TrainerClient | None = None) -> list[float]:
        """Bring the servers to `ref`, out of the store or from the trainer, which is restored if it is not given."""
        if ref.written:
            return self._load_written(client, ref)
        trainer = trainer or self.trainer_at(ref.version)
        if not self.store_only:
            return self._hand_over(client, trainer, ref.version)
        log.info("version %d is not in the store, from which servers get their weights here: writing it", ref.version)
        return self.write_weights(trainer, ref.version).load_seconds

    def _load_written(self, client: InferenceClient, ref: WeightsRef) -> list[float]:
        """Have the servers read the weights: the embedded ones from the store, SGLang's from a folder."""
        store = self.run.store
        there = nullcontext(store.uri(ref.path)) if self._embedded else local_weights(store, ref, self._fetched)
        with self._doubting(), there as where:
            loads = self.call(client.update_weights(str(where), ref.version))
        return self._fetched.loaded(loads, len(self._starts))

    def _hand_over(self, client: InferenceClient, trainer: TrainerClient, version: int) -> list[float]:
        """Have the trainer send the weights it holds, and every server say that it has them.

        A server that fails at it may hold a part of them: it is evicted, and ended so that it starts anew.

        Raises:
            ServerDown: no server is left.
        """
        started, urls = time.monotonic(), client.healthy()
        if not urls:
            raise ServerDown("no inference server is well enough for new weights")
        ranks = self.recipe.inference.tensor_parallel  # type: ignore[union-attr]
        command = send_command(self.run.owner, version, self.transport, urls, ranks, self.supervisor.token)
        self._fetched.outdate()
        with self.watchdog.waiting("weights from the trainer", lambda: self._server_signs(everyone=True)):
            gone = trainer.send(command).gone
        self.call(client.evict(gone))
        self.supervisor.end(gone, "did not take new weights", grace_seconds=0.0)
        self.call(client.adopt(version))
        self._doubted = False
        if not (held := client.healthy()):
            raise ServerDown(f"no inference server took version {version}: {'; '.join(gone.values())}")
        return [time.monotonic() - started] * len(held)

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
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the initial weights."""
        manifest = read_weights(self.run.store, self._initial())
        small = [f for f in manifest.files if not f.path.endswith(".safetensors")]
        return load_tokenizer(materialise(self.run.store, small, Path(self._scratch.name) / "tokenizer", verify=True))

    def _connected(self) -> TrainerClient:
        self._early_load.wait()
        self.supervisor.heal(self.written)
        self._make_room()
        [url] = self._ready([TRAINER])
        if self._trainer is None or self._trainer_address != url:
            if self._trainer is not None:
                self._trainer.close()
            self._trainer = TrainerClient(url, self.supervisor.token, watchdog=self.watchdog)
            self._trainer_address = url
        return self._trainer

    def _ready(self, names: Sequence[str]) -> list[str]:
        """The addresses of these services, once they have started."""

        def starting() -> dict[str, Sign]:
            return {name: Sign(None, f"see {log}") for name, log in self.supervisor.starting(names).items()}

        with self.watchdog.waiting("its start", starting, ends=False):  # it has launcher.startup_seconds
            return self.supervisor.wait(names)

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
                self.call(self._servers().release_memory())

    def _serving(self) -> WeightsRef:
        assert self.serving is not None, "start() comes first"
        return self.serving

    def _initial(self) -> WeightsRef:
        assert self.initial is not None, "start() comes first"
        return self.initial
