"""What is read from a store is data: no file of it can run code, whatever wrote it."""

from __future__ import annotations

import ast
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import save
from stage_driver import tiny
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from areal_tasks.engines.trainer.checkpoint import Progress, Saving, held_parameters, load_parameters
from areal_tasks.engines.trainer.loading import read_policy
from schemas.errors import UserError

ROOT = Path(__file__).parents[2]
PICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "pickletools"}
#: The one place that knows pickle: it refuses a checkpoint's index before torch unpickles it.
GUARD = "areal_tasks/engines/trainer/checkpoint.py"


def sources() -> Iterator[tuple[str, ast.Module]]:
    for package in ("areal_tasks", "flows", "schemas"):
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


def imported(tree: ast.Module) -> set[str]:
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in names}


def test_nobody_imports_what_unpickles() -> None:
    found = {name for name, tree in sources() if imported(tree) & PICKLERS}
    assert found == {GUARD}


def test_no_call_loads_what_may_hold_code() -> None:
    for name, tree in sources():
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            text = ast.unparse(call.func)
            said = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            where = f"{name}:{call.lineno}"
            assert text not in ("torch.load", "numpy.load", "np.load", "eval", "exec", "yaml.unsafe_load"), where
            assert said.get("trust_remote_code", "False") == "False", where
            if text == "AutoModelForCausalLM.from_pretrained":
                assert said.get("use_safetensors") == "True", where


# ── checkpoints ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Runs:
    """Unpickling this runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


def by_a_detour(command: str) -> bytes:
    """The same, by a name that begins as DCP's own do: its module has imported `os`."""
    text = command.encode()
    opcodes = b"\x80\x04\x8c\x27torch.distributed.checkpoint.filesystem\x8c\x09os.system\x93"
    return opcodes + b"\x8c" + bytes([len(text)]) + text + b"\x85R."


def saved(folder: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    save(Saving(folder, held_parameters(model, optimizer), Progress(0, 0)))
    return model, optimizer


def test_a_checkpoint_is_read_back_and_one_whose_index_runs_code_is_refused(tmp_path: Path) -> None:
    state = saved(tmp_path / "state")
    load_parameters(tmp_path / "state", held_parameters(*state), lambda names: None)
    index, ran = tmp_path / "state" / ".metadata", tmp_path / "ran"
    for harm in (pickle.dumps(Runs(f"touch {ran}")), by_a_detour(f"touch {ran}")):
        index.write_bytes(harm)
        with pytest.raises(UserError, match=r"names .*system, which no checkpoint of a model needs"):
            load_parameters(tmp_path / "state", held_parameters(*state), lambda names: None)
        assert not ran.exists()
    pickle.loads(by_a_detour(f"touch {ran}"))
    assert ran.exists(), "the detour does run code where nothing guards"


def test_a_checkpoint_whose_data_runs_code_is_refused(tmp_path: Path) -> None:
    state, ran = saved(tmp_path / "state"), tmp_path / "ran"
    for file in (tmp_path / "state").glob("*.distcp"):
        file.write_bytes(pickle.dumps(Runs(f"touch {ran}")) + b"\0" * file.stat().st_size)
    with pytest.raises(UserError):
        load_parameters(tmp_path / "state", held_parameters(*state), lambda names: None)
    assert not ran.exists()


# ── weights ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def load(folder: Path) -> None:
    read_policy(folder, tiny().trainer, torch.device("cpu"))


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes)).save_pretrained(tmp_path / "model")
    load(tmp_path / "model")
    return tmp_path / "model"


def test_weights_that_are_a_pickle_are_refused(model_folder: Path, tmp_path: Path) -> None:
    harm, ran = pickle.dumps(Runs(f"touch {tmp_path / 'ran'}")), tmp_path / "ran"
    (model_folder / "model.safetensors").write_bytes(harm)
    with pytest.raises(Exception, match=r"(?i)header|safetensors"):
        load(model_folder)
    (model_folder / "model.safetensors").unlink()
    (model_folder / "pytorch_model.bin").write_bytes(harm)
    with pytest.raises(OSError, match="safetensors"):
        load(model_folder)
    assert not ran.exists()


def test_a_model_that_brings_its_own_code_is_refused(model_folder: Path, tmp_path: Path) -> None:
    config = (model_folder / "config.json").read_text().replace('"llama"', '"own"')
    own = '"auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"},'
    (model_folder / "config.json").write_text(config.replace("{", "{" + own, 1))
    (model_folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    with pytest.raises(ValueError, match=r"trust_remote_code|does not recognize"):
        load(model_folder)
    assert not (tmp_path / "ran").exists()
