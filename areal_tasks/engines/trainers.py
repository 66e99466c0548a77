"""A resident trainer: waits for its process and brings it to the version that is asked for.

What the trainer holds in memory is never assumed: each use names the version that it expects. A trainer that does not
hold it, such as a new process, is restored from the last checkpoint by retraining the committed iterations after it
from their tables.
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

    `initial` returns the weights of version 0. `make_room` is called before the trainer allocates memory.
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
        self.client: TrainerClient | None = None  # of the process that was last used
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
        """The trainer, holding the policy of `version`; restored if necessary."""
        with self._locked() as client:
            return self._holding(client, version, version)

    def to_step(self, version: int) -> TrainerClient:
        """As `at`, or one version further: the answer to its step may be lost, which the trainer then repeats."""
        with self._locked() as client:
            return self._holding(client, version, version, version + 1)

    def after(self, train: StageManifest) -> TrainerClient:
        """The trainer, holding the policy that a train stage made; its iteration need not be committed yet."""
        with self._locked() as client:
            return self._after(client, train)

    def keeping(self, train: StageManifest) -> TrainerClient:
        """The trainer, with the weights that a train stage made: as its policy, or as the copy that it keeps."""
        with self._locked() as client:
            health, version = client.health(), train.iteration + 1
            return client if version in (health.kept, health.version) else self._after(client, train)

    def keep(self, train: StageManifest) -> None:
        """Have the trainer keep a copy of the weights that a train stage made, to train on while they are published.

        If the trainer ends meanwhile, `keeping` makes them again.
        """
        version = train.iteration + 1
        try:
            with self._locked() as client:
                self._after(client, train).keep(Keep(owner=self.run.owner, version=version))
        except TrainerDown as error:
            log.warning("version %d has to be made again for its publication: %s", version, error)

    def restored(self, version: int) -> Retrained | None:
        """Bring the trainer to `version`. Returns how retrained iterations compare; None if none was retrained."""
        with self._locked() as client:
            before = len(self._retrained)
            self._holding(client, version, version)
            return worst(self._retrained[before:]) if self._retrained[before:] else None

    def take_retrained(self) -> Retrained | None:
        """The largest differences of all retraining since the last call; None if there was none."""
        with self._lock:
            found, self._retrained = self._retrained, []
        return worst(found) if found else None

    def drop(self) -> None:
        """Discard the policy in memory, because another writer's train stage was committed instead of this one's."""
        with self._locked() as client:
            restore(self.run, client, self._initial(), 0)

    def tend(self) -> None:
        """Restart the process if it has ended. A failure is raised at the next use, not here."""
        with suppress(ServiceFailed, Unavailable):
            self.supervisor.look([self.name])

    @contextmanager
    def _locked(self) -> Iterator[TrainerClient]:
        """A connection to the process. Inside, no other thread brings the trainer to another version."""
        self._make_room()  # without the lock: it may wait for servers, which may wait for this trainer's weights
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

    def _holding(self, client: TrainerClient, version: int, *accepted: int) -> TrainerClient:
        if (held := client.health().version) not in accepted:
            now = "no policy loaded" if held is None else f"the trainer holds version {held}"
            log.info("%s; restoring version %d", now, version)
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
