"""What a recipe may say about SGLang servers."""

from __future__ import annotations

import pytest

from schemas.errors import UserError
from schemas.recipe.load import load_recipe


def test_further_ports_are_for_loopback_only() -> None:
    flags = ["inference.flags={kv_events_config: x}"]
    load_recipe("gsm8k", flags)  # with launcher.network: tests/recipes/test_checks.py


def test_memory_is_handed_over_only_on_shared_gpus() -> None:
    shared = ["inference.release_memory=true", "inference.gpus=[0]", "trainer.gpus=[0]"]
    load_recipe("gsm8k", shared)


def test_sft_counts_its_gpus_too() -> None:
    with pytest.raises(UserError, match=r"trainer\.gpus: names 3 GPUs for 2 ranks"):
        load_recipe("sft-gsm8k", ["trainer.gpus=[0,1,2]", "trainer.ranks=2"])


@pytest.mark.parametrize("override", ["inference.release_memory=true", "inference.transport=nccl"])
def test_an_evaluation_trains_nothing(override: str) -> None:
    with pytest.raises(UserError, match="has no effect in an evaluate recipe"):
        load_recipe("evaluate-gsm8k", [override])


def test_a_full_set_of_settings_is_taken() -> None:
    given = ["servers=2", "tensor_parallel=2", "gpus=[0,1,2,3]", "memory_fraction=0.6", "first_port=30000"]
    flags = "inference.flags={attention-backend: triton, disable-prefill-cuda-graph: true, cuda-graph-bs: [1, 8]}"
    recipe = load_recipe("gsm8k", [*(f"inference.{item}" for item in given), flags])
    assert recipe.inference.flags["cuda-graph-bs"] == [1, 8]


@pytest.mark.parametrize("launcher", ["type: ray, network: 10.0.0.0/24, trust_network: true", "type: local"])
def test_a_server_may_be_split_over_machines_that_trust_each_other_or_are_one(launcher: str) -> None:
    load_recipe("gsm8k", ["inference.tensor_parallel=4", "inference.nodes=2", f"launcher={{{launcher}}}"])
