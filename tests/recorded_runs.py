"""Runs that earlier versions recorded (tests/fixtures), and the recipes by which a user would resume them now."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any, Final

from stage_driver import store_in, tiny, tiny_sft

from areal_tasks.store.backend import Store
from schemas.recipe.recipe import Recipe

FIXTURES: Final = Path(__file__).parent / "fixtures"
_SMALL: Final[dict[str, dict[str, Any]]] = {
    "rollout": {"groups": 2, "group_size": 4},
    "evaluation": {"every": 0, "limit": 0, "max_new_tokens": 256},
    "schedule": {"iterations": 3},
}


def recipes() -> dict[str, Recipe]:
    """The recipe of each run, by name: its YAML file, with today's defaults for fields that the file does not set."""
    in_reward = {"minibatches": 1, "kl": "reward", "kl_coef": 0.1, "max_logprob_gap": 1.0}
    return {
        "grpo": tiny(trainer={"recover_within_seconds": 1e-6}, **_SMALL),
        "kl": tiny(model={"dtype": "bfloat16"}, algorithm=in_reward, **_SMALL),
        "sft": tiny_sft(trainer={"weight_decay": 0.1}),
    }


def recipes_ahead() -> dict[str, Recipe]:
    """As `recipes`, of the asynchronous runs. Their files have the names that fields had before they were renamed."""
    sections = _SMALL | {"rollout": {**_SMALL["rollout"], "max_head_offpolicyness": 2, "flush_seconds": 0.0}}
    capped = {"behaviour_cap": 3.0, "behaviour_level": "sequence", "max_logprob_gap": 9.0}
    bounds = {"behaviour_bound": "mask", "behaviour_low": 0.4, "behaviour_high": 4.0, "max_logprob_gap": 9.0}
    masked = bounds | {"kl": "none", "kl_coef": 0.0, "minibatches": 1}
    return {name: tiny(algorithm=named, **sections) for name, named in (("cap", capped), ("mask", masked))}


def unpack(folder: Path, made: str = "schema-2") -> Store:
    """The store of `folder`, with the recorded runs in it."""
    with tarfile.open(FIXTURES / made / "runs.tar.xz") as archive:
        archive.extractall(folder / "store", filter="data")
    return store_in(folder)
