"""Runs that an earlier version recorded (tests/fixtures), and the recipes by which a person would resume them now."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any, Final

from stage_driver import store_in, tiny, tiny_sft

from areal_tasks.store.backend import Store
from schemas.recipe.recipe import Recipe

RUNS: Final = Path(__file__).parent / "fixtures" / "schema-2" / "runs.tar.xz"
_SMALL: Final[dict[str, dict[str, Any]]] = {
    "rollout": {"groups": 2, "group_size": 4},
    "evaluation": {"every": 0, "limit": 0, "max_new_tokens": 256},
    "schedule": {"iterations": 3},
}


def recipes() -> dict[str, Recipe]:
    """By the name of the run: what its YAML file says, with today's defaults for what it does not say."""
    in_reward = {"minibatches": 1, "kl": "reward", "kl_coef": 0.1, "max_logprob_gap": 1.0}
    return {
        "grpo": tiny(trainer={"recover_within_seconds": 1e-6}, **_SMALL),
        "kl": tiny(model={"dtype": "bfloat16"}, algorithm=in_reward, **_SMALL),
        "sft": tiny_sft(trainer={"weight_decay": 0.1}),
    }


def unpack(folder: Path) -> Store:
    """The store of `folder`, with the recorded runs in it."""
    with tarfile.open(RUNS) as archive:
        archive.extractall(folder / "store", filter="data")
    return store_in(folder)
