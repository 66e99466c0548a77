"""A checkpoint's files: tensors in pieces, hashed on their way, as DCP's own reader and writer know them."""

from __future__ import annotations

import errno
import resource
import shutil
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import save
from torch import Tensor

from areal_tasks.engines.trainer import checkpoint, checkpoint_files
from areal_tasks.engines.trainer.checkpoint import Progress
from areal_tasks.store.objects.local import file_sha256
from schemas.errors import UserError

PIECE = 1 << 10


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_files, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(checkpoint_files, "FILE_BYTES", 4 * PIECE)


def held() -> dict[str, dict[str, Tensor]]:
    """Tensors that are cut evenly, unevenly, in rows that are too long, and not at all; and what is no plain memory."""
    whole = torch.randn(40, 30)
    return {
        "even": {"weight": torch.randn(64, 32), "step": torch.tensor(3.0)},
        "odd": {"weight": torch.randn(37, 3, 5), "exp_avg": torch.randn(37, 3, 5).bfloat16()},
        "long": {"weight": torch.randn(3, 2 * PIECE)},
        "small": {"weight": torch.randn(7), "none": torch.zeros(0, 4)},
        "views": {"turned": whole.T, "part": whole[3:30, 4:20], "whole": whole},
        "kinds": {"counts": torch.arange(500), "flags": torch.arange(3000) % 3 == 0},
    }


def empty() -> dict[str, dict[str, Tensor]]:
    return {name: {key: torch.zeros_like(t) for key, t in parts.items()} for name, parts in held().items()}


def assert_same(one: dict[str, dict[str, Tensor]], other: dict[str, dict[str, Tensor]]) -> None:
    assert {n: list(p) for n, p in one.items()} == {n: list(p) for n, p in other.items()}
    for name, parts in one.items():
        for key, tensor in parts.items():
            assert torch.equal(tensor, other[name][key]), f"{name}.{key}"


def test_pieces_are_read_back_to_the_bit(tmp_path: Path) -> None:
    torch.manual_seed(1)
    state, found = held(), empty()
    save(checkpoint.Saving(tmp_path, state, Progress(5, 2)))
    assert checkpoint.load_parameters(tmp_path, found, lambda names: None) == Progress(5, 2)
    assert_same(state, found)


def test_files_without_a_tensor_that_is_read_need_not_be_there(tmp_path: Path) -> None:
    """What every rank reads is in one file; of the others, those of the tensors that are asked for are fetched."""
    torch.manual_seed(1)
    state, found = held(), empty()
    save(checkpoint.Saving(tmp_path / "whole", state, Progress(5, 2)))
    here = tmp_path / "here"
    here.mkdir()
    shutil.copy(tmp_path / "whole" / checkpoint.METADATA, here)
    fetched: list[set[str]] = []

    def fetch(names: Collection[str]) -> None:
        fetched.append(set(names))
        for name in names:
            shutil.copy(tmp_path / "whole" / name, here)

    assert checkpoint.load_parameters(here, {"even": {"step": found["even"]["step"]}}, fetch) == Progress(5, 2)
    assert found["even"]["step"] == 3 and len(fetched[0]) == 1
    one = {"small": found["small"]}
    checkpoint.load_parameters(here, one, fetch)
    assert_same(one, {"small": state["small"]})
    assert fetched[0] < fetched[1] and len(fetched[1]) <= 3 < len(list((tmp_path / "whole").glob("*.distcp")))


def test_a_file_that_cannot_be_fetched_is_said_so(tmp_path: Path) -> None:
    save(checkpoint.Saving(tmp_path, held(), Progress()))

    def fetch(names: Collection[str]) -> None:
        raise UserError("the store is away")

    with pytest.raises(UserError, match=r"^the store is away$"):
        checkpoint.load_parameters(tmp_path, empty(), fetch)


def test_a_disk_that_fails_is_not_taken_for_another_model(tmp_path: Path) -> None:
    save(checkpoint.Saving(tmp_path, held(), Progress()))

    def fetch(names: Collection[str]) -> None:
        raise OSError(errno.ENOSPC, "its disk is full", "/tmp/x")

    with pytest.raises(OSError, match="its disk is full"):
        checkpoint.load_parameters(tmp_path, empty(), fetch)


def test_large_tensors_are_cut_and_no_view_drags_its_whole_along(tmp_path: Path) -> None:
    save(checkpoint.Saving(tmp_path, held(), Progress()))
    chunks = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert len(chunks["parameters.even.weight"].chunks) == 8
    assert len(chunks["parameters.long.weight"].chunks) == 3
    assert len(chunks["parameters.small.weight"].chunks) == 1
    entries = dcp.FileSystemReader(tmp_path).read_metadata().storage_data
    longest = max(entry.length for index, entry in entries.items() if "long" not in index.fqn)
    assert longest < PIECE + 2048, "a piece and what torch.save says of it"


def test_digests_and_sizes_are_those_of_the_files(tmp_path: Path) -> None:
    files = save(checkpoint.Saving(tmp_path, held(), Progress()))
    assert len(files) > 4 and checkpoint.METADATA in files
    assert files == {path.name: (file_sha256(path), path.stat().st_size) for path in tmp_path.iterdir()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_of_dcps_own_writer_are_still_read(tmp_path: Path) -> None:
    torch.manual_seed(2)
    state, found = held(), empty()
    whole = {"parameters": state, "rng": torch.get_rng_state(), "progress": torch.tensor([9, 1])}
    dcp.save(whole, storage_writer=dcp.FileSystemWriter(tmp_path, thread_count=2), no_dist=True)
    assert checkpoint.load_parameters(tmp_path, found, lambda names: None) == Progress(9, 1)
    assert_same(state, found)


def test_a_disk_that_refuses_is_named(tmp_path: Path) -> None:
    (tmp_path / "__0_1.distcp").mkdir()
    with pytest.raises(IsADirectoryError):
        save(checkpoint.Saving(tmp_path, held(), Progress()))


def test_a_disk_that_has_room_for_a_part_of_a_tensor_is_said_to_be_full(tmp_path: Path) -> None:
    """torch.save hides that behind an error about its own format. Here a limit stands for the disk's size."""
    saving = checkpoint.Saving(tmp_path, {"long": {"weight": torch.randn(3, 200 * PIECE)}}, Progress())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 * PIECE, before[1]))
    try:
        with pytest.raises(OSError) as caught:
            save(saving)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
