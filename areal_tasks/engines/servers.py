"""The inference servers of one run: restarted when they end, and kept at the current weights.

A thread that waits for the servers also supervises them (`call`): it restarts a server that has ended in the
background, and admits it when it holds the current weights, while the others continue.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeVar

from areal_tasks.engines.access import Access
from areal_tasks.engines.client import InferenceClient
from areal_tasks.engines.ends import Ends
from areal_tasks.engines.external import external_servers, external_token
from areal_tasks.engines.handover import Transport, WeightsSource, name_of, read_store, sending_ranks, write_weights
from areal_tasks.engines.loop_thread import LoopThread
from areal_tasks.engines.proof import Proof, is_proven
from areal_tasks.engines.server import ServerDown
from areal_tasks.engines.starting import evaluator_names, ready, starting, worker_names
from areal_tasks.engines.trainer.commands import Receiver, Send, Sent
from areal_tasks.engines.trainer_client import TrainerClient, TrainerDown
from areal_tasks.engines.trainers import ResidentTrainer
from areal_tasks.engines.watchdog import Heartbeat, Watchdog
from areal_tasks.engines.workers import Workers
from areal_tasks.launchers.gpus import Placement
from areal_tasks.launchers.supervisor import Ready, ServiceFailed, Supervisor
from areal_tasks.store.runs import Run
from schemas.errors import UserError
from schemas.manifest import WeightsRef
from schemas.recipe.derived import interruption
from schemas.recipe.recipe import Recipe, SftRecipe

log = logging.getLogger(__name__)
T = TypeVar("T")

HEARTBEAT_LIMIT_SECONDS: Final = 60.0  # for concurrent probes of all servers


@dataclass(eq=False)
class Servers:
    """A client of the servers that the run starts, or of external ones; no servers if the run does not generate.

    `trainer` makes the weights that the servers generate with; `ends` returns the end tokens and the detokenizer.
    """

    run: Run
    recipe: Recipe
    generates: bool
    supervisor: Supervisor
    watchdog: Watchdog
    trainer: ResidentTrainer
    ends: Callable[[], Ends]
    placement: Placement = field(default_factory=Placement)
    transport: Transport = "store"
    serving: WeightsRef | None = None
    written: WeightsRef | None = None  # the newest in the store, which a server can start on
    holder: InferenceClient | None = None  # of the one server that is `held`
    _lock: threading.RLock = field(default_factory=threading.RLock)  # stages that run at once use the same servers
    _client: InferenceClient | None = None
    _ready: list[Ready] = field(default_factory=list)  # as the client knows them
    #: For weights that could not be written: the server starts for which that was tried.
    _unwritable: dict[str, frozenset[tuple[str, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.generates = self.generates and not isinstance(self.recipe, SftRecipe)  # else there are no servers
        self.external = external_servers() if self.generates else []
        self.weights = WeightsSource(self.run.store, self.generates and read_store(self.recipe, self.external))
        self.loop = LoopThread()
        of_run = self.recipe, self.generates, self.supervisor, self.watchdog, self.loop
        self.all_workers = [Workers(names, *of_run) for names in (worker_names, evaluator_names)]
        self.workers, self.evaluators = self.all_workers
        self._proof = Proof(self.call, is_proven(self.recipe))

    def close(self) -> None:
        """Close the client and cancel its work. The supervisor ends the servers themselves."""
        for workers in self.all_workers:
            workers.serve(None)
        for client in self._clients():
            self.loop.run(client.close())

    def closed(self) -> None:
        """Stop the event loop and free the fetched weights, after the servers have ended."""
        self.loop.stop()
        self.weights.fetched.close()

    def adapt(self, recipe: Recipe, placement: Placement, join: Callable[[], None]) -> None:
        """Change to this recipe. `join` starts the servers that it adds; those that it removes are stopped."""
        with self._lock:
            before, self.recipe, self.placement = self.names, recipe, placement
            join()
            for name in self.names:
                if name not in before:
                    log.info("%s joins the run", name)
            if self._client is not None and not isinstance(recipe, SftRecipe):
                self.loop.run(self._client.bound_requests(recipe.inference.max_concurrent_requests))
            leaving = [name for name in before if name not in self.names]
            if leaving and self._client is not None:  # their requests are retried on others
                self._supervise()
                self.call(self._client.followers.acknowledged())
            for name in leaving:
                log.info("%s leaves the run", name)
                self.supervisor.retire(name)

    @property
    def names(self) -> list[str]:
        """The names of the servers that this run starts; none if it uses external servers."""
        if self.external or not self.generates or isinstance(self.recipe, SftRecipe):
            return []
        return [f"inference-{i}" for i in range(self.recipe.inference.servers)]

    @property
    def count(self) -> int:
        """The number of servers, started by this run or external."""
        return len(self.external or self.names)

    @property
    def access(self) -> Access:
        """What clients of the inference servers need."""
        return Access(external_token()) if self.external else self.supervisor.access

    @property
    def patience_seconds(self) -> float | None:
        """How long a request waits while no server is healthy; None (`NO_SERVER_SECONDS`): no process restarts them."""
        return None if self.external else math.inf

    @property
    def store_only(self) -> bool:
        """Whether there are servers, all of which get new weights only through the store."""
        return self.transport == "store" and self.count > 0

    def inference(self, waits: bool = True) -> InferenceClient:
        """A client of the servers, which generate with the current weights; restarts those that have ended.

        With `waits` false, the servers may hold older weights that another thread is about to replace. UserError, at
        every call: the current weights are damaged.
        """
        if not self._lock.acquire(blocking=waits or self._client is None):
            assert self._client is not None
            return self._client
        try:
            client, ref = self._supervised(), self._serving()
            if not client.wants(name_of(ref)) or client.stuck:
                self._give(client, ref)
            if self.recipe.inference.release_memory:  # type: ignore[union-attr]
                self.call(client.release_caches(False))
            return client
        finally:
            self._lock.release()

    def _supervised(self) -> InferenceClient:
        """A client of the servers, whatever weights they hold. Waits for the servers only at their first start."""
        if self._client is None:
            self._client = self._first_client()
            self._supervise()
            self.call(self._client.wait_healthy())
        else:
            self._supervise()
        return self._client

    @contextmanager
    def held(self, ref: WeightsRef) -> Iterator[InferenceClient]:
        """Inside, a client of one server, which has `ref` and generates for it alone. Others go on with newer weights.

        The store has `ref`. ServerDown: this server has ended, which closes the client, or all others lack weights that
        only the trainer has and is not sending.
        """
        pool, source = self.inference(waits=False), WeightsSource(self.run.store, self.weights.reads_store)
        server, current = self.call(pool.hold(name_of(ref)), generates=pool)
        own = self.new_client(pool.settings.request_timeout_seconds if self.external else math.inf)
        with ExitStack() as stack:
            name = self.supervisor.name_at(server.url)  # also after its end
            stack.callback(lambda: self.ask_workers(pool.release(server), f" about requests on {name}"))  # last
            stack.callback(lambda: self.loop.run(own.close()))
            stack.callback(setattr, self, "holder", None)
            stack.callback(source.fetched.close)
            target = source.target(ref)
            self.loop.run(own.holding(target if current else replace(target, uri=source.ready(ref))))
            self.loop.run(own.sync({server.url: server.start}, [server.url] if current else []))
            self.holder = own
            self.call(own.wait_healthy())
            yield own

    def new_client(self, patience_seconds: float | None) -> InferenceClient:
        """A client that has no servers yet. `patience_seconds`: see `InferenceClient`."""
        settings = self.recipe.inference  # type: ignore[union-attr]
        return InferenceClient([], self.access, settings, patience_seconds, self.ends, interruption(self.recipe))

    def _first_client(self) -> InferenceClient:
        client = self.new_client(self.patience_seconds)
        if self.external:
            try:
                self.loop.run(client.use_external(self.external))
                if not self.weights.reads_store:
                    self.weights.reads_store = self.loop.run(client.read(self.run.store.url))
            except BaseException:
                self.loop.run(client.close())
                raise
            return client
        ready(self.supervisor, self.watchdog, self.names, self.written)
        for one in self.supervisor.poll(self.names)[:1]:
            if one.weights is not None:
                self.loop.run(client.holding(self.weights.target(one.weights)))
        return client

    def _clients(self) -> list[InferenceClient]:
        return [client for client in (self._client, self.holder) if client is not None]

    def call(self, work: Coroutine[Any, Any, T], *, generates: InferenceClient | None = None) -> T:
        """Run a coroutine of an inference client in the clients' event loop, and supervise the servers meanwhile.

        ServiceFailed: no server runs, and `launcher.restarts` are used up. ServerDown: `generates`, a client that waits
        for its current weights, would wait without end: only the trainer has them, and no thread sends them, since
        servers were restarted on others, or a transfer has failed.
        """
        names = [*self.names, *self.workers.used, *self.evaluators.used]
        poll = lambda: self._workers_heartbeats() | self._heartbeats() | starting(self.supervisor, names)  # noqa: E731
        with self.watchdog.waiting("generation" if generates else "a command to the servers", poll):
            return self.loop.run(work, meanwhile=lambda: self._supervise_if_free(generates))

    def ask_workers(self, work: Coroutine[Any, Any, T], about: str = "") -> T:
        """As `call`, of what waits for rollout workers: the watchdog ends one that hangs. Supervises no servers."""
        with self.watchdog.waiting(f"an answer of the rollout workers{about}", self._workers_heartbeats):
            return self.loop.run(work)

    def _supervise_if_free(self, generates: InferenceClient | None) -> None:
        if not self._lock.acquire(blocking=False):
            return  # another thread uses the servers, and supervises them
        try:
            self._supervise()
            for workers in self.all_workers:
                workers.supervise()
            if generates is not None and (self._ready or self.external) and generates.stuck:
                raise ServerDown("the servers hold older weights and have to be given the current ones")
        finally:
            self._lock.release()

    def _supervise(self) -> None:
        """Restart servers that have ended, and admit those that are ready; the others continue meanwhile."""
        if (client := self._client) is None or self.external:
            return
        if lost := [url for one in self._clients() for url in one.lost()]:
            self.supervisor.end(lost)
        ended = self.supervisor.ended(self.names)
        weights = self._weights_to_start_on(ended) if ended else None
        running = self.supervisor.poll(self.names, weights)
        starts = {one.url: one.restart for one in running}
        if (own := self.holder) is not None and any(starts.get(held.url) != held.start for held in own.servers):
            self.loop.run(own.close())  # before another start of its server gets other weights
        if running != self._ready:
            self._ready = running
            current = [one.url for one in running if one.weights is not None and client.wants(name_of(one.weights))]
            self.loop.run(client.sync(starts, current))

    def _weights_to_start_on(self, ended: frozenset[tuple[str, int]]) -> WeightsRef | None:
        """The current weights, which the trainer first writes if only it has them.

        If that is not possible, the newest in the store; the server gets the current weights later, with all others. A
        failed write is retried when another start of a server has `ended`.
        """
        ref, trainer = self._serving(), self.trainer.client
        tried_for = self._unwritable.get(name_of(ref), frozenset())
        if ref.written or ended <= tried_for or trainer is None or not trainer.is_free(ref.version):
            return self.written
        try:
            self.serve(write_weights(self.run, trainer, ref.version).ref, handed=True)
        except ServiceFailed:
            raise
        except (TrainerDown, UserError) as error:  # the healthy servers continue
            log.warning("version %d cannot be written for a server that starts: %s", ref.version, error)
            self._unwritable = {name_of(ref): tried_for | ended}
        return self.written

    def _workers_heartbeats(self) -> dict[str, Heartbeat]:
        """A heartbeat of each worker. They also report the workers' requests per server, for `_heartbeats`."""
        return {name: found for workers in self.all_workers for name, found in workers.heartbeats().items()}

    def _heartbeats(self, everyone: bool = False) -> dict[str, Heartbeat]:
        """A heartbeat of each server that has work in progress, by its name; of external servers by their address."""
        limit = "inference.request_timeout_seconds for each request" if self.external else ""
        return {
            self.supervisor.name_at(url): replace(heartbeat, limit=limit)
            for client in self._clients()
            for url, heartbeat in self.loop.run(client.heartbeats(everyone), HEARTBEAT_LIMIT_SECONDS).items()
        }

    def states(self) -> dict[str, str]:
        """As `ServerPool.states`; none while there is no client of the servers."""
        return self._client.states() if self._client is not None else {}

    def queues(self) -> dict[str, tuple[int, int | None]]:
        """As `ServerPool.queues`, by the workers' last heartbeats. For any thread; TimeoutError after a while."""
        self._workers_heartbeats()
        found = [self.loop.run(client.queues(), HEARTBEAT_LIMIT_SECONDS) for client in self._clients()]
        return {url: queue for queues in found for url, queue in queues.items()}

    def serve(self, ref: WeightsRef, trainer: TrainerClient | None = None, handed: bool = False) -> list[float]:
        """Make every server generate with `ref`; returns the seconds per server, none if nothing had to be done.

        Weights that are not in the store come from `trainer`, which holds them. If the servers hold them already
        (`handed`: sent before they were written), the client only notes where they are in the store.
        """
        with self._lock:
            self.serving = ref
            if ref.written:
                self.written = ref
            if self.count and not handed:
                return self._give(self._supervised(), ref, trainer)
            if self._client is not None:
                self.loop.run(self._client.holding(self.weights.target(ref)))
            return []

    def _give(self, client: InferenceClient, ref: WeightsRef, trainer: TrainerClient | None = None) -> list[float]:
        """Give the servers `ref`, from the store or from the trainer; without `trainer`, the resident one, restored.

        After a failure servers may hold damaged or incomplete weights: none is used before it has loaded weights again.
        """
        if not ref.written:
            trainer = trainer or self.trainer.at(ref.version)
            if self.store_only:
                log.info("version %d is not in the store, where servers get their weights: writing it", ref.version)
                self.serving = self.written = ref = write_weights(self.run, trainer, ref.version).ref
        try:
            if ref.written or trainer is None:
                return self._load(client, ref)
            return self._proof.of(client, lambda: self._send(client, trainer, ref))
        except BaseException:
            self.ask_workers(client.forget_versions())
            raise

    def _load(self, client: InferenceClient, ref: WeightsRef) -> list[float]:
        """Have the servers load committed weights from the store, or from a folder of this machine."""
        update = partial(client.update_weights, self.weights.ready(ref), ref.version, name_of(ref))
        loads = self._proof.of(client, lambda: self.call(update()))
        if len(loads) == self.count:
            self.weights.fetched.close()
        return loads

    def _send(self, client: InferenceClient, trainer: TrainerClient, ref: WeightsRef) -> list[float]:
        """Have the trainer send the weights that it holds, and every server confirm them; seconds per server.

        A server that fails may hold a part of them: it is evicted and restarted. ServerDown if all fail.
        """
        started, version, paused = time.monotonic(), ref.version, client.paused
        self.weights.fetched.release_older()
        try:
            self.call(client.interrupt())
            urls = self.call(client.wait_healthy())
            with self.watchdog.waiting("weights from the trainer", lambda: self._heartbeats(everyone=True)):
                failures = trainer.run(self._send_command(version, urls, client.held()), Sent).gone
            self.call(client.evict(failures))
            confirmed = self.call(client.adopt(version, name_of(ref), set(urls) - failures.keys()))
        finally:  # waiting and paused requests continue
            if not paused:
                self.call(client.resume())
        self.supervisor.end(failures, "did not take new weights", grace_seconds=0.0)
        if not confirmed:
            raise ServerDown(f"no inference server took version {version}: {'; '.join(failures.values())}")
        return [time.monotonic() - started] * len(confirmed)

    def _send_command(self, version: int, urls: Sequence[str], held: Sequence[str]) -> Send:
        ranks = self.recipe.inference.tensor_parallel  # type: ignore[union-attr]
        rank_of = dict(zip(self.names, sending_ranks(self.transport, self.placement), strict=False))
        rank_at = {url: rank_of.get(self.supervisor.name_at(url), 0) for url in urls}
        return Send(
            owner=self.run.owner,
            version=version,
            transport=self.transport,
            receivers=tuple(Receiver(url=url, ranks=ranks, trainer_rank=rank_at[url]) for url in urls),
            leaving=tuple(Receiver(url=url, ranks=ranks) for url in held),
            token=self.supervisor.access.token,
            authority=self.supervisor.access.authority,
            keep_cache=interruption(self.recipe) == "in_place",
        )

    def make_room(self, loaded: bool) -> None:
        """Wait until the servers on the trainer's GPUs have started: call this before the trainer allocates memory.

        A starting server measures the free memory, and would count what the trainer allocates as its own. With
        `inference.release_memory` the servers, also restarted ones, then release their KV caches. Without, a trainer
        that is `loaded` has its memory, and waits for no server that was lost and starts again.
        """
        if not (sharing := [name for i, name in enumerate(self.names) if self.placement.shared(i)]):
            return
        releases = self.recipe.inference.release_memory  # type: ignore[union-attr]
        if loaded and not releases:
            return
        ready(self.supervisor, self.watchdog, sharing, self.written)
        if releases:
            with self._lock:
                client = self._supervised()
                self.call(client.wait_healthy())
                self.call(client.release_caches(True))

    def _serving(self) -> WeightsRef:
        assert self.serving is not None, "start() comes first"
        return self.serving
