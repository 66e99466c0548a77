"""bf16 passes over fp32 weights, on the CPU; memory that runs out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from live_bytes import LiveBytes
from trainer_builders import World, advantage, rlhf_recipe, rollout

from areal_tasks.data.batching import make_layout, make_sequences
from areal_tasks.engines.trainer.commands import Load, Publish
from areal_tasks.engines.trainer.local import LocalBackend, choose_device
from areal_tasks.engines.trainer.memory import names_memory_knobs
from areal_tasks.engines.trainer.settings import Settings, read_settings
from schemas.errors import UserError

LENGTHS = [9, 4, 13, 6]


def _settings(dtype: str = "bfloat16", **trainer: Any) -> Settings:
    return read_settings(_recipe(dtype, **trainer))


def _recipe(dtype: str = "bfloat16", **trainer: Any) -> dict[str, Any]:
    recipe = rlhf_recipe(trainer=trainer)
    return {**recipe, "model": {**recipe["model"], "dtype": dtype}}


def _backend(folder: Path, dtype: str = "bfloat16", **trainer: Any) -> LocalBackend:
    settings = _settings(dtype, **trainer)
    backend = LocalBackend(settings.trainer, settings.model)
    backend.load(folder, 0)
    return backend


def _learn(backend: LocalBackend, weight: float = 1.0) -> torch.Tensor:
    """One pass of a cross-entropy; what has accumulated since the last step, flat."""
    ids = torch.arange(sum(LENGTHS)) % 16
    samples = make_sequences(ids, torch.ones(len(ids), dtype=torch.bool), torch.tensor(LENGTHS))
    layout = make_layout(samples, torch.arange(len(LENGTHS)), "packed")
    weights = torch.full((len(layout.targets),), weight / len(layout.targets))
    backend.learn(layout, weights, lambda logprobs, entropy, _part: torch.stack([-logprobs, entropy]), 1.0, True)
    return torch.cat([p.grad.flatten() for p in backend.master.parameters() if p.grad is not None])


def _flat(policy: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in policy.parameters()])


def test_gradients_in_bf16_are_near_those_in_fp32_and_add_up_in_fp32(tiny: Path) -> None:
    exact = _learn(_backend(tiny, "float32"))
    backend = _backend(tiny)
    once = _learn(backend).clone()
    assert once.dtype == torch.float32
    assert (once - exact).norm() < 0.02 * exact.norm()
    many = once
    for _ in range(9):
        many = _learn(backend)
    torch.testing.assert_close(many, 10 * once, atol=1e-7, rtol=1e-5)


def test_loading_takes_what_is_kept_and_nothing_beside_it(tiny: Path) -> None:
    """fp32 weights and their rounded copy; of the reference the rounded weights alone."""
    settings = _settings()
    backend = LocalBackend(settings.trainer, settings.model)
    with LiveBytes() as live:
        backend.load(tiny, 0)
    held = 4 * len(_flat(backend.master))
    other = 2048 + 4 * max(p.numel() for p in backend.master.parameters())  # rotary frequencies, what is being read
    assert 1.5 * held <= live.peak <= 1.5 * held + other
    with LiveBytes() as live:
        backend.load_reference(tiny)
    assert 0.5 * held <= live.peak <= 0.5 * held + other


def test_small_steps_are_not_lost_to_rounding(tiny: Path) -> None:
    """A learning rate far below bf16's resolution moves the fp32 weights, and in time the rounded ones."""
    backend = _backend(tiny, lr=1e-5)
    start, rounded = _flat(backend.master).clone(), _flat(backend.models["policy"]).clone()
    for _ in range(40):
        _learn(backend)
        backend.step(1e-5, wanted=True)
    assert rounded.dtype == torch.bfloat16
    assert (_flat(backend.master) != start).float().mean() > 0.9
    assert torch.equal(_flat(backend.models["policy"]), _flat(backend.master).bfloat16())
    assert 0 < (_flat(backend.models["policy"]) != rounded).float().mean() < 1


def test_an_unwanted_step_changes_nothing_and_clears(tiny: Path) -> None:
    backend = _backend(tiny)
    before = _flat(backend.master).clone()
    _learn(backend)
    assert backend.step(1e-3, wanted=False) > 0
    assert torch.equal(_flat(backend.master), before)
    assert all(p.grad is None for p in [*backend.master.parameters(), *backend.models["policy"].parameters()])


def test_rotary_frequencies_keep_their_precision(tiny: Path) -> None:
    backend = _backend(tiny)
    buffers = dict(backend.models["policy"].named_buffers())
    assert buffers and all(b.dtype == torch.float32 for b in buffers.values())


def test_weights_are_published_in_bf16_and_a_checkpoint_keeps_fp32(world: World) -> None:
    world.recipe = _recipe(lr=1e-4)
    first = world.trainer()
    table = rollout(LENGTHS * 3)
    tables = {"rollout": table, "advantage": advantage(table)}
    first.train(world.train_command(0, tables))
    named = dict(first.backend.named_weights())
    assert {t.dtype for t in named.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in named and "model.embed_tokens.weight" in named  # tied: once
    written = first.publish(Publish(owner=1, version=1, prefix=world.folder("weights", 1, "a")))
    weights = world.commit("weights", 1, "a", written.files)
    state = world.checkpoint(first, "a")
    second = world.trainer(owner=2)
    second.load(Load(owner=2, version=1, weights=weights, checkpoint=state))
    one, two = first.backend, second.backend
    assert isinstance(one, LocalBackend) and isinstance(two, LocalBackend)
    assert torch.equal(_flat(one.master), _flat(two.master))
    assert torch.equal(_flat(one.models["policy"]), _flat(two.models["policy"]))


def test_fp32_stays_on_the_cpu_unless_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    found = {
        (dtype, bool(gpus)): choose_device(_settings(dtype, gpus=gpus).trainer, _settings(dtype).model).type
        for dtype in ("float32", "bfloat16")
        for gpus in ([], [0])
    }
    assert [key for key, device in found.items() if device == "cpu"] == [("float32", False)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(_settings().trainer, _settings().model).type == "cpu"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_memory_that_runs_out_names_the_knobs_in_order(error: Exception) -> None:
    @names_memory_knobs()
    def command() -> None:
        raise error

    with pytest.raises(UserError) as caught:
        command()
    text = str(caught.value)
    knobs = ["micro_batch_tokens", "head_chunk_tokens", "gradient_checkpointing", "cpu_offload", "trainer.ranks"]
    places = [text.index(knob) for knob in [*knobs, "inference.memory_fraction"]]
    assert places == sorted(places)
    assert "\n" not in text


def test_other_errors_pass_through() -> None:
    @names_memory_knobs()
    def command() -> None:
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        command()
