"""Rollouts, demonstrations and trainers for the tests, made from seeds."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from transformers import AutoModelForCausalLM

from areal_tasks.engines.service import ServiceSpec
from areal_tasks.engines.trainer.commands import Checkpoint, Finish, Load, Train
from areal_tasks.engines.trainer.local import LocalBackend
from areal_tasks.engines.trainer.rows import make_table
from areal_tasks.engines.trainer.service import Trainer
from areal_tasks.engines.trainer.settings import Settings
from areal_tasks.store.backend import Store
from areal_tasks.store.commit import new_attempt
from areal_tasks.store.objects.files import commit_weights, upload
from areal_tasks.store.paths import checkpoint_attempt, stage_attempt, weights_attempt
from areal_tasks.store.provenance import make_provenance, now
from areal_tasks.store.shards import write_table
from schemas.manifest import FileRef, TableRef, WeightsRef
from schemas.recipe.sections import ScratchModel

TINY = ScratchModel(layers=2, hidden=32, heads=2, intermediate=48)
VOCABULARY = 16


def rlhf_recipe(**changes: Any) -> dict[str, Any]:
    """A recipe as the service receives it; `changes` go to its sections, e.g. trainer={"lr": 1e-3}."""
    base: dict[str, dict[str, Any]] = {
        "rollout": {"groups": 4, "group_size": 3, "temperature": 0.8, "max_new_tokens": 8},
        "algorithm": {"minibatches": 2, "max_logprob_gap": 100.0},  # `rollout` makes logprobs up
        "trainer": {"lr": 1e-3, "micro_batch_tokens": 40, "layout": "padded"},
        "schedule": {"iterations": 6},
    }
    sections = {name: {**base.get(name, {}), **changes.get(name, {})} for name in {*base, *changes}}
    return {"flow": "rlhf", "name": "r", **_model_and_data(), **sections}


def sft_recipe(**changes: Any) -> dict[str, Any]:
    base: dict[str, dict[str, Any]] = {
        "algorithm": {"batch_size": 4, "steps": 2},
        "trainer": {"lr": 1e-3, "micro_batch_tokens": 32},
        "schedule": {"iterations": 6},
    }
    sections = {name: {**base.get(name, {}), **changes.get(name, {})} for name in {*base, *changes}}
    return {"flow": "sft", "name": "r", **_model_and_data(), **sections}


def _model_and_data() -> dict[str, Any]:
    return {"model": {"scratch": TINY.model_dump(), "max_length": 16}, "data": {"source": "sums://4"}}


def rollout(lengths: Sequence[int], seed: int = 0, version: int = 0) -> pa.Table:
    """Random samples of these lengths with prompts of two tokens; behaviour logprobs near those of a random model."""
    random = np.random.default_rng(seed)
    masks = [[False] * min(2, n) + [True] * max(n - 2, 0) for n in lengths]
    texts = {name: [""] * len(lengths) for name in ("prompt", "completion", "answer", "server")}
    zeros = dict.fromkeys(("prompt_id", "epoch", "seed", "seconds"), [0] * len(lengths))
    columns = {
        **texts,
        **zeros,
        "sample_id": [f"{i // 3}-{i % 3}" for i in range(len(lengths))],
        "group_id": [i // 3 for i in range(len(lengths))],
        "sample_index": [i % 3 for i in range(len(lengths))],
        "input_ids": [random.integers(0, VOCABULARY, n).tolist() for n in lengths],
        "loss_mask": masks,
        "logprobs": [[float(m and random.normal(-2.7, 0.2)) for m in mask] for mask in masks],
        "versions": [[version if m else -1 for m in mask] for mask in masks],
        "stale_kv": [[False] * n for n in lengths],
        "num_tokens": list(lengths),
        "num_generated": [sum(m) for m in masks],
        "stop_reason": ["stop"] * len(lengths),
        "truncated": [False] * len(lengths),
        "turns": [1] * len(lengths),
        "version_min": [version] * len(lengths),
        "version_max": [version] * len(lengths),
        "status": ["ok"] * len(lengths),
    }
    return make_table("rollout", columns)


def advantage(table: pa.Table, seed: int = 1, dropped: Sequence[int] = ()) -> pa.Table:
    """Random advantages, one a sample, for the rollout `table`."""
    random = np.random.default_rng(seed)
    lists = [[float(random.normal())] * n for n in table["num_tokens"].to_pylist()]
    columns = {
        "sample_id": table["sample_id"].combine_chunks(),
        "advantages": lists,
        "returns": lists,
        "shaped_reward": [0.0] * len(lists),
        "kept": [i not in dropped for i in range(len(lists))],
        "dropped_reason": ["unverified" if i in dropped else "" for i in range(len(lists))],
    }
    return make_table("advantage", columns)


def check_scores(scored: pa.Table, folder: Path, version: int) -> None:
    """The table's scores are those of a plain forward pass with the weights in `folder`, at temperature 1."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for row in scored.to_pylist():
        ids, first = torch.tensor(row["input_ids"]), row["scored_from"]
        with torch.inference_mode():
            expected = torch.log_softmax(model(input_ids=ids[None]).logits[0].float(), -1)
        wanted = expected[first - 1 : -1].gather(1, ids[first:, None])[:, 0]
        assert torch.allclose(torch.tensor(row["scores"]), wanted, atol=1e-4) and row["version"] == version


def demonstrations(lengths: Sequence[int], steps: int, seed: int = 0) -> pa.Table:
    """An SFT batch: `steps` minibatches of equal size."""
    source = rollout(lengths, seed)
    per = -(-len(lengths) // steps)
    names = ("sample_id", "prompt_id", "epoch", "prompt", "completion", "input_ids", "loss_mask", "num_tokens")
    columns = {name: source[name].combine_chunks() for name in names}
    return make_table("batch", {**columns, "minibatch": [i // per for i in range(len(lengths))]})


def with_column(table: pa.Table, name: str, values: list[Any]) -> pa.Table:
    """`table` with other values in one column."""
    index = table.schema.get_field_index(name)
    return table.set_column(index, table.schema.field(name), pa.array(values, table.schema.field(name).type))


class Recorder(LocalBackend):
    """The local backend, keeping each gradient instead of stepping."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings.trainer, settings.model)
        self.gradients: list[torch.Tensor] = []

    def step(self, lr: float, wanted: bool) -> float:
        self.gradients.append(
            torch.cat([p.grad.flatten().clone() for p in self.master.parameters() if p.grad is not None])
        )
        return super().step(lr, wanted=False)


def weights_of(backend: Any) -> torch.Tensor:
    """All weights in a row."""
    return torch.cat([p.detach().flatten().clone() for p in backend.master.parameters()])


@dataclass
class World:
    """A store, a model in it as version 0 of a run, and the recipe of its trainers."""

    store: Store
    model: Path
    recipe: dict[str, Any]
    run: str = "r"

    def __post_init__(self) -> None:
        prefix = weights_attempt(self.run, 0, "first")
        files = upload(self.store, prefix, self.model)
        provenance = make_provenance(1, now())
        self.initial = commit_weights(self.store, self.run, 0, "first", "weights", files, provenance)

    def spec(self, owner: int = 1, restart: int = 0) -> ServiceSpec:
        return ServiceSpec(
            name="trainer",
            restart=restart,
            store_url=self.store.url,
            run=self.run,
            owner=owner,
            recipe=self.recipe,
            weights=self.initial,
        )

    def trainer(self, owner: int = 1) -> Trainer:
        """A trainer in this process that has loaded version 0."""
        trainer = Trainer(self.spec(owner))
        trainer.load(Load(owner=owner, version=0, weights=self.initial))
        return trainer

    def write(self, name: str, table: pa.Table) -> TableRef:
        return write_table(self.store, self.prefix(), name, table)

    def prefix(self) -> str:
        return stage_attempt(self.run, 0, "train", new_attempt())

    def train_command(self, version: int, tables: dict[str, pa.Table], **changes: Any) -> Train:
        """The command that trains on `tables`, with a digest of what they hold."""
        refs = {name: self.write(name, table) for name, table in tables.items()}
        kind = "sft" if "batch" in tables else "grpo"
        digest = hashlib.sha256("".join(ref.digest for ref in refs.values()).encode()).hexdigest()
        fields = {"owner": 1, "digest": digest, "iteration": version, "plan": None, "prefix": self.prefix()}
        return Train.model_validate({"version": version, "kind": kind, "tables": refs, **fields, **changes})

    def commit(self, kind: str, version: int, attempt: str, files: Sequence[FileRef]) -> WeightsRef:
        return commit_weights(self.store, self.run, version, attempt, kind, files, make_provenance(1, now()))

    def checkpoint(self, trainer: Trainer, attempt: str) -> WeightsRef:
        """Have `trainer` write a checkpoint, and commit it."""
        version = trainer.fence.version or 0
        named: dict[str, Any] = {"owner": trainer.fence.owner, "version": version}
        named["prefix"] = self.folder("checkpoint", version, attempt)
        trainer.checkpoint(Checkpoint(**named))
        files = trainer.finish(Finish(**named, wait=True)).files
        assert files is not None
        return self.commit("checkpoint", version, attempt, files)

    def folder(self, kind: str, version: int, attempt: str) -> str:
        return (checkpoint_attempt if kind == "checkpoint" else weights_attempt)(self.run, version, attempt)
