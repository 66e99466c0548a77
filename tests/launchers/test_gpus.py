"""Which GPUs go to whom."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_tasks.launchers import gpus
from areal_tasks.launchers.gpus import (
    Placement,
    check_joins,
    describe,
    gpu_usage,
    memory_used,
    place,
    place_recipe,
    visible_gpus,
)
from schemas.errors import UserError
from schemas.recipe.load import load_recipe

EIGHT = tuple("01234567")


@pytest.mark.parametrize(
    ("visible", "arguments", "trainer", "servers"),
    [
        ("0", {"ranks": 1, "servers": 1}, "0", ["0"]),
        ("01", {"ranks": 1, "servers": 1}, "0", ["1"]),
        ("01", {"ranks": 2, "servers": 1}, "01", ["0"]),
        ("01", {"ranks": 1, "servers": 1, "tensor_parallel": 2}, "0", ["10"]),
        ("0123", {"ranks": 2, "servers": 2}, "01", ["2", "3"]),
        ("01234567", {"ranks": 4, "servers": 2, "tensor_parallel": 2}, "0123", ["45", "67"]),
        ("01", {"ranks": 0, "servers": 2}, "", ["0", "1"]),
        ("01", {"ranks": 1}, "0", []),
        ("53", {"ranks": 1, "servers": 1}, "5", ["3"]),
        ("01", {"ranks": 1, "trainer_gpus": [1], "servers": 1}, "1", ["0"]),
        ("01", {"ranks": 1, "servers": 2, "inference_gpus": [0, 0]}, "0", ["0", "0"]),
        ("01", {"ranks": 1, "servers": 1, "inference_gpus": [0]}, "0", ["0"]),
        ("", {"ranks": 2, "servers": 2}, "", ["", ""]),
    ],
)
def test_placement(visible: str, arguments: dict[str, Any], trainer: str, servers: list[str]) -> None:
    assert place(tuple(visible), **arguments) == Placement(tuple(trainer), tuple(map(tuple, servers)))


def test_the_gpus_of_a_server_are_split_over_its_parts() -> None:
    split = ["inference.tensor_parallel=2", "inference.servers=2", "inference.nodes=2"]
    found = place_recipe(load_recipe("gsm8k", split), EIGHT)
    assert describe(found).endswith(
        "inference-0 on GPU 1, inference-0.1 on GPU 2, inference-1 on GPU 3, inference-1.1 on GPU 4"
    )
    assert place_recipe(load_recipe("gsm8k", split), ()).parts(1) == [(), ()]


@pytest.mark.parametrize(
    ("visible", "arguments", "reason"),
    [
        ("0", {"ranks": 2}, r"trainer\.ranks: 2 ranks need a GPU each, and 1 is visible; lower"),
        ("01", {"ranks": 1, "servers": 3}, r"servers · inference\.tensor_parallel = 3 GPUs, and 2 are visible; lower"),
        ("01", {"ranks": 1, "trainer_gpus": [2]}, r"trainer\.gpus: there is no GPU 2: 2 are visible, numbered from 0"),
        ("01", {"ranks": 1, "servers": 1, "inference_gpus": [7]}, r"inference\.gpus: there is no GPU 7"),
        ("", {"ranks": 1, "trainer_gpus": [0]}, r"trainer\.gpus: names GPU 0, but none is visible"),
    ],
)
def test_what_cannot_be_placed_is_refused_with_a_remedy(visible: str, arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        place(tuple(visible), **arguments)


@given(ranks=st.integers(0, 8), servers=st.integers(1, 8), width=st.integers(1, 4))
def test_servers_share_only_what_they_must(ranks: int, servers: int, width: int) -> None:
    if servers * width > len(EIGHT):
        with pytest.raises(UserError):
            place(EIGHT, ranks, (), servers, width)
        return
    found = place(EIGHT, ranks, (), servers, width)
    used = [gpu for server in found.servers for gpu in server]
    assert len(used) == len(set(used)) == servers * width, "no GPU serves two servers unless it is named twice"
    assert len(set(used) & set(found.trainer)) == max(0, servers * width - (len(EIGHT) - ranks))


def test_sharing_is_told() -> None:
    found = place(("0", "1"), 1, (), 2, 1, [0, 1])
    assert [found.shared(0), found.shared(1)] == [True, False]
    assert [found.users(0), found.users(1)] == [2, 1]
    assert describe(found) == "trainer on GPU 0, inference-0 on GPU 0, inference-1 on GPU 1"
    assert not place((), 1, (), 1).shared(0) and place((), 1, (), 1).users(0) == 1


def test_the_embedded_engine_gets_no_gpu() -> None:
    assert place_recipe(load_recipe("quickstart"), ("0", "1")) == Placement(("0",), ())
    assert place_recipe(load_recipe("sft-gsm8k"), ("0", "1")).servers == ()
    assert place_recipe(load_recipe("evaluate-gsm8k"), ("0", "1")) == Placement((), (("0",),))


def test_memory_is_given_back_only_where_it_is_shared() -> None:
    recipe = load_recipe("gsm8k", ["inference.release_memory=true"])
    assert place_recipe(recipe, ("0",)).shared(0)
    with pytest.raises(UserError, match=r"release_memory: has no effect here.*inference-0 on GPU 1\); leave it out"):
        place_recipe(recipe, ("0", "1"))


@pytest.mark.parametrize(
    ("setting", "expected"), [("3,1", ("3", "1")), ("", ()), ("-1", ()), ("GPU-a, GPU-b", ("GPU-a", "GPU-b"))]
)
def test_the_environment_says_what_is_visible(
    setting: str, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    assert visible_gpus() == expected


def test_otherwise_nvidia_smi_says_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus() == (), "a machine without nvidia-smi has no GPU"
    listing = (
        "GPU 0: NVIDIA H200 (UUID: GPU-1)\n  MIG 1g.18gb Device 0: (UUID: MIG-2)\nGPU 1: NVIDIA H200 (UUID: GPU-3)\n"
    )
    answer = subprocess.CompletedProcess(["nvidia-smi"], 0, listing)
    monkeypatch.setattr(gpus.subprocess, "run", lambda *a, **k: answer)
    assert visible_gpus() == ("0", "1")


@pytest.mark.parametrize(
    ("named", "tool", "expected"),
    [
        (("0", "GPU-5"), 'echo "$2: $3" >&2; printf "30, 1000\\n70, 24\\n"', (0.5, 1024 << 20)),
        (("0",), 'echo "[N/A], 24"', (None, 24 << 20)),
        (("0",), "exit 9", None),
        (("0",), "echo no devices", None),
        ((), "exit 9", None),
    ],
)
def test_use_of_gpus(
    named: tuple[str, ...],
    tool: str,
    expected: tuple[float | None, int] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{tool}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert gpu_usage(named) == expected and memory_used(named) == (expected[1] if expected else 0)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert memory_used(named) == 0


def test_servers_join_only_on_gpus_that_no_service_uses() -> None:
    before = Placement(("0",), (("1",),))
    check_joins(before, Placement(("0",), (("1",), ("2",))))
    check_joins(Placement(("0",), (("1",), ("2",))), before)
    for after in (Placement(("0",), (("1",), ("0",))), Placement(("0",), (("2",), ("1",)))):
        with pytest.raises(UserError, match=r"no GPU of this machine is free.*trainer on GPU 0, inference-0 on GPU 1"):
            check_joins(before, after)
