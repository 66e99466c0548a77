"""What is published: files that Hugging Face's and safetensors' own readers accept, with the bits of the tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from areal_tasks.engines.trainer import snapshot
from areal_tasks.engines.trainer.snapshot import TYPES, Snapshot
from areal_tasks.store.backend import open_store
from areal_tasks.store.objects.files import digest_of
from areal_tasks.store.objects.local import file_sha256
from schemas.manifest import FileRef


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"embed": (7, 5), "norm": (5,), "scalar": (), "odd": (3, 1, 2)}
    found = {name: torch.randn(shape) for name, shape in shapes.items()}
    return found | {"turned": torch.randn(4, 6).T}


def saved(held: Snapshot, folder: Path) -> tuple[FileRef, ...]:
    return held.save(open_store(folder.parent.as_uri()), folder.name, {})


def test_one_file_reads_back_to_the_bit(tmp_path: Path) -> None:
    held = Snapshot()
    held.take(1, tensors().items())
    saved(held, tmp_path)
    read = load_file(tmp_path / "model.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    assert all(torch.equal(read[n], t) and read[n].dtype == t.dtype for n, t in tensors().items())
    assert set(read) == set(tensors())


def test_each_tensor_keeps_its_type(tmp_path: Path) -> None:
    """Weights come rounded; their buffers need not be floating-point numbers at all."""
    mixed = {str(dtype): torch.arange(6).to(dtype) for dtype in TYPES}
    held = Snapshot()
    held.take(1, mixed.items())
    saved(held, tmp_path)
    read = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(read[n], t) and read[n].dtype == t.dtype for n, t in mixed.items())


def test_a_tensor_that_no_longer_comes_is_not_published(tmp_path: Path) -> None:
    """The policy was loaded again from weights with other names."""
    held = Snapshot()
    held.take(1, tensors().items())
    others = {name: tensor for name, tensor in tensors().items() if name != "odd"} | {"new": torch.ones(2)}
    held.take(2, others.items())
    saved(held, tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == set(others)


def test_many_files_have_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "SHARD_BYTES", 100)
    held = Snapshot()
    held.take(1, tensors().items())
    files = saved(held, tmp_path)
    assert {file.path.removeprefix(f"{tmp_path.name}/"): (file.sha256, file.bytes) for file in files} == {
        path.name: (file_sha256(path), path.stat().st_size) for path in tmp_path.iterdir()
    }
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors().values())
    assert len(set(index["weight_map"].values())) > 1
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], tensors()[name])


def test_the_digest_of_weights_in_many_files_is_that_of_recorded_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the keys of the stages that use them, so files are divided as before."""
    monkeypatch.setattr(snapshot, "SHARD_BYTES", 400)
    held = Snapshot()
    held.take(1, [(f"layer.{i}", torch.arange(30.0) + i) for i in range(12)])
    files = held.save(open_store(tmp_path.as_uri()), "r/weights/version=000001/attempt=a", {})
    assert digest_of(files) == "7b8de527e17e1b67fc501e09c41429af62be63db8514c45c9694bf35968d2e0a"


def test_a_later_version_takes_the_place_of_the_first(tmp_path: Path) -> None:
    held = Snapshot()
    held.take(1, tensors().items())
    before = {n: t.data_ptr() for n, t in held.tensors.items()}
    held.take(2, ((n, t + 1) for n, t in tensors().items()))
    assert held.version == 2
    assert {n: t.data_ptr() for n, t in held.tensors.items()} == before
    assert torch.equal(held.tensors["embed"], tensors()["embed"] + 1)


def test_a_snapshot_that_failed_half_way_is_of_no_version() -> None:
    held = Snapshot()
    held.take(1, tensors().items())

    def breaks() -> Iterator[tuple[str, torch.Tensor]]:
        yield "embed", tensors()["embed"]
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError):
        held.take(2, breaks())
    assert held.version is None
