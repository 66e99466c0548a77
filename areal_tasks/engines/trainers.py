"""A resident trainer: waits for its process and brings it to the version that is asked for.

Each use names the version that the trainer must hold. A trainer that does not hold it, such as a new process, is
restored from the last checkpoint by retraining the committed iterations after it from their tables. No generation is
repeated. The metrics of each retrained iteration are compared with the committed ones, and the resulting weights with
the published ones: they are identical if training is bitwise reproducible.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from areal_tasks.engines.starting import ready
from areal_tasks.engines.trainer.commands import Compare, Compared, Done, Keep, Load, Train, Trained
from areal_tasks.engines.trainer.rows import COLUMNS
from areal_tasks.engines.trainer_client import TrainerClient, TrainerDown
from areal_tasks.engines.watchdog import Watchdog
from areal_tasks.launchers.supervisor import Supervisor
from areal_tasks.store.backend import StoreError
from areal_tasks.store.keys import combine_digests
from areal_tasks.store.reachable import written_weights
from areal_tasks.store.runs import Run
from schemas.manifest import InputRef, IterationCommit, StageManifest, WeightsRef

log = logging.getLogger(__name__)


@dataclass(eq=False)
class ResidentTrainer:
    """The trainer that runs as the services `names`, one on each of its machines. One thread uses it at a time.

    The first service listens.

    `initial` returns the weights of version 0. `make_room` is called before the trainer works, with whether it has its
    memory already.
    """

    run: Run
    names: Sequence[str]
    supervisor: Supervisor
    watchdog: Watchdog
    initial: Callable[[], WeightsRef]
    make_room: Callable[[bool], None]
    client: TrainerClient | None = None  # of the process that was last used
    #: Whether the trainer's weights are those that servers have of its version: not after retraining that differs.
    matches_servers: bool = True
    _address: str = ""
    _retrained: list[Retrained] = field(default_factory=list)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def close(self) -> None:
        if self.client is not None:
            self.client.close()

    def replace(self, names: Sequence[str], start: Callable[[], None]) -> None:
        """Stop the services, which nothing uses now, and `start` others. They are restored when they are next used."""
        with self._lock:
            self.supervisor.retire(self.names[0])
            self.names = names
            start()

    def at(self, version: int, *accepted: int) -> TrainerClient:
        """The trainer, holding the policy of `version`, restored if necessary, or of one of the `accepted` versions."""
        with self._locked() as client:
            return self._holding(client, version, *accepted)

    def after(self, train: StageManifest) -> TrainerClient:
        """The trainer, holding the policy that a train stage made; its iteration need not be committed yet."""
        with self._locked() as client:
            return self._after(client, train)

    def as_it_is(self) -> TrainerClient:
        """The trainer, whatever it holds."""
        with self._lock:
            return self._connected()

    def keeping(self, train: StageManifest) -> TrainerClient:
        """The trainer, with the weights that a train stage made: as its policy, or as the copy that it keeps."""
        with self._locked() as client:
            health, version = client.health(), train.iteration + 1
            return client if version in (health.kept, health.version) else self._after(client, train)

    def keep(self, train: StageManifest) -> None:
        """Have the trainer keep a copy of these weights, to train on while they are published: see `keeping`."""
        version = train.iteration + 1
        try:
            with self._locked() as client:
                self._after(client, train).run(Keep(owner=self.run.owner, version=version), Done)
        except TrainerDown as error:
            log.warning("version %d has to be retrained for its publication: %s", version, error)

    def restored(self, version: int) -> Retrained | None:
        """Bring the trainer to `version`. Returns how all retraining since the last commit compares; None if none.

        If it differs, the caller gives the servers these weights, and calls again if that fails.
        """
        with self._locked() as client:
            self._holding(client, version)
            self.matches_servers = True
            return worst(self._retrained) if self._retrained else None

    def take_retrained(self) -> Retrained | None:
        """The largest differences of all retraining since the last call; None if there was none."""
        with self._lock:
            found, self._retrained, self.matches_servers = self._retrained, [], True
        return worst(found) if found else None

    def discard_policy(self) -> None:
        """Discard the policy in memory, because another writer's train stage was committed instead of this one's."""
        with self._locked() as client:
            restore(self.run, client, self.initial(), 0)

    @contextmanager
    def _locked(self) -> Iterator[TrainerClient]:
        """A connection to the process. Inside, no other thread brings the trainer to another version."""
        with self._lock:
            loaded = self._connected().health().version is not None
        self.make_room(loaded)  # without the lock: it may wait for servers, which may wait for this trainer's weights
        with self._lock:
            yield self._connected()

    def _connected(self) -> TrainerClient:
        url, *_ = ready(self.supervisor, self.watchdog, self.names)
        if self.client is None or self._address != url:
            self.close()
            on_broken = partial(self.supervisor.end, [url])
            self.client = TrainerClient(self.names[0], url, self.supervisor.access, self.watchdog, on_broken)
            self._address = url
        return self.client

    def _holding(self, client: TrainerClient, version: int, *accepted: int) -> TrainerClient:
        if (held := client.health().version) not in (version, *accepted):
            now = "no policy loaded" if held is None else f"the trainer holds version {held}"
            log.info("%s; restoring version %d", now, version)
            if (found := restore(self.run, client, self.initial(), version)) is not None:
                self._record(found)
        return client

    def _after(self, client: TrainerClient, train: StageManifest) -> TrainerClient:
        if client.health().version != train.iteration + 1:
            self._holding(client, train.iteration)
            self._record(retrain_stage(self.run, client, train))
        return client

    def _record(self, found: Retrained) -> None:
        self._retrained.append(found)
        self.matches_servers = self.matches_servers and found.same_weights


# ── retraining ──────────────────────────────────────────────────────────────────────────────────────────────────────


_TIMES: Final = "_seconds"  # suffix of metrics that are times, which are not compared


@dataclass(frozen=True)
class Retrained:
    """How the results of retraining `iterations` committed iterations from `first` on differ from the committed ones.

    `difference` is the largest of a metric (see `difference`), which `metric` and `iteration` identify; `weights` is
    the largest difference between a weight and the published one of the version, None where that is not stored;
    `loss` is the largest difference of the loss.
    """

    first: int
    iterations: int
    difference: float
    metric: str
    iteration: int
    weights: float | None = None
    loss: float = 0.0

    @property
    def same(self) -> bool:
        """Whether retraining reproduced all compared metrics and weights exactly."""
        return self.difference == 0 and not self.weights

    @property
    def same_weights(self) -> bool:
        """Whether it reproduced the published weights; by the metrics where these are not stored."""
        return self.difference == 0 if self.weights is None else self.weights == 0


def restore(run: Run, trainer: TrainerClient, initial: WeightsRef, version: int) -> Retrained | None:
    """Bring the trainer to a committed `version`; returns how what was retrained compares, None if nothing was."""
    checkpoint = run.commit(version - 1).checkpoint if version else None
    first = checkpoint.version if checkpoint else 0
    trainer.run(Load(owner=run.owner, version=first, weights=initial, checkpoint=checkpoint), Done)
    if first >= version:
        return None
    source = run
    while source.record.replay_until and source.parent is not None:  # it does not train: the run that it replays did
        source = replace(source.parent, owner=run.owner)
    commits = map(source.commit, range(first, version))
    drift = [retrain_stage(source, trainer, stage_of(source, commit, "train"), commit) for commit in commits]
    ref, apart = written_weights(run, run.commit(version - 1)), None
    if ref.written:
        apart = trainer.run(Compare(owner=run.owner, version=version, weights=ref), Compared).difference
    found = replace(worst(drift), first=first, iterations=len(drift), weights=apart)
    log.log(logging.INFO if found.same else logging.WARNING, "%s", describe(found))
    return found


def describe(found: Retrained) -> str:
    """A line for the log."""
    line = f"retrained {found.iterations} committed iterations; largest difference in a metric: {found.difference:.3g}"
    if found.difference:
        line += f" ({found.metric} of iteration {found.iteration}), in the loss: {found.loss:.3g}"
    return line if found.weights is None else f"{line}; in a weight: {found.weights:.3g}"


def worst(several: Iterable[Retrained]) -> Retrained:
    """The largest differences of all parts; `first` and `iterations` are those of the part with most iterations."""
    parts = list(several)
    largest = max(parts, key=lambda part: part.difference)
    longest = max(parts, key=lambda part: part.iterations)
    weights = [part.weights for part in parts if part.weights is not None]
    found = replace(largest, weights=max(weights, default=None), loss=max(part.loss for part in parts))
    return replace(found, first=longest.first, iterations=longest.iterations)


def retrain_stage(
    run: Run, trainer: TrainerClient, manifest: StageManifest, commit: IterationCommit | None = None
) -> Retrained:
    """Repeat a train stage by its recorded plan, and compare its metrics. Its iteration need not have a `commit`."""
    done = trainer.run(retrain_command(run, manifest, commit), Trained)
    largest, name = difference(manifest.metrics, done.metrics)
    loss = _distance(manifest.metrics.get("loss", 0.0), done.metrics.get("loss", 0.0))
    return Retrained(manifest.iteration, 1, largest, name, manifest.iteration, loss=loss)


def difference(committed: Mapping[str, float], again: Mapping[str, float]) -> tuple[float, str]:
    """The largest difference between the committed and the retrained metrics, times excepted, and the metric's name.

    Absolute up to 1, relative above. Infinite where a committed metric is missing, or NaN on one side only. A metric
    that was not committed is ignored: the program version that committed the iteration did not have it.
    """
    names = sorted(name for name in committed if not name.endswith(_TIMES))
    distances = {name: _distance(committed[name], again.get(name)) for name in names}
    name = max(distances, key=distances.__getitem__, default="")
    return distances.get(name, 0.0), name


def _distance(one: float, other: float | None) -> float:
    if other is None or math.isnan(one) != math.isnan(other):
        return math.inf
    if one == other or math.isnan(one):
        return 0.0
    return abs(one - other) / max(1.0, abs(one))


def retrain_command(run: Run, manifest: StageManifest, commit: IterationCommit | None = None) -> Train:
    """The command that repeats the optimizer steps of a committed train stage without writing tables."""
    written = {n: t for ref in manifest.inputs for n, t in read_input(run, ref, commit).tables.items()}
    tables = {name: table for name, table in written.items() if name in COLUMNS}
    return Train(
        owner=run.owner,
        version=manifest.iteration,
        digest=manifest.key,
        kind="sft" if "batch" in tables else "grpo",
        iteration=manifest.iteration,
        recipe=run.recipe_at(manifest.iteration),
        tables=tables,
        plan=manifest.tables["train_samples"],
    )


def read_input(run: Run, ref: InputRef, commit: IterationCommit | None) -> StageManifest:
    """The manifest of a stage's input, verified by its bytes if `commit` names it, else by its content digest.

    StoreError names the file that is not the one that was trained on.
    """
    named = next((stage for stage in commit.stages if stage.path == ref.path), None) if commit else None
    manifest = run.read_manifest(ref.path) if named is None else run.read_stage(named)
    tables = combine_digests({name: table.digest for name, table in manifest.tables.items()})
    if not manifest.digest == ref.digest == tables:
        raise StoreError(
            f"{run.store.uri(ref.path)} is damaged: its tables are not those that were trained on. "
            "Restore this file from a backup; every other file is unharmed."
        )
    return manifest


def stage_of(run: Run, commit: IterationCommit, stage: str) -> StageManifest:
    """The stage manifest that a commit selects. Raises StopIteration if it selects none."""
    return run.read_stage(next(ref for ref in commit.stages if ref.stage == stage))
