"""Restores a trainer: the newest checkpoint, then the committed iterations after it, from the tables they read.

No generation is repeated. Each replayed iteration's loss is compared with the committed one, and the largest
difference is logged: 0 where training is bit-reproducible.
"""

from __future__ import annotations

import logging

from areal_tasks.engines.trainer.commands import Load, Train
from areal_tasks.engines.trainer_client import TrainerClient
from areal_tasks.store.runs import Run
from schemas.manifest import IterationCommit, StageManifest, WeightsRef

log = logging.getLogger(__name__)


def restore(run: Run, trainer: TrainerClient, initial: WeightsRef, version: int) -> None:
    """Bring the trainer to the policy of `version`, all of whose iterations are committed."""
    checkpoint = newest_checkpoint(run, version)
    loaded = trainer.load(
        Load(owner=run.owner, version=checkpoint.version if checkpoint else 0, weights=initial, checkpoint=checkpoint)
    )
    drift = [replay(run, trainer, k) for k in range(loaded.version, version)]
    if drift:
        log.info("re-trained %d committed iterations; largest difference in a loss: %.3g", len(drift), max(drift))


def newest_checkpoint(run: Run, version: int) -> WeightsRef | None:
    """The newest checkpoint at or before `version`."""
    return None if version == 0 else run.commit(version - 1).checkpoint


def replay(run: Run, trainer: TrainerClient, iteration: int) -> float:
    """Re-train one committed iteration by its recorded plan; how far its loss is from the committed one."""
    manifest = stage_of(run, run.commit(iteration), "train")
    done = trainer.train(replay_command(run, manifest))
    return abs(done.metrics["loss"] - manifest.metrics["loss"])


def replay_command(run: Run, manifest: StageManifest) -> Train:
    """The command that makes the steps of a committed train stage again, writing nothing."""
    tables = {n: t for ref in manifest.inputs for n, t in run.read_manifest(ref.path).tables.items()}
    return Train(
        owner=run.owner,
        version=manifest.iteration,
        digest=manifest.key,
        kind="sft" if "batch" in tables else "grpo",
        iteration=manifest.iteration,
        iterations=run.recipe_at(manifest.iteration)["schedule"]["iterations"],
        tables=tables,
        plan=manifest.tables["train_samples"],
    )


def stage_of(run: Run, commit: IterationCommit, stage: str) -> StageManifest:
    """The stage manifest that a commit selects. Raises StopIteration if it selects none."""
    return run.read_stage(next(ref for ref in commit.stages if ref.stage == stage))
