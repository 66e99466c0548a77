"""Where initial weights come from, and what is said when they are not there."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_tasks.data.scratch import make_scratch
from areal_tasks.engines.models import initial_weights, load_tokenizer, model_folder, run_weights
from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.commit import commit_once, new_attempt
from areal_tasks.store.objects.files import commit_weights, upload
from areal_tasks.store.paths import iteration_commit, run_record, weights_attempt
from areal_tasks.store.provenance import make_provenance, now
from schemas.errors import UserError
from schemas.manifest import IterationCommit, RunRecord
from schemas.recipe.sections import Model, ScratchModel

SMALL = ScratchModel(layers=1, hidden=16, heads=2, intermediate=16)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"file://{tmp_path}/store")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_scratch(SMALL, 1, 16, tmp_path / "model")


def test_a_scratch_model_goes_into_the_store(store: Store, tmp_path: Path) -> None:
    files = initial_weights(
        store, Model(scratch=SMALL, max_length=16), 1, "r/weights/version=000000/attempt=a", tmp_path
    )
    names = {Path(file.path).name for file in files}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert all(store.size(file.path) == file.bytes for file in files)


def test_a_folder_is_copied_without_what_no_engine_reads(store: Store, folder: Path, tmp_path: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"the same again")
    (folder / "training_args.json").write_text("{}")
    files = initial_weights(
        store, Model(path=str(folder), max_length=16), 1, "r/weights/version=000000/attempt=a", tmp_path / "x"
    )
    names = {Path(file.path).name for file in files}
    assert "tokenizer_config.json" in names and not names & {"pytorch_model.bin", "training_args.json"}
    assert (
        store.read(next(f.path for f in files if f.path.endswith("model.safetensors")))
        == (folder / "model.safetensors").read_bytes()
    )


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ("config.json", r"no config\.json: it is not a model's folder"),
        ("*.safetensors", r"no \*\.safetensors"),
        ("tokenizer*", "no tokenizer: save it there"),
    ],
)
def test_an_incomplete_folder_says_what_is_missing(folder: Path, removed: str, message: str) -> None:
    for file in folder.glob(removed):
        file.unlink()
    with pytest.raises(UserError, match=rf"model\.path: '{folder}' has {message}"):
        model_folder(str(folder))


def test_the_tokenizer_alone(folder: Path, tmp_path: Path) -> None:
    assert load_tokenizer(folder).eos_token == "<eos>"
    with pytest.raises(UserError, match="no tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("path", ["/no/such/folder", "models", "./owner/name", "models/a/b"])
def test_a_missing_folder_is_named_in_full(path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"there is no folder '{path}' .looked for /"):
        model_folder(path)


def test_an_unreachable_hub_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        UserError, match=rf"'owner/name' is no folder here .looked for {tmp_path}/owner/name.*the hub gives no"
    ):
        model_folder("owner/name")


def test_samples_longer_than_the_models_context_are_refused(store: Store, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.max_length: 17 exceeds the model's context of 16"):
        initial_weights(
            store, Model(path=str(folder), max_length=17), 1, "r/weights/version=000000/attempt=a", tmp_path
        )
    config = json.loads((folder / "config.json").read_text())
    assert config["max_position_embeddings"] == 16


# ── the weights of another run ──────────────────────────────────────────────────────────────────────────────────────


def publish(store: Store, run: str, folder: Path, versions: int) -> None:
    """A run whose every version holds the same weights, committed as the flow does it."""
    provenance = make_provenance(1, now())
    record = RunRecord(run=run, flow="sft", seed=1, attempt=new_attempt(), provenance=provenance)
    commit_once(store, run_record(run), record)
    for version in range(1, versions + 1):
        attempt = new_attempt()
        files = upload(store, weights_attempt(run, version, attempt), folder)
        weights = commit_weights(store, run, version, attempt, "weights", files, provenance)
        commit = IterationCommit(
            run=run, iteration=version - 1, attempt=attempt, previous="", segment=0, stages=(), weights=weights,
            checkpoint=None, provenance=provenance,
        )  # fmt: skip
        commit_once(store, iteration_commit(run, version - 1), commit)


@pytest.mark.parametrize("versions", [1, 2, 3, 5, 8])
def test_the_newest_weights_of_a_run_are_named_not_copied(store: Store, folder: Path, versions: int) -> None:
    for heavy in folder.glob("*.safetensors"):
        shutil.copyfile(folder / "config.json", heavy)
    publish(store, "teacher", folder, versions)
    files = run_weights(store, "run://teacher")
    assert all(f"teacher/weights/version={versions:06d}/" in file.path for file in files)
    assert all("version=000001/" in file.path for file in run_weights(store, "run://teacher@1"))


def test_runs_and_versions_that_are_not_there(store: Store, folder: Path) -> None:
    with pytest.raises(UserError, match="there is no run 'gone' in file://"):
        run_weights(store, "run://gone")
    publish(store, "empty", folder, 0)
    with pytest.raises(UserError, match="'empty' has committed no iteration yet"):
        run_weights(store, "run://empty")
    publish(store, "short", folder, 2)
    with pytest.raises(UserError, match="'short' has no version 7; its newest is 2"):
        run_weights(store, "run://short@7")
    with pytest.raises(UserError, match="version 0 of run 'short' is what that run began with"):
        run_weights(store, "run://short@0")


def begin(store: Store, folder: Path, scratch: Path, max_length: int = 16) -> None:
    model = Model(path=str(folder), max_length=max_length)
    initial_weights(store, model, 1, "r/weights/version=000000/attempt=a", scratch)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_a_weight_that_is_not_finite_is_named_before_anything_is_copied(
    store: Store, folder: Path, tmp_path: Path, value: float, dtype: torch.dtype
) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    name = sorted(tensors)[2]
    tensors[name].view(-1)[-1] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"not finite, first in tensor {re.escape(name)} of model\.safetensors"):
        begin(store, folder, tmp_path / "x")
    assert not store.exists("r/weights/version=000000/attempt=a/config.json")


def test_damaged_weights_are_named(store: Store, folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"model\.safetensors is damaged .*; get the files again"):
        begin(store, folder, tmp_path / "x")


LONG_ROPE = {"long_factor": [1.0] * 4, "short_factor": [1.0] * 4}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {**LONG_ROPE, "rope_type": "longrope", "original_max_position_embeddings": 12}},
        {"rope_scaling": {**LONG_ROPE, "type": "su"}, "original_max_position_embeddings": 12},
        {"rope_parameters": {"full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 12}}},
        {"text_config": {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 12}},
    ],
)
def test_samples_that_would_change_the_frequencies_of_others_are_refused(
    store: Store, folder: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    begin(store, folder, tmp_path / "x", 12)
    with pytest.raises(UserError, match=r"model\.max_length: .*LongRoPE has other frequencies beyond 12 tokens"):
        begin(store, folder, tmp_path / "y", 13)
