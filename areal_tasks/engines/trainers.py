"""A resident trainer: its process is found or awaited, and brought to the version that it is asked for.

Only the store can vouch for what an engine holds. So nothing here trusts its memory: each use names the version it
expects, and a trainer that is new, or that has lost it, is brought there from the last checkpoint by re-training the
committed iterations after it from their tables.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from areal_tasks.engines.recovery import Retrained, restore, retrain_stage, worst
from areal_tasks.engines.starting import ready
from areal_tasks.engines.trainer.commands import Keep
from areal_tasks.engines.trainer_client import TrainerClient, TrainerDown
from areal_tasks.engines.watchdog import Watchdog
from areal_tasks.launchers.supervisor import ServiceFailed, Supervisor
from areal_tasks.store.backend import Unavailable
from areal_tasks.store.runs import Run
from schemas.manifest import StageManifest, WeightsRef

log = logging.getLogger(__name__)


class ResidentTrainer:
    """The trainer that runs as the service `name`, for one thread at a time.

    `initial` names version 0. `make_room` is called before the trainer takes memory.
    """

    def __init__(
        self,
        run: Run,
        name: str,
        supervisor: Supervisor,
        watchdog: Watchdog,
        initial: Callable[[], WeightsRef],
        make_room: Callable[[], None],
    ) -> None:
        self.run = run
        self.name = name
        self.supervisor = supervisor
        self.watchdog = watchdog
        self.client: TrainerClient | None = None  # of the process that was last asked for something
        self._initial = initial
        self._make_room = make_room
        self._address = ""
        self._lock = threading.RLock()
        self._retrained: list[Retrained] = []

    def close(self) -> None:
        """Close the connection."""
        if self.client is not None:
            self.client.close()

    def at(self, version: int) -> TrainerClient:
        """The trainer, holding the policy of `version`: as it stands, or restored if it does not."""
        with self._alone() as client:
            return self._holding(client, version, version)

    def to_step(self, version: int) -> TrainerClient:
        """As `at`, or one step on: it may have stepped and its answer been lost, which it then repeats."""
        with self._alone() as client:
            return self._holding(client, version, version, version + 1)

    def after(self, train: StageManifest) -> TrainerClient:
        """The trainer, holding the policy that a train stage made, whose iteration need not be committed yet."""
        with self._alone() as client:
            return self._after(client, train)

    def keeping(self, train: StageManifest) -> TrainerClient:
        """The trainer, with the weights that a train stage made: in its policy, or kept since."""
        with self._alone() as client:
            health, version = client.health(), train.iteration + 1
            return client if version in (health.kept, health.version) else self._after(client, train)

    def keep(self, train: StageManifest) -> None:
        """Have the trainer keep a copy of what a train stage made, so that it may train on while that is published.

        Where it ends meanwhile, `keeping` makes that again.
        """
        version = train.iteration + 1
        try:
            with self._alone() as client:
                self._after(client, train).keep(Keep(owner=self.run.owner, version=version))
        except TrainerDown as error:
            log.warning("version %d is made again to be published: %s", version, error)

    def restored(self, version: int) -> Retrained | None:
        """Bring the trainer to `version` now; how what was re-trained for it compares, none if nothing was."""
        with self._alone() as client:
            before = len(self._retrained)
            self._holding(client, version, version)
            return worst(self._retrained[before:]) if self._retrained[before:] else None

    def take_retrained(self) -> Retrained | None:
        """The largest differences of all that was re-trained since this was last asked; none if nothing was."""
        with self._lock:
            found, self._retrained = self._retrained, []
        return worst(found) if found else None

    def drop(self) -> None:
        """Forget the policy in memory: another writer's train stage was committed instead of ours."""
        with self._alone() as client:
            restore(self.run, client, self._initial(), 0)

    def tend(self) -> None:
        """Start the process again if it has ended; whoever needs it is told what is wrong."""
        with suppress(ServiceFailed, Unavailable):
            self.supervisor.look([self.name])

    @contextmanager
    def _alone(self) -> Iterator[TrainerClient]:
        """A connection to the process, which no other thread brings to another version meanwhile."""
        self._make_room()  # it may wait for servers, which may wait for this trainer's weights: not within the lock
        with self._lock:
            yield self._connected()

    def _connected(self) -> TrainerClient:
        [url] = ready(self.supervisor, self.watchdog, [self.name])
        if self.client is None or self._address != url:
            self.close()
            distrust = partial(self.supervisor.end, [url])
            self.client = TrainerClient(url, self.supervisor.token, watchdog=self.watchdog, distrust=distrust)
            self._address = url
        return self.client

    def _holding(self, client: TrainerClient, version: int, *welcome: int) -> TrainerClient:
        if (held := client.health().version) not in welcome:
            now = "nothing" if held is None else f"version {held}"
            log.info("the trainer holds %s; loading version %d", now, version)
            self._note(restore(self.run, client, self._initial(), version))
        return client

    def _after(self, client: TrainerClient, train: StageManifest) -> TrainerClient:
        if client.health().version != train.iteration + 1:
            self._holding(client, train.iteration, train.iteration)
            self._note(retrain_stage(self.run, client, train))
        return client

    def _note(self, found: Retrained | None) -> None:
        if found is not None:
            self._retrained.append(found)
