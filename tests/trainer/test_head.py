"""The chunked head against full logits in float64; packed attention; recomputed and compiled layers."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from warm_processes import output_of

from areal_tasks.algorithms.log_ratios import k3
from areal_tasks.data.batching import Layout, Sequences, make_layout, make_sequences
from areal_tasks.engines.trainer.attention import NAME, causal, one_by_one
from areal_tasks.engines.trainer.forward import to_device
from areal_tasks.engines.trainer.head import HeadTask, TokenHead, accumulate, kernels, score_chunks
from areal_tasks.engines.trainer.policy import PLAIN_HEADS, Policy, compiled, has_plain_head, prepare
from schemas.errors import UserError
from schemas.recipe.training import Trainer

CPU = torch.device("cpu")
VOCABULARY, HIDDEN = 11, 6
COMPILES = pytest.mark.slow("the compiler takes 10 s of CPU, and `trainer.compile` is for GPUs")


def clipped(old: Tensor) -> Any:
    """A loss like GRPO's: a clipped ratio, an advantage of either sign, a KL term, and the entropy as a statistic."""
    gain = torch.linspace(-1.5, 2.0, len(old), dtype=old.dtype)

    def loss(logprobs: Tensor, entropy: Tensor, part: slice) -> Tensor:
        ratio = torch.exp(logprobs - old[part])
        surrogate = -torch.minimum(ratio * gain[part], ratio.clamp(0.8, 1.2) * gain[part])
        return torch.stack([surrogate + 0.3 * k3(logprobs, old[part]), entropy.to(ratio.dtype), ratio.detach()])

    return loss


def problem(tokens: int, seed: int = 0, ties: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, targets and token weights in float64; with `ties`, all logits of a token are equal."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.ones_like(weight) if ties else weight
    targets = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    return hidden, weight, targets, torch.rand(tokens, generator=generator, dtype=torch.float64)


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies from full logits, by their definitions."""
    shares = torch.softmax(hidden @ weight.T / temperature, -1)
    return shares[torch.arange(len(targets)), targets].log(), -(shares * shares.log()).sum(-1)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 23), st.integers(16, 40), st.integers(0, 99), st.sampled_from([1.0, 0.6, 1.7]), st.booleans())
def test_loss_and_gradients_are_those_of_full_logits(
    tokens: int, chunk: int, seed: int, temperature: float, ties: bool
) -> None:
    hidden, weight, targets, weights = problem(tokens, seed, ties)
    loss = clipped(torch.randn(tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 2.5)
    wanted = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    values = loss(*plain(*wanted, targets, temperature), slice(None))
    (3.0 * (weights * values[0]).sum()).backward()
    for size in (chunk, 7, 1):
        found = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        head = head_of(found[1])
        total, rows = head(found[0], HeadTask(targets, temperature, size, weights=weights, loss=loss))
        (3.0 * total).backward()
        torch.testing.assert_close(rows, values.detach(), atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(total, (weights * values[0]).sum(), atol=1e-10, rtol=1e-10)
        for mine, other in zip((found[0].grad, head.weight.grad), (wanted[0].grad, wanted[1].grad), strict=True):
            torch.testing.assert_close(mine, other, atol=1e-10, rtol=1e-10)


def head_of(weight: Tensor) -> TokenHead:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    linear.weight = nn.Parameter(weight.detach().clone())
    return TokenHead(linear)


def test_scores_do_not_depend_on_the_chunks() -> None:
    hidden, weight, targets, _ = problem(20)
    logprobs, entropy = plain(hidden, weight, targets, 0.7)
    for size in (1, 6, 20, 99):
        found = score_chunks(hidden, weight, HeadTask(targets, 0.7, size))
        torch.testing.assert_close(found.logprobs, logprobs)
        torch.testing.assert_close(found.entropy, entropy)


def test_chunks_are_equal_and_within_their_bound() -> None:
    sizes = [c.stop - c.start for c in HeadTask(torch.zeros(100, dtype=torch.int64), 1.0, 33).chunks()]
    assert (sum(sizes), max(sizes), max(sizes) - min(sizes)) == (100, 25, 0)
    assert HeadTask(torch.zeros(0, dtype=torch.int64), 1.0, 33).chunks() == [slice(0, 0)]


def test_without_a_task_the_head_is_the_layer_it_replaces() -> None:
    linear = nn.Linear(HIDDEN, VOCABULARY, bias=False)
    head = TokenHead(linear)
    assert head.weight is linear.weight
    assert torch.equal(head(torch.ones(3, HIDDEN)), linear(torch.ones(3, HIDDEN)))


def test_a_second_backward_pass_fails_rather_than_lies() -> None:
    hidden, weight, targets, weights = problem(5)
    total, _ = head_of(weight)(hidden, HeadTask(targets, 1.0, 4, weights=weights, loss=clipped(weights)))
    total.backward(retain_graph=True)
    with pytest.raises((AttributeError, RuntimeError)):
        total.backward()


def test_a_frozen_weight_gets_no_gradient() -> None:
    hidden, weight, targets, weights = problem(5)
    head = head_of(weight).requires_grad_(False)
    states = hidden.clone().requires_grad_()
    head(states, HeadTask(targets, 1.0, 4, weights=weights, loss=clipped(weights)))[0].backward()
    assert states.grad is not None and states.grad.abs().sum() > 0
    assert head.weight.grad is None


def test_the_gradient_in_bf16_is_accumulated_in_fp32() -> None:
    """600 chunks of one token: summed in bf16, most of them would be lost."""
    total = torch.zeros(1, 1)
    for _ in range(600):
        accumulate(total, torch.ones(1, 1, dtype=torch.bfloat16), torch.ones(1, 1, dtype=torch.bfloat16))
    assert total.item() == 600


def test_a_target_that_is_ruled_out_leaves_its_entropy_finite() -> None:
    softmax, _ = kernels(False)
    found = softmax(torch.tensor([[0.0, 0.0, -torch.inf]]), torch.tensor([2]), 1.0)
    assert found.logprobs.item() == -torch.inf
    torch.testing.assert_close(found.entropy, torch.tensor([2.0]).log())


# ── models ──────────────────────────────────────────────────────────────────────────────────────────────────────────

SMALL = {
    "vocab_size": 24, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
LENGTHS = [7, 1, 12, 3, 9, 2]
MODEL: dict[str, Any] = {"atol": 1e-6, "rtol": 1e-5}  # their norms are in fp32, whatever the rest is


def make_model(kind: str, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**SMALL, **changes})
    return AutoModelForCausalLM.from_config(config, attn_implementation=NAME).double().eval()


def make_samples(lengths: list[int], seed: int = 0) -> Sequences:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, SMALL["vocab_size"], (sum(lengths),), generator=generator)
    return make_sequences(ids, torch.rand(len(ids), generator=generator) < 0.7, torch.tensor(lengths))


def token_loss(old: Tensor, layout: Layout) -> Any:
    """The clipped loss over flat columns, as a backend is given it."""
    return lambda logprobs, entropy, part: clipped(old)(logprobs, entropy, layout.where[part])


def by_definition(model: Any, samples: Sequences, old: Tensor, share: Tensor, temperature: float) -> Tensor:
    """The loss from the full logits of each sample by itself; leaves its gradient in the model."""
    total = torch.zeros((), dtype=torch.float64)
    for start, length in zip(samples.starts.tolist(), samples.lengths.tolist(), strict=True):
        ids = samples.input_ids[start : start + length]
        everywhere = torch.log_softmax(model(input_ids=ids[None]).logits[0] / temperature, -1)
        for i in range(1, length):
            if samples.counted[start + i]:
                part = slice(start + i, start + i + 1)
                values = clipped(old)(everywhere[i - 1, ids[i]][None], torch.zeros(1), part)
                total = total + share[start + i] * values[0, 0]
    if total.requires_grad:
        total.backward()
    return total.detach()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma", "gemma2"])
@pytest.mark.parametrize("tied", [True, False])
def test_policies_learn_what_full_logits_teach(kind: str, tied: bool) -> None:
    """gemma2 changes its logits after the head, so it takes the other way; here without attention softcapping."""
    changes = {"tie_word_embeddings": tied}
    changes |= {"attn_logit_softcapping": None, "final_logit_softcapping": 2.0} if kind == "gemma2" else {}
    model = make_model(kind, **changes)
    samples = make_samples(LENGTHS)
    old = torch.full((len(samples.input_ids),), -3.0, dtype=torch.float64)
    share = torch.linspace(0.1, 0.9, len(old), dtype=torch.float64)
    wanted = by_definition(model, samples, old, share, 0.8)
    expected = gradients(model)
    assert has_plain_head(model) == (kind != "gemma2")
    policy = Policy(model, 16)
    for layout_kind in ("packed", "padded"):
        model.zero_grad(set_to_none=True)
        layout = make_layout(samples, torch.arange(len(LENGTHS)), layout_kind)  # type: ignore[arg-type]
        total, _ = policy(to_device(layout, CPU), 0.8, share[layout.where], token_loss(old, layout))
        total.backward()
        torch.testing.assert_close(total, wanted, **MODEL)
        found = gradients(model)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, **MODEL)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=2, max_size=7), st.integers(0, 99), st.integers(1, 3))
def test_shares_of_a_minibatch_add_up_however_it_is_cut(lengths: list[int], seed: int, ranks: int) -> None:
    """Each rank's passes, packed or padded, in chunks of any size, and the empty pass that evens out their number."""
    model = make_model("qwen2", tie_word_embeddings=True)
    samples = make_samples(lengths, seed)
    old = torch.full((len(samples.input_ids),), -3.0, dtype=torch.float64)
    share = torch.linspace(0.1, 0.9, len(old), dtype=torch.float64)
    wanted = by_definition(model, samples, old, share, 1.3)
    expected = gradients(model)
    model.zero_grad(set_to_none=True)
    total = torch.zeros((), dtype=torch.float64)
    for rank in range(ranks):
        rows = torch.arange(rank, len(lengths), ranks)
        kind = "packed" if (rank + seed) % 2 else "padded"
        passes = [make_layout(samples, rows, kind)] if len(rows) else []  # type: ignore[arg-type]
        for layout in [*passes, make_layout(samples, rows[:0], "padded")]:
            policy = Policy(model, 1 + seed % 9)
            found, _ = policy(to_device(layout, CPU), 1.3, share[layout.where], token_loss(old, layout))
            found.backward()
            total += found.detach()
    torch.testing.assert_close(total, wanted, **MODEL)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected.get(name, torch.zeros_like(gradient)), **MODEL)


@pytest.mark.parametrize("window", [None, 4])
def test_packed_attention_is_a_mask_of_blocks(window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 20, 8, generator=generator) for heads in (4, 2, 2))
    bounds = torch.tensor([0, 3, 13, 20], dtype=torch.int32)
    at = torch.arange(20)
    owner = torch.bucketize(at, bounds[1:], right=True)
    seen = (owner[:, None] == owner) & (at[:, None] >= at) & ((at[:, None] - at) < (window or 99))
    scores = (query @ key.repeat_interleave(2, 1).transpose(-1, -2) * 0.3).masked_fill(~seen, -torch.inf)
    expected = torch.softmax(scores, -1) @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(one_by_one(query, key, value, bounds, 0.3, window), expected)
    torch.testing.assert_close(causal(query[:, :, :3], key[:, :, :3], value[:, :, :3], 0.3, window), expected[:, :, :3])


def test_attention_of_another_kind_is_refused_rather_than_ignored() -> None:
    policy = Policy(make_model("gemma2", attn_logit_softcapping=30.0), 16)
    layout = make_layout(make_samples(LENGTHS), torch.arange(6), "packed")
    with pytest.raises(UserError, match="does not support this model's kind"):
        policy(to_device(layout, CPU), 1.0)


@pytest.mark.parametrize("kind", sorted(PLAIN_HEADS))
def test_heads_called_plain_give_the_models_own_logits(kind: str) -> None:
    """In training and in scoring alike: nothing that the model does to its logits may be left out."""
    model = make_model(kind)
    layout = make_layout(make_samples([9]), torch.arange(1), "padded")
    with torch.no_grad():
        logits = model(input_ids=layout.input_ids).logits[0]
        expected = torch.log_softmax(logits / 0.7, -1)[layout.predictors, layout.targets]
        policy = Policy(model, 16)
        assert policy.fused
        torch.testing.assert_close(policy(to_device(layout, CPU), 0.7).logprobs, expected, **MODEL)


def test_recomputed_activations_change_nothing() -> None:
    found = []
    for again in (False, True):
        model = make_model("llama")
        policy = prepare(Policy(model, 16), Trainer(gradient_checkpointing=again))
        samples = make_samples(LENGTHS)
        layout = make_layout(samples, torch.arange(6), "packed")
        old = torch.full((len(samples.input_ids),), -3.0, dtype=torch.float64)
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            total, _ = policy(to_device(layout, CPU), 1.0, torch.ones(len(layout.targets)), token_loss(old, layout))
        total.backward()
        found.append((len(kept), gradients(model)))
    assert found[1][0] < found[0][0] / 2
    for name, gradient in found[0][1].items():
        assert torch.equal(gradient, found[1][1][name])


@COMPILES
def test_layers_share_one_compilation_for_all_lengths() -> None:
    found = printed("compiled_policy")
    assert found["graphs_after_first_pass"] == found["graphs"]
    assert found["difference"] < 1e-5


@COMPILES
def test_the_compiler_takes_the_width_of_a_sharded_models_heads_for_a_constant() -> None:
    """Left open, it makes the kernels that divide by it slow. Heads are 8 wide here, and nothing else counts 8."""
    left_open = printed("compiled_sharded")
    assert {36, 47} <= set(left_open)  # positions of two of the passes
    assert 8 not in left_open


def test_the_compiler_is_told_once_of_a_tensor_that_all_layers_share(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, list[int]]] = []
    monkeypatch.setattr(torch._dynamo, "maybe_mark_dynamic", lambda t, dims: told.append((t.ndim, dims)))
    monkeypatch.setattr(torch, "compile", lambda function: function)
    layer = compiled(lambda hidden, position_embeddings, bounds: hidden + position_embeddings[0])
    hidden, angles, bounds = torch.zeros(1, 4, 3), (torch.ones(1, 4, 1), torch.ones(1, 4, 1)), torch.tensor([0, 4])
    for _ in range(3):
        hidden = layer(hidden, position_embeddings=angles, bounds=bounds)
    assert told == [(3, [0, 1]), (3, [0, 1]), (3, [0, 1]), (1, [0]), (3, [0, 1]), (3, [0, 1])]
    assert hidden.sum() == 36


def printed(script: str) -> Any:
    """What a script here prints as JSON, in a process of its own: shape checks do not suit the compiler's symbols."""
    return json.loads(output_of("-m", f"tests.trainer.{script}"))
