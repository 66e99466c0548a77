"""What a trainer is put through, alone or on several ranks. As a program: one of them, with every backend in turn.

`python two_ranks.py FOLDER` plays FOLDER/script.json; rank 0 writes what came of it to FOLDER/answers.json.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch.distributed as dist
from checkpoints import save
from live_bytes import LiveBytes
from waiting import held_back

from areal_tasks.engines.service import ServiceSpec
from areal_tasks.engines.trainer import checkpoint_files
from areal_tasks.engines.trainer.checkpoint import Progress, Saving
from areal_tasks.engines.trainer.commands import Checkpoint, Finish, Load, Logprobs, Publish, Train
from areal_tasks.engines.trainer.group import Group
from areal_tasks.engines.trainer.local import LocalBackend
from areal_tasks.engines.trainer.ranks import join
from areal_tasks.engines.trainer.service import Trainer, make_backend
from areal_tasks.engines.trainer.settings import read_settings
from areal_tasks.store.backend import Store, StoreError, Unavailable
from areal_tasks.store.objects.files import commit_weights
from areal_tasks.store.objects.local import LocalBackend as LocalStore
from areal_tasks.store.paths import checkpoint_attempt, stage_attempt, weights_attempt
from areal_tasks.store.provenance import make_provenance, now
from schemas.manifest import WeightsRef
from schemas.recipe.training import Trainer as Section

STEPS = 5
Named = dict[str, Any]


class Player:
    """A trainer and where its output goes."""

    def __init__(self, script: dict[str, Any], name: str, changes: dict[str, Any], group: Group) -> None:
        spec = script["spec"]
        self.script, self.name, self.group = script, name, group
        self.outputs = itertools.count()
        self.trainer = Trainer(ServiceSpec.model_validate({**spec, "recipe": changed(spec["recipe"], changes)}), group)

    def load(self, checkpoint: WeightsRef | None = None) -> None:
        weights = WeightsRef.model_validate(self.script["initial"])
        version = checkpoint.version if checkpoint else 0
        self.trainer.load(Load(owner=1, version=version, weights=weights, checkpoint=checkpoint))

    def train(self, number: int) -> dict[str, float]:
        body = {**self.script["trains"][number], "prefix": self._prefix()}
        return self.trainer.train(Train.model_validate(body)).metrics

    def publish(self, label: str) -> str:
        version = self.trainer.fence.version or 0
        prefix = weights_attempt("r", version, f"{self.name}-{label}")
        self.trainer.publish(Publish(owner=1, version=version, prefix=prefix))
        return prefix

    def begin(self, label: str) -> Finish:
        """Begin a checkpoint; returns the command that finishes it."""
        version = self.trainer.fence.version or 0
        prefix = checkpoint_attempt("r", version, f"{self.name}-{label}")
        self.trainer.checkpoint(Checkpoint(owner=1, version=version, prefix=prefix))
        return Finish(owner=1, version=version, prefix=prefix, wait=True)

    def finish(self, command: Finish) -> WeightsRef:
        files = self.trainer.finish(command).files
        assert files is not None
        made, store, attempt = make_provenance(1, now()), self.trainer.store, command.prefix.rpartition("=")[2]
        text = self.group.from_first_here(
            lambda: commit_weights(store, "r", command.version, attempt, "checkpoint", files, made).model_dump_json()
        )
        return WeightsRef.model_validate_json(text)

    def logprobs(self, which: str, of: str = "logprobs") -> dict[str, Any]:
        version = self.trainer.fence.version or 0
        body = {**self.script[of], "which": which, "version": version, "prefix": self._prefix()}
        tables = self.trainer.logprobs(Logprobs.model_validate(body)).tables
        return {name: ref.model_dump(mode="json") for name, ref in tables.items()}

    def _prefix(self) -> str:
        return stage_attempt("r", 0, "train", f"{self.name}-{next(self.outputs)}")


def changed(recipe: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`recipe` with `changes` of some of its sections."""
    return {**recipe, **{section: {**recipe[section], **values} for section, values in changes.items()}}


def play(player: Player) -> dict[str, Any]:
    """Five steps, a repeat, a step that must be skipped, a checkpoint that is written while it makes a sixth step; and
    what it all gave."""
    player.load()
    found: dict[str, Any] = {"loaded": player.publish("loaded")}
    found["metrics"] = [player.train(number) for number in range(STEPS)]
    found["repeat"] = player.train(STEPS - 1)
    found["trained"] = player.publish("trained")
    found["policy"], found["reference"] = player.logprobs("policy"), player.logprobs("reference")
    found["few"] = player.logprobs("policy", of="few")
    with held_back(Saving, "write") as go_on:
        begun = player.begin("five")
        found["sixth"] = player.train(STEPS)
        found["early"] = player.trainer.finish(begun.model_copy(update={"wait": False})).files
        go_on.set()
    found["checkpoint"] = player.finish(begun).model_dump(mode="json")
    found["six"] = player.publish("six")
    found["poisoned"] = player.train(STEPS + 1)
    found["skipped"] = player.publish("skipped")
    return found


def fail_once(player: Player) -> str:
    """The last rank cannot reach the store for one checkpoint: what this rank hears.

    The next one succeeds, and is loaded; for it the store is elsewhere, so that each rank puts files of its own folder.
    """

    def away(*_: Any) -> None:
        raise Unavailable("the store is away")

    player.load()
    told = ""
    with patch.object(LocalStore, "put_file", away) if player.group.rank == player.group.world - 1 else nullcontext():
        try:
            player.finish(player.begin("fails"))
        except StoreError as error:
            told = f"{type(error).__name__}: {error}"
    player.trainer.writer.store = cast(Store, FarAway(player.trainer.store))
    player.load(player.finish(player.begin("again")))
    return told


def go_on(player: Player, checkpoint: dict[str, Any], label: str) -> dict[str, Any]:
    """Load a checkpoint after five steps over a policy that has moved on, and take the sixth."""
    player.load(WeightsRef.model_validate(checkpoint))
    return {"sixth": player.train(STEPS), "six": player.publish(label), "step": player.trainer.progress.step}


class FarAway(LocalStore):
    """A store on a disk as a machine has it on whose disk it is not; `fetched` are the names of files."""

    def __init__(self, store: Store) -> None:
        assert isinstance(store, LocalStore)
        super().__init__(store.url, Path(store.root))
        self.fetched: list[str] = []

    def local(self, path: str) -> None:
        """It is elsewhere."""

    def fetch_file(self, path: str, target: Path) -> str:
        self.fetched.append(Path(path).name)
        return super().fetch_file(path, target)


def restore_apart(script: Named, name: str, group: Group, checkpoint: WeightsRef) -> Named:
    """Each rank on a machine of its own: the files of the checkpoint that each fetches, the weights, and a step."""
    assert group.store is not None
    alone = Group(group.rank, group.world, dist.PrefixStore(f"{name}-apart", group.store), local_world=1)
    player = Player(script, f"{name}-apart", script["backends"][name], alone)
    far = FarAway(player.trainer.store)
    player.trainer.store = far
    player.load(checkpoint)
    fetched: list[Any] = [None] * group.world
    dist.all_gather_object(fetched, [name for name in far.fetched if name.endswith((".distcp", ".metadata"))])
    weights, before = player.publish("restored"), len(far.fetched)
    sixth, tables = player.train(STEPS), [None] * group.world
    dist.all_gather_object(tables, far.fetched[before:])
    return {"fetched": fetched, "weights": weights, "sixth": sixth, "tables": tables}


def publish_twice(player: Player) -> list[str]:
    """Where the weights lie before and after a step."""
    player.load()
    before = player.publish("before")
    player.train(0)
    return [before, player.publish("after")]


def peaks(backend: LocalBackend, deep: Path, steps: list[str], state: Path) -> dict[str, list[int]]:
    """The most bytes that tensors took on each rank during each of these steps, besides what there was before."""
    works: dict[str, Callable[[], object]] = {
        "load": lambda: backend.load(deep, 0),
        "reference": lambda: backend.load_reference(deep),
        "restore": lambda: backend.load_checkpoint(state, lambda names: None),
    }
    found: dict[str, list[int]] = {}
    for step in steps:
        if step == "restore":
            save(backend.plan_checkpoint(state, Progress()))
        with LiveBytes() as live:
            works[step]()
        found[step] = [0] * backend.world
        dist.all_gather_object(found[step], live.peak)
    return found


def main(folder: Path) -> None:
    pieces, checkpoint_files.PIECE_BYTES = checkpoint_files.PIECE_BYTES, 1024  # type: ignore[misc]  # cuts these, too
    script = json.loads((folder / "script.json").read_text())
    first = next(iter(script["backends"].values()))
    spec = ServiceSpec.model_validate(script["spec"])
    group = join(spec, Section.model_validate(changed(spec.recipe, first)["trainer"]))
    answers = {}
    for name, changes in script["backends"].items():
        player = Player(script, name, changes, group)
        answers[name] = play(player)
        answers[name]["from_local"] = go_on(player, script["local_checkpoints"][name], "from-local")
        if name in script["other_checkpoints"]:
            answers[name]["from_other"] = go_on(player, script["other_checkpoints"][name], "from-other")
    for name in script["apart"]:
        saved = WeightsRef.model_validate(answers[name]["checkpoint"])
        answers[name]["apart"] = restore_apart(script, name, group, saved)
        answers[name]["told"] = fail_once(Player(script, f"{name}-fails", script["backends"][name], group))
    experts = script["experts"]
    for name in experts["backends"]:
        answers[name]["experts"] = publish_twice(Player(experts, f"experts-{name}", script["backends"][name], group))
    checkpoint_files.PIECE_BYTES = pieces  # type: ignore[misc]  # a plan for many pieces is larger than the tensors
    for name, steps in script["peaks"].items():
        backend = make_backend(read_settings(changed(spec.recipe, script["backends"][name])))
        answers[name]["peaks"] = peaks(backend, Path(script["deep"]), steps, folder / "state")
    if group.rank == 0:
        (folder / "answers.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
