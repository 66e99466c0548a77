"""Trains with `fsdp2` on a lone rank, the whole model at once and a layer at a time; writes FOLDER/found.json.

    python -m tests.trainer.lone_rank FOLDER

Of either way: how many parts there were, a digest of every bit that an iteration left, of those that the next one left,
and of those that it left when it began with the checkpoint of the other way.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from areal_tasks.data.scratch import make_scratch
from areal_tasks.engines.trainer.checkpoint import Progress
from areal_tasks.engines.trainer.fsdp2 import ROOMY, Fsdp2Backend, whole
from areal_tasks.engines.trainer.learner import Learner
from areal_tasks.engines.trainer.plan import make_plan
from areal_tasks.engines.trainer.policy import Policy
from areal_tasks.engines.trainer.rows import grpo_batch
from areal_tasks.engines.trainer.settings import Settings, read_settings
from tests.checkpoints import save
from tests.trainer.trainer_builders import TINY, advantage, rlhf_recipe, rollout

LENGTHS = [9, 4, 13, 6, 11, 3, 8, 2, 10, 7, 12, 5]


class ByLayer(Fsdp2Backend):
    """A rank with room between passes, and a model that is not small."""

    def _has_room(self, policy: Policy, bytes_each: int, share: float) -> bool:
        return share == ROOMY


def learn(backend: Fsdp2Backend, settings: Settings, progress: Progress) -> tuple[Progress, str]:
    """One iteration of two minibatches of several passes; where that led, and a digest of what it left."""
    table = rollout(LENGTHS)
    batch = grpo_batch({"rollout": table, "advantage": advantage(table)}, 0)
    learned = Learner(backend, settings, batch, make_plan(batch, settings, 0)).learn(0, progress)
    assert min(learned.train_steps["micro_batches"].to_pylist()) > 2
    digest = hashlib.sha256(repr(learned.train_steps.drop_columns(["step_seconds", "peak_bytes"]).to_pydict()).encode())
    for parameter in backend.models["policy"].parameters():
        digest.update(whole(parameter.detach()).numpy().tobytes())
    return learned.progress, digest.hexdigest()


def play(kind: type[Fsdp2Backend], folder: Path, settings: Settings) -> dict[str, Any]:
    """Load, learn, save."""
    backend = kind(settings.trainer, settings.model)
    backend.load(folder / "model", 0)
    progress, digest = learn(backend, settings, Progress())
    save(backend.plan_checkpoint(folder / kind.__name__, progress))
    return {"parts": len(backend.parts), "digest": digest, "after": learn(backend, settings, progress)[1]}


def resumed(kind: type[Fsdp2Backend], checkpoint: Path, settings: Settings) -> str:
    """What the next iteration leaves after a start from `checkpoint`."""
    backend = kind(settings.trainer, settings.model)
    backend.load(checkpoint.parent / "model", 0)
    return learn(backend, settings, backend.load_checkpoint(checkpoint, lambda names: None))[1]


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    recipe = rlhf_recipe(trainer={"backend": "fsdp2", "layout": "padded", "micro_batch_tokens": 16})
    recipe["model"]["dtype"] = "bfloat16"
    settings = read_settings(recipe)
    make_scratch(TINY, 7, 64, folder / "model")
    with patch.object(torch.cuda, "is_available", return_value=False):
        found = {kind.__name__: play(kind, folder, settings) for kind in (Fsdp2Backend, ByLayer)}
        found["Fsdp2Backend"]["resumed"] = resumed(Fsdp2Backend, folder / "ByLayer", settings)
        found["ByLayer"]["resumed"] = resumed(ByLayer, folder / "Fsdp2Backend", settings)
    dist.destroy_process_group()
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
