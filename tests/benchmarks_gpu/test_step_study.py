"""The tools that take a training step apart: reading a profile, padded passes, and ablations that leave no trace."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest
import torch

from areal_tasks.data.batching import make_layout, make_sequences
from areal_tasks.engines.trainer.forward import to_device
from benchmarks import trainer_core
from benchmarks.gpu.ablations import CHANGES, policy_of, timed, widened
from benchmarks.gpu.profiling import Profile, Span, by_kind, kind, merged, read


def test_overlapping_kernels_are_busy_once() -> None:
    spans = [Span("a", 0, 10), Span("b", 5, 12), Span("c", 20, 21), Span("d", 6, 7)]
    assert merged(spans) == [(0, 12), (20, 21)]
    found = Profile(26e-6, spans, read([], 0.0, True).waits, 4)
    assert found.busy() == pytest.approx(13e-6)
    assert "idle 50.0%" in found.describe() and "0.01 ms before c" in found.describe()


def test_kernels_are_known_by_their_names() -> None:
    names = {
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN": "matrix product",
        "void pytorch_flash::flash_bwd_kernel<...>": "attention",
        "triton_red_fused__to_copy_mul_sum_3": "compiled",
        "void at::native::multi_tensor_apply_kernel<..FusedAdam..>": "optimizer and norm",
        "void at::native::indexFuncLargeIndex<c10::BFloat16, ...>": "indexing",
        "void at::native::vectorized_elementwise_kernel<4, ...>": "eager",
        "Memcpy HtoD (Pinned -> Device)": "copy and fill",
    }
    assert {name: kind(name) for name in names} == names
    assert by_kind([Span("triton_a", 0, 2000), Span("triton_b", 0, 1000)]) == {"compiled": (3.0, 2)}


def test_waits_and_launches_are_counted() -> None:
    def event(name: str, device: torch.autograd.DeviceType, start: int) -> SimpleNamespace:
        times = SimpleNamespace(start=start, end=start + 1)
        return SimpleNamespace(name=name, device_type=device, time_range=times, cpu_parent=None)

    host, gpu = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA
    names = [
        "cudaLaunchKernel",
        "cuLaunchKernelEx",
        "cudaStreamSynchronize",
        "cudaMemcpyAsync",
        "cudaStreamSynchronize",
    ]
    found = read([*(event(n, host, i) for i, n in enumerate(names)), event("kernel", gpu, 9)], 1.0, True)
    assert (found.launches, dict(found.waits)) == (2, {"cudaStreamSynchronize": 2})
    assert found.spans == [Span("kernel", 9, 10)]


@pytest.fixture
def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    trainer_core.add_options(parser)
    words = ["--rows", "6", "--length", "24", "--steps", "1", "--varied", "--eager", "--micro-batch-tokens", "64"]
    return argparse.Namespace(**vars(parser.parse_args(words)), shape="tiny", backend="local")


def test_a_widened_pass_has_the_loss_and_gradient_of_the_narrow_one(arguments: argparse.Namespace) -> None:
    backend = trainer_core.loaded(trainer_core.make_settings("tiny", "local", arguments, 1), "tiny")
    policy = policy_of(backend).float()
    samples = make_sequences(torch.arange(40) % 500, torch.arange(40) % 3 > 0, torch.tensor([9, 13, 2, 16]))
    narrow = make_layout(samples, torch.arange(4), "packed")
    wide = widened(narrow, 50)
    assert (narrow.input_ids.shape[1], wide.input_ids.shape[1]) == (36, 50)
    assert wide.bounds is not None and (len(wide.bounds) % 64, int(wide.bounds[-1])) == (0, 50)
    assert int(wide.bounds.diff().max()) <= wide.longest
    found = []
    for layout in (narrow, wide):
        policy.zero_grad()
        weights = torch.full((len(layout.targets),), 0.1)
        placed = to_device(layout, torch.device("cpu"))
        total, _ = policy(placed, 1.0, weights, lambda logprobs, entropy, _part: torch.stack([-logprobs, entropy]))
        total.backward()
        grads = [p.grad.flatten() for p in backend._parameters() if p.grad is not None]
        found.append(torch.cat([total.detach()[None], *grads]))
        for parameter in backend._parameters():
            parameter.grad = None
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-4)


def test_every_change_runs_and_is_put_back(arguments: argparse.Namespace) -> None:
    backend = trainer_core.loaded(trainer_core.make_settings("tiny", "local", arguments, 1), "tiny")
    before = dict(vars(arguments))
    forwards = [module.forward.__func__ for module in policy_of(backend).modules()]
    for name, change in CHANGES.items():
        with change(backend, arguments):
            assert timed(backend, arguments, name).tokens_per_second > 0, name
        assert vars(arguments) == before, name
        assert [module.forward.__func__ for module in policy_of(backend).modules()] == forwards, name
