"""What new weights must do to a server: a mixture of experts', and the proof that every tensor arrives.

`make_experts` writes a tiny Qwen3-MoE with random weights. Its experts matter: with others its logprobs are half a nat
off on average, where bfloat16 alone makes a hundredth.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil
import pytest
import torch
from listeners import beyond_loopback, listening
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from areal_tasks.data.scratch import character_tokenizer
from areal_tasks.engines.access import Access
from areal_tasks.engines.client import InferenceClient
from areal_tasks.engines.loop_thread import LoopThread
from areal_tasks.engines.proof import Proof
from areal_tasks.engines.trainer.local import LocalBackend
from areal_tasks.engines.trainer.snapshot import Snapshot
from areal_tasks.store.backend import open_store
from schemas.errors import UserError
from schemas.recipe.sections import Inference, Model
from schemas.recipe.training import Trainer
from tests.sglang.contract import logprobs_of, new_weights_have_their_version_and_their_logprobs
from tests.sglang.contract_target import Target, reference

CHARACTERS = "0123456789+=abcdefghijklmnopqrstuvwxyz"


def make_experts(folder: Path, max_length: int, experts: int = 4) -> Path:
    """Model and tokenizer of two layers, in `folder`."""
    tokenizer = character_tokenizer(CHARACTERS, max_length)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=256, moe_intermediate_size=128,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=experts,
        num_experts_per_tok=2, norm_topk_prob=True, max_position_embeddings=max_length, initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def published(folder: Path, into: Path, dtype: str) -> Path:
    """The same model with other experts, as a trainer publishes it."""
    shutil.copytree(folder, into, ignore=shutil.ignore_patterns("*.safetensors"))
    backend = LocalBackend(Trainer(), Model(path="m", dtype=dtype))  # type: ignore[arg-type]
    backend.load(folder, 0)
    with torch.no_grad():
        for name, parameter in backend.models["policy"].named_parameters():
            if ".experts." in name:
                parameter.neg_()
    snapshot = Snapshot()
    snapshot.take(1, backend.master.names.to_checkpoint(backend.named_weights()))
    snapshot.save(open_store(into.parent.as_uri()), into.name, {})
    return into


def new_experts_are_generated_with(t: Target) -> None:
    version, prompt = int(t.version), t.prompt(95)
    try:
        assert t.update(t.other, version + 1).json()["success"]
        [found] = t.generate([prompt], max_new_tokens=24, ignore_eos=True)
        t.assert_close(logprobs_of(found), reference(t.other, prompt, found["output_ids"], 1.0))
        old = reference(t.folder, prompt, found["output_ids"], 1.0)
        gaps = [abs(a - b) for a, b in zip(logprobs_of(found), old, strict=True)]
        assert sum(gaps) / len(gaps) > 4 * t.mean_gap, "with the old experts they would be others"
    finally:
        assert t.update(t.folder, version).json()["success"]


# ── SGLang alone ────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def proving(t: Target) -> Iterator[Any]:
    """What loads a folder as a version and proves that all of it arrives."""
    loop = LoopThread()
    client = InferenceClient([t.url], Access(t.token), Inference(engine="sglang"))
    try:

        def load(folder: Path, version: int) -> list[float]:
            return Proof(loop.run, due=True).of(client, lambda: loop.run(client.update_weights(str(folder), version)))

        yield load
    finally:
        loop.run(client.close())
        loop.stop()


def every_tensor_comes_from_the_weights(t: Target) -> None:
    version, prompt = int(t.version), t.prompt(96)
    with proving(t) as load:
        try:
            assert len(load(t.other, version + 1)) == 1
            [found] = t.generate([prompt], max_new_tokens=12)
            t.assert_close(logprobs_of(found), reference(t.other, prompt, found["output_ids"], 1.0))
        finally:
            load(t.folder, version)
    [found] = t.generate([prompt], max_new_tokens=12)
    t.assert_logprobs(prompt, found["output_ids"], logprobs_of(found), 1.0)


def its_processes_listen_on_loopback_alone(t: Target) -> None:
    """Neither HTTP, nor what its processes tell each other, can be reached by other machines."""
    family = [psutil.Process(t.process)]
    port = httpx.URL(t.url).port
    assert [a for held in listening(family).values() for a in held if a.endswith(f" port {port}")], (
        "what serves is seen"
    )
    assert beyond_loopback(family) == {}


def _left_out(t: Target, named: str, tensors: dict[str, torch.Tensor]) -> None:
    """Weights of these tensors are refused by the proof, which names one that they leave as it was."""
    version, prompt = int(t.version), t.prompt(97)
    with TemporaryDirectory() as folder, proving(t) as load:
        shutil.copytree(t.folder, folder, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True)
        save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        try:
            with pytest.raises(UserError, match=named):
                load(folder, version + 1)
        finally:
            assert t.update(t.folder, version).json()["success"]
    [found] = t.generate([prompt], max_new_tokens=12)
    t.assert_logprobs(prompt, found["output_ids"], logprobs_of(found), 1.0)


def a_tensor_that_is_left_out_is_noticed(t: Target) -> None:
    files = sorted(t.folder.glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    _left_out(
        t,
        r"these have changed: model\.layers\.0\.self_attn\.qkv_proj\.weight\.",
        {name: tensor for name, tensor in tensors.items() if "layers.0.self_attn.k_proj.weight" not in name},
    )


def experts_under_transformers_own_names_are_noticed(t: Target) -> None:
    """As earlier versions of this program published them."""
    model = AutoModelForCausalLM.from_pretrained(t.other)
    own = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert "model.layers.0.mlp.experts.gate_up_proj" in own
    _left_out(t, r"model\.layers\.0\.mlp\.experts\.w13_weight, .*w2_weight", own)


EXPERT_CASES = (new_weights_have_their_version_and_their_logprobs, new_experts_are_generated_with)
PROOF_CASES = (every_tensor_comes_from_the_weights, a_tensor_that_is_left_out_is_noticed)
SGLANG_CASES = (*PROOF_CASES, its_processes_listen_on_loopback_alone)
SGLANG_EXPERT_CASES = (*PROOF_CASES, experts_under_transformers_own_names_are_noticed)
