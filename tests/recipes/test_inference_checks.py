"""What a recipe may say about SGLang servers."""

from __future__ import annotations

import pytest

from schemas.errors import UserError
from schemas.recipe.load import load_recipe


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("inference.flags={api-key: x}", "a recipe cannot set api-key; leave it out, since the bearer token"),
        ("inference.flags={tp_size: 2}", "a recipe cannot set tp_size; set inference.tensor_parallel instead"),
        ("inference.flags={random-seed: 2}", "a recipe cannot set random-seed; set seed instead"),
        ("inference.flags={host: 0.0.0.0}", "a recipe cannot set host; leave it out, since the service sets it"),
        ("inference.flags={--host: 0.0.0.0}", "a recipe cannot set --host"),
        ("inference.flags={ssl-keyfile: k}", "a recipe cannot set ssl-keyfile; leave it out, since the service sets"),
        ("inference.flags={--log-level: info}", "write log-level without the dashes"),
        ("inference.flags={disable-radix-cache: false}", "disable-radix-cache: false has no effect; leave it"),
        ("inference.gpus=[0]", "names 1, but 2 servers of 2 GPUs each need 4"),
        ("inference.gpus=[0,0,1,2]", "one server's GPUs must differ"),
        ("trainer.gpus=[0,1]", "names 2 GPUs for 1 ranks"),
        ("inference.first_port=65535", "2 servers from 65535 need ports to 65536"),
        ("launcher.type=inline", "SGLang needs processes; use local"),
    ],
)
def test_what_cannot_be(override: str, reason: str) -> None:
    with pytest.raises(UserError) as refused:
        load_recipe("gsm8k", ["inference.servers=2", "inference.tensor_parallel=2", override])
    assert reason in str(refused.value)


def test_further_ports_are_for_loopback_only() -> None:
    flags = ["inference.flags={kv_events_config: x}"]
    load_recipe("gsm8k", flags)
    with pytest.raises(UserError, match=r"cannot set kv_events_config with launcher\.network; leave it out, since"):
        load_recipe("gsm8k", [*flags, "launcher.type=slurm", "launcher.network=10.0.0.0/24"])


def test_memory_is_handed_over_only_on_shared_gpus() -> None:
    shared = ["inference.release_memory=true", "inference.gpus=[0]", "trainer.gpus=[0]"]
    load_recipe("gsm8k", shared)
    with pytest.raises(UserError, match=r"release_memory: has no effect, since inference\.gpus and trainer\.gpus"):
        load_recipe("gsm8k", [*shared, "trainer.gpus=[1]"])


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
