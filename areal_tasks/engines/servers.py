"""The inference servers of one run: started again when they end, and kept at the weights in force.

Whatever waits for the servers looks after them meanwhile (`call`): one that has ended is started again in the
background and let in when it holds the weights in force, while the others go on.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Final, TypeVar

from areal_tasks.engines.client import InferenceClient
from areal_tasks.engines.ends import Ends
from areal_tasks.engines.external import external_servers, external_token
from areal_tasks.engines.handover import Fetched, Transport, name_of, send_command, write_weights
from areal_tasks.engines.loop_thread import LoopThread
from areal_tasks.engines.proof import Proof, is_proven
from areal_tasks.engines.server import ServerDown
from areal_tasks.engines.starting import ready
from areal_tasks.engines.trainer_client import TrainerClient, TrainerDown
from areal_tasks.engines.trainers import ResidentTrainer
from areal_tasks.engines.watchdog import Heartbeat, Watchdog
from areal_tasks.engines.workers import Workers
from areal_tasks.launchers.gpus import Placement
from areal_tasks.launchers.supervisor import Ready, ServiceFailed, Supervisor
from areal_tasks.store.files import common_folder, read_weights
from areal_tasks.store.runs import Run
from schemas.errors import UserError
from schemas.manifest import WeightsRef
from schemas.recipe.derived import interruption
from schemas.recipe.recipe import EvaluateRecipe, Recipe, SftRecipe

log = logging.getLogger(__name__)
T = TypeVar("T")

HEARTBEAT_LIMIT_SECONDS: Final = 60.0  # looks at all servers, side by side
BRIEF_SECONDS: Final = 2.0  # to give up what is under way: a worker kills 7 s after it has asked a flow to end


class Servers:
    """The servers of a run, or those that run already, as one client; none where the run does not generate.

    `author` makes the weights that they generate with; `ends` tells what ends the model's completions.
    """

    def __init__(
        self,
        run: Run,
        recipe: Recipe,
        generates: bool,
        supervisor: Supervisor,
        watchdog: Watchdog,
        author: ResidentTrainer,
        ends: Callable[[], Ends],
    ) -> None:
        self.run = run
        self.recipe = recipe
        self.supervisor = supervisor
        self.watchdog = watchdog
        self.author = author
        self.ends = ends
        self.generates = generates and not isinstance(recipe, SftRecipe)  # else there are no servers
        self._embedded = self.generates and recipe.inference.engine == "embedded"  # type: ignore[union-attr]
        self.external = external_servers() if self.generates else []
        self.placement = Placement()
        self.transport: Transport = "store"
        self.serving: WeightsRef | None = None
        self.written: WeightsRef | None = None  # what a server that starts can load
        self._fetched = Fetched()
        self._feeding = threading.RLock()  # stages that run side by side both want the servers
        self._client: InferenceClient | None = None
        self._ready: list[Ready] = []  # as the client knows them
        self._loop = LoopThread()
        self.workers = Workers(recipe, generates, supervisor, watchdog, self._loop)
        self._proof = Proof(self.call, is_proven(recipe))
        self._unwritable: dict[str, frozenset[tuple[str, int]]] = {}  # weights, and for which starts they were tried

    def close(self) -> None:
        """Give up what is under way. The servers themselves are the supervisor's to end."""
        if self._client is not None:
            self._loop.run(self._client.close())

    def closed(self) -> None:
        """The servers have ended: free what they may have been using."""
        self._loop.stop()
        self._fetched.close()

    @property
    def names(self) -> list[str]:
        """The servers that this run starts; none where it uses servers that run already."""
        if self.external or not self.generates or isinstance(self.recipe, SftRecipe):
            return []
        return [f"inference-{i}" for i in range(self.recipe.inference.servers)]

    @property
    def count(self) -> int:
        """How many servers there are, of this run or of somebody else."""
        return len(self.external or self.names)

    @property
    def token(self) -> str:
        """What the inference servers ask for."""
        return external_token() if self.external else self.supervisor.token

    @property
    def patience_seconds(self) -> float | None:
        """How long a request waits while no server is well; None: not for long, since nobody starts one again."""
        return None if self.external else math.inf

    @property
    def store_only(self) -> bool:
        """Whether there are servers that get new weights through the store, and not otherwise."""
        return self.transport == "store" and self.count > 0

    def inference(self, waits: bool = True) -> InferenceClient:
        """A client of the servers that generate with the weights in force; those that had ended are started again.

        One that does not wait may get servers with older weights, to which another thread is about to give others.

        Raises:
            UserError: the weights in force are damaged, as often as this is called.
        """
        if not self._feeding.acquire(blocking=waits or self._client is None):
            assert self._client is not None
            return self._client
        try:
            client, ref = self._tended(), self._serving()
            if not client.wants(name_of(ref)) or client.stuck:
                self._give(client, ref)
            if self.recipe.inference.release_memory:  # type: ignore[union-attr]
                self.call(client.resume_memory())
            return client
        finally:
            self._feeding.release()

    def _tended(self) -> InferenceClient:
        """A client of the servers, whatever they hold. Waits for them at their first start only."""
        if self._client is None:
            self._client = self._new_client()
            self._tend()
            self.call(self._client.standing())
        else:
            self._tend()
        return self._client

    def _new_client(self) -> InferenceClient:
        settings = self.recipe.inference  # type: ignore[union-attr]
        client = InferenceClient([], self.token, settings, self.patience_seconds, self.ends, interruption(self.recipe))
        if self.external:
            try:
                self._loop.run(client.foreign(self.external))
            except BaseException:
                self._loop.run(client.close())
                raise
            return client
        ready(self.supervisor, self.watchdog, self.names, self.written)
        for one in self.supervisor.look(self.names)[:1]:
            if one.weights is not None:
                self._loop.run(client.holding(*self._target(one.weights)))
        return client

    def _target(self, ref: WeightsRef) -> tuple[int, str, str | None]:
        """Version and name of these weights, and where servers that lack them load them, if they can by themselves."""
        if not ref.written or self._embedded:
            return ref.version, name_of(ref), self.run.store.uri(ref.path) if ref.written else None
        folder = self.run.store.local(common_folder(read_weights(self.run.store, ref).files))
        return ref.version, name_of(ref), str(folder) if folder else None

    def call(self, work: Coroutine[Any, Any, T], *, generates: bool = False) -> T:
        """Run a coroutine of the inference client in the one loop it belongs to, and look after the servers meanwhile.

        Raises:
            ServiceFailed: no server is left, and `launcher.restarts` are used up.
            ServerDown: it `generates`, and all servers were started again on weights that are not in force any more.
        """
        what = "generation" if generates else "an order to the servers"

        def heartbeats() -> dict[str, Heartbeat]:
            workers = self.workers.heartbeats()  # first: it tells which servers they are at
            return self._heartbeats() | workers

        with self.watchdog.waiting(what, heartbeats):
            return self._loop.run(work, meanwhile=lambda: self._tend_if_free(generates))

    def call_briefly(self, work: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine in that loop without looking after the servers: the run ends. TimeoutError if it lasts."""
        self._loop.run(work, BRIEF_SECONDS)

    def _tend_if_free(self, generates: bool) -> None:
        if not self._feeding.acquire(blocking=False):
            return  # another thread is at it
        try:
            self._tend()
            self.workers.tend()
            if generates and self._ready and self._client is not None and self._client.stuck:
                raise ServerDown("the servers have to be given the weights in force: they were started again on others")
        finally:
            self._feeding.release()

    def _tend(self) -> None:
        """Start services again that have ended, and let in the servers that are ready; the others go on meanwhile."""
        if (client := self._client) is None or self.external:
            return
        if lost := client.lost():
            self.supervisor.end(lost)
        ended = self.supervisor.ended(self.names)
        weights = self._weights_to_start_on(ended) if ended else None
        found = self.supervisor.look(self.names, weights)
        if found != self._ready:
            self._ready = found
            current = [one.url for one in found if one.weights is not None and client.wants(name_of(one.weights))]
            self._loop.run(client.sync({one.url: one.restart for one in found}, current))
        if not isinstance(self.recipe, EvaluateRecipe):
            self.author.tend()

    def _weights_to_start_on(self, ended: frozenset[tuple[str, int]]) -> WeightsRef | None:
        """Those in force, which the trainer writes if the store does not have them and it holds them.

        Otherwise the newest that the store has; the server is handed those in force with all others, later. What could
        not be written is tried again when another start of a server has `ended`.
        """
        ref, trainer = self._serving(), self.author.client
        tried_for = self._unwritable.get(name_of(ref), frozenset())
        if ref.written or ended <= tried_for or trainer is None or not trainer.is_free(ref.version):
            return self.written
        try:
            self.serve(write_weights(self.run, trainer, ref.version).ref, handed=True)
        except ServiceFailed:
            raise
        except (TrainerDown, UserError) as error:  # the servers that are well go on
            log.warning("version %d cannot be written for a server that starts: %s", ref.version, error)
            self._unwritable = {name_of(ref): tried_for | ended}
        return self.written

    def _heartbeats(self, everyone: bool = False) -> dict[str, Heartbeat]:
        """How the servers get on that have something to do for us, by name; those of others by their address."""
        if self._client is None:
            return {}
        found = self._loop.run(self._client.heartbeats(everyone), HEARTBEAT_LIMIT_SECONDS)
        limit = "inference.request_timeout_seconds for each request" if self.external else ""
        return {self.supervisor.name_at(url): replace(heartbeat, limit=limit) for url, heartbeat in found.items()}

    def serve(self, ref: WeightsRef, trainer: TrainerClient | None = None, handed: bool = False) -> list[float]:
        """Make every server generate with `ref`; seconds for each. Nothing to do without servers, or if they hold it.

        What the store does not have comes from `trainer`, which holds it. Servers that were `handed` these weights
        before they were written are only told where they lie.
        """
        with self._feeding:
            self._in_force(ref)
            if self.count and not handed:
                return self._give(self._tended(), ref, trainer)
            if self._client is not None:
                self._loop.run(self._client.holding(*self._target(ref)))
            return []

    def _in_force(self, ref: WeightsRef) -> None:
        self.serving = ref
        if ref.written:
            self.written = ref

    def _give(self, client: InferenceClient, ref: WeightsRef, trainer: TrainerClient | None = None) -> list[float]:
        """Bring the servers to `ref`, out of the store or from the trainer, which is restored if it is not given.

        If it fails, servers may hold what is damaged, or a part: none is used before it is given weights.
        """
        if not ref.written:
            trainer = trainer or self.author.at(ref.version)
            if self.store_only:
                log.info("version %d is not in the store, where servers get their weights: writing it", ref.version)
                self._in_force(ref := write_weights(self.run, trainer, ref.version).ref)
        try:
            if ref.written or trainer is None:
                return self._load(client, ref)
            return self._proof.of(client, lambda: self._hand_over(client, trainer, ref))
        except BaseException:
            self._loop.run(client.forget_versions())
            raise

    def _load(self, client: InferenceClient, ref: WeightsRef) -> list[float]:
        """Have the servers read committed weights: the embedded ones from the store, SGLang's from a folder."""
        store = self.run.store
        with nullcontext(store.uri(ref.path)) if self._embedded else self._fetched.local(store, ref) as where:
            loads = self._proof.load(client, str(where), ref.version, name_of(ref))
        return self._fetched.loaded(loads, self.count)

    def _hand_over(self, client: InferenceClient, trainer: TrainerClient, ref: WeightsRef) -> list[float]:
        """Have the trainer send the weights it holds, and every server say that it has them.

        A server that fails at it may hold a part of them: it is evicted, and ended so that it starts anew.

        Raises:
            ServerDown: no server is left.
        """
        started, version = time.monotonic(), ref.version
        self._fetched.outdate()
        with self._interrupted(client):
            urls = self.call(client.standing())
            ranks = self.recipe.inference.tensor_parallel  # type: ignore[union-attr]
            keeps = interruption(self.recipe) == "in_place"
            command = send_command(self.run.owner, version, self.transport, urls, ranks, self.supervisor.token, keeps)
            with self.watchdog.waiting("weights from the trainer", lambda: self._heartbeats(everyone=True)):
                gone = trainer.send(command).gone
            self.call(client.evict(gone))
            took = self.call(client.adopt(version, name_of(ref), set(urls) - gone.keys()))
        self.supervisor.end(gone, "did not take new weights", grace_seconds=0.0)
        if not took:
            raise ServerDown(f"no inference server took version {version}: {'; '.join(gone.values())}")
        return [time.monotonic() - started] * len(took)

    @contextmanager
    def _interrupted(self, client: InferenceClient) -> Iterator[None]:
        """Inside, no server generates; requests that wait or stand still go on afterwards, with the new weights."""
        paused = client.paused
        try:
            self.call(client.interrupt())
            yield
        finally:
            if not paused:
                self.call(client.resume())

    def make_room(self) -> None:
        """Before the trainer takes memory of a GPU that servers share: let those start that are starting.

        They measure what is free there, and would take the trainer's growth for their own. Where the recipe asks for
        it, they lend their cache's memory to the trainer then, also those that were started again since they last did.
        """
        if not (sharing := self._sharing()):
            return
        ready(self.supervisor, self.watchdog, sharing, self.written)
        if self.recipe.inference.release_memory:  # type: ignore[union-attr]
            with self._feeding:
                client = self._tended()
                self.call(client.standing())
                self.call(client.release_memory())

    def _sharing(self) -> Sequence[str]:
        """The servers on a GPU of the trainer's."""
        return [name for i, name in enumerate(self.names) if self.placement.shared(i)]

    def _serving(self) -> WeightsRef:
        assert self.serving is not None, "start() comes first"
        return self.serving
