"""The trainer's commands, in this process: retries, replay, checkpoints, publication, reference."""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
from trainer_builders import World, advantage, check_scores, demonstrations, rlhf_recipe, rollout, with_column
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_tasks.engines.trainer import service
from areal_tasks.engines.trainer.checkpoint import Progress
from areal_tasks.engines.trainer.commands import Keep, Load, Logprobs, Publish, Train, Trained
from areal_tasks.engines.trainer.fencing import StaleCommand
from areal_tasks.engines.trainer.service import Trainer
from areal_tasks.store.backend import Store
from areal_tasks.store.shards import read_table
from schemas.errors import UserError
from schemas.manifest import WeightsRef

TABLE = {"policy": "proximal", "reference": "reference"}
LENGTHS = [9, 4, 13, 6, 11, 3, 8, 5, 10, 7, 12, 5]


@pytest.fixture
def rlhf(world: World) -> World:
    world.recipe = rlhf_recipe()
    return world


def _weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.backend.models["policy"].parameters()]).clone()  # type: ignore[attr-defined]


def _grpo(world: World, version: int, **changes: Any) -> Train:
    table = rollout(LENGTHS, seed=version, version=version)
    return world.train_command(version, {"rollout": table, "advantage": advantage(table, seed=version)}, **changes)


def _sft(world: World, version: int) -> Train:
    return world.train_command(version, {"batch": demonstrations(LENGTHS[:8], 2, seed=version)})


def _publish(world: World, trainer: Trainer, attempt: str) -> WeightsRef:
    version = trainer.health(False).version or 0
    prefix = world.folder("weights", version, attempt)
    written = trainer.publish(Publish(owner=trainer.fence.owner, version=version, prefix=prefix))
    return world.commit("weights", version, attempt, written.files)


def test_training_makes_the_next_version_and_writes_its_tables(rlhf: World) -> None:
    trainer = rlhf.trainer()
    before = _weights(trainer)
    answer = trainer.train(_grpo(rlhf, 0))
    assert answer.version == 1
    assert not torch.equal(before, _weights(trainer))
    steps = read_table(rlhf.store, answer.tables["train_steps"])
    samples = read_table(rlhf.store, answer.tables["train_samples"])
    assert steps["step"].to_pylist() == [1, 2]
    assert samples.num_rows == 12
    assert answer.metrics["loss"] == pytest.approx(sum(steps["loss"].to_pylist()) / 2)
    health = trainer.health(False).model_dump(exclude={"stored"})
    expected = {"version": 1, "step": 2, "owner": 1, "busy": False, "kept": None, "done": 12, "of": 12, "storing": ""}
    assert health == expected


def test_a_repeat_gets_the_recorded_result_and_steps_once(rlhf: World) -> None:
    trainer = rlhf.trainer()
    command = _grpo(rlhf, 0)
    first = trainer.train(command)
    weights = _weights(trainer)
    assert trainer.train(command) == first
    assert trainer.train(command.model_copy(update={"prefix": rlhf.prefix(), "owner": 4})) == first
    assert torch.equal(weights, _weights(trainer))
    assert trainer.health(False).step == 2


def test_what_is_stale_is_refused_and_changes_nothing(rlhf: World) -> None:
    trainer = rlhf.trainer(owner=3)
    command = _grpo(rlhf, 0, owner=3)
    trainer.train(command)
    weights = _weights(trainer)
    with pytest.raises(StaleCommand, match="version 1 is held"):
        trainer.train(command.model_copy(update={"digest": "another"}))
    with pytest.raises(StaleCommand, match="start #2 of this run was superseded by start #3"):
        trainer.run(_grpo(rlhf, 1, owner=2))
    with pytest.raises(StaleCommand, match="superseded"):
        trainer.run(Load(owner=2, version=0, weights=rlhf.initial))
    with pytest.raises(StaleCommand, match="version 0 was expected"):
        trainer.publish(Publish(owner=3, version=0, prefix=rlhf.folder("weights", 0, "x")))
    assert torch.equal(weights, _weights(trainer))


def test_unreadable_input_leaves_the_memory_as_it_was(rlhf: World) -> None:
    trainer = rlhf.trainer()
    command = _grpo(rlhf, 0)
    shard = rlhf.store.local(command.tables["advantage"].shards[0].path)
    assert shard is not None
    good = shard.read_bytes()
    shard.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(UserError, match=shard.name):
        trainer.train(command)
    shard.write_bytes(good)
    assert trainer.train(command).version == 1


def test_tables_that_could_not_be_written_are_written_by_the_retry(
    rlhf: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = rlhf.trainer()
    command = _grpo(rlhf, 0)
    with monkeypatch.context() as patch:
        patch.setattr(service, "write_table", _fail)
        with pytest.raises(UserError, match="store is full"):
            trainer.train(command)
    weights = _weights(trainer)
    assert read_table(rlhf.store, trainer.train(command).tables["train_steps"]).num_rows == 2
    assert torch.equal(weights, _weights(trainer))


def test_the_trainer_shows_how_much_of_what_servers_have_to_score_it_has_scored(
    rlhf: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    rlhf.recipe = rlhf_recipe(rollout={"max_head_offpolicyness": 1}, trainer={"micro_batch_tokens": 16})
    trainer, seen = rlhf.trainer(), list[tuple[int, int]]()
    score = trainer.backend.score

    def watched(*given: Any) -> Any:
        health = trainer.health(True)
        seen.append((health.done, health.of))
        return score(*given)

    monkeypatch.setattr(trainer.backend, "score", watched)
    trainer.train(_grpo(rlhf, 0))
    assert len(set(seen)) > 2 and seen[0] == (0, len(LENGTHS)) and seen == sorted(seen), seen
    assert (trainer.work.done, trainer.work.of) == (len(LENGTHS), len(LENGTHS))


def test_servers_have_to_score_what_the_new_weights_make_of_the_batch_if_it_is_too_old(rlhf: World) -> None:
    """They are given the trainer's scores, at temperature 1, whatever the recipe's; not once enough is recent."""
    rlhf.recipe = rlhf_recipe(rollout={"max_head_offpolicyness": 1}, algorithm={"minibatches": 1})
    trainer = rlhf.trainer()
    command = _grpo(rlhf, 0)
    scored = read_table(rlhf.store, trainer.train(command).tables["scored"])
    assert scored.num_rows == len(LENGTHS)
    prefix = rlhf.folder("weights", 1, "scored")
    trainer.publish(Publish(owner=1, version=1, prefix=prefix))
    folder = rlhf.store.local(prefix)
    assert folder is not None
    check_scores(scored, folder, 1)
    many = rollout([16] * 24, version=1)
    done = trainer.train(rlhf.train_command(1, {"rollout": many, "advantage": advantage(many)}))
    assert done.tables["scored"].rows == 0, "its own tokens measured it"


def _fail(*_: Any) -> None:
    raise UserError("the store is full")


def test_training_that_fails_half_way_must_be_loaded_again(rlhf: World) -> None:
    rlhf.recipe = rlhf_recipe(trainer={"max_skipped_steps": 0})
    trainer = rlhf.trainer()
    table = rollout(LENGTHS)
    poisoned = with_column(advantage(table), "advantages", [[float("nan")] * n for n in LENGTHS])
    command = rlhf.train_command(0, {"rollout": table, "advantage": poisoned})
    with pytest.raises(UserError, match="optimizer steps in a row"):
        trainer.train(command)
    assert trainer.health(False).version is None
    with pytest.raises(StaleCommand, match="nothing is loaded"):
        trainer.train(command)
    trainer.load(Load(owner=1, version=0, weights=rlhf.initial))
    assert trainer.train(_grpo(rlhf, 0)).version == 1


def test_replay_follows_the_recorded_plan_to_the_bit(rlhf: World) -> None:
    """The recorded minibatches and micro-batches are used even where the recipe would now deal differently."""
    first = rlhf.trainer()
    command = _grpo(rlhf, 0)
    answer = first.train(command)
    rlhf.recipe = {**rlhf_recipe(trainer={"micro_batch_tokens": 10_000}), "seed": 99}
    second = rlhf.trainer(owner=2)
    replay = command.model_copy(update={"owner": 2, "plan": answer.tables["train_samples"], "prefix": None})
    again = second.train(replay)
    assert again.tables == {}
    assert torch.equal(_weights(first), _weights(second))
    seconds = {"train_seconds": 0.0}
    assert {**again.metrics, **seconds} == {**answer.metrics, **seconds}


@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_three_iterations_a_checkpoint_and_three_more_are_six(world: World, kind: str) -> None:
    world.recipe = rlhf_recipe(trainer=_DECAY) if kind == "grpo" else {**world.recipe, "trainer": _DECAY}
    make = _grpo if kind == "grpo" else _sft
    straight = world.trainer()
    for version in range(3):
        straight.train(make(world, version))
    weights, state = _publish(world, straight, "a"), world.checkpoint(straight, "a")
    for version in range(3, 6):
        straight.train(make(world, version))
    resumed = Trainer(world.spec(owner=2))
    resumed.load(Load(owner=2, version=3, weights=weights, checkpoint=state))
    assert resumed.progress.step == 6
    for version in range(3, 6):
        resumed.train(make(world, version).model_copy(update={"owner": 2}))
    assert torch.equal(_weights(straight), _weights(resumed))
    assert _publish(world, straight, "b").digest == _publish(world, resumed, "c").digest


_DECAY = {"lr": 1e-3, "lr_schedule": "cosine", "lr_final": 0.1, "warmup_steps": 2, "micro_batch_tokens": 40}


def test_a_store_on_s3_shares_no_folder(s3_store: Store, tiny: Path) -> None:
    """Weights and checkpoints come and go through the object store alone, to the same bits."""
    world = World(s3_store, tiny, rlhf_recipe(), run=f"trainer-{uuid.uuid4().hex[:8]}")
    first = world.trainer()
    first.train(_grpo(world, 0))
    weights, state = _publish(world, first, "a"), world.checkpoint(first, "a")
    second = Trainer(world.spec(owner=2))
    second.load(Load(owner=2, version=1, weights=weights, checkpoint=state))
    for trainer in (first, second):
        trainer.train(_grpo(world, 1).model_copy(update={"owner": 2}))
    assert torch.equal(_weights(first), _weights(second))
    assert _publish(world, first, "b").digest == _publish(world, second, "c").digest


def test_a_fresh_optimizer_differs_from_a_restored_one(rlhf: World) -> None:
    """The checkpoint is what makes the test above hold: weights alone do not."""
    straight = rlhf.trainer()
    straight.train(_grpo(rlhf, 0))
    weights = _publish(rlhf, straight, "a")
    straight.train(_grpo(rlhf, 1))
    fresh = Trainer(rlhf.spec(owner=2))
    fresh.load(Load(owner=2, version=1, weights=weights))
    assert fresh.progress.step == 2
    fresh.train(_grpo(rlhf, 1).model_copy(update={"owner": 2}))
    assert not torch.equal(_weights(straight), _weights(fresh))


def test_a_checkpoint_carries_the_count_of_skipped_steps(rlhf: World) -> None:
    trainer = rlhf.trainer()
    trainer.progress = Progress(step=5, skipped_in_row=2)
    state = rlhf.checkpoint(trainer, "a")
    other = Trainer(rlhf.spec(owner=2))
    other.load(Load(owner=2, version=0, weights=rlhf.initial, checkpoint=state))
    assert other.progress == Progress(step=5, skipped_in_row=2)


def test_another_version_than_asked_for_is_not_loaded(rlhf: World) -> None:
    trainer = Trainer(rlhf.spec())
    with pytest.raises(StaleCommand, match="holds version 0"):
        trainer.load(Load(owner=1, version=4, weights=rlhf.initial))
    assert trainer.health(False).version is None


def test_published_weights_are_a_model_with_its_tokenizer(rlhf: World, tiny: Path) -> None:
    trainer = rlhf.trainer()
    trainer.train(_grpo(rlhf, 0))
    folder = rlhf.folder("weights", 1, "a")
    written = trainer.publish(Publish(owner=1, version=1, prefix=folder))
    names = {Path(f.path).name for f in written.files}
    assert {"model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    local = rlhf.store.local(folder)
    assert local is not None
    assert json.loads((local / "config.json").read_text())["dtype"] == "float32"
    assert all(t.dtype == torch.float32 for t in load_file(local / "model.safetensors").values())
    loaded = AutoModelForCausalLM.from_pretrained(local)
    held = trainer.backend.models["policy"].model.state_dict()  # type: ignore[attr-defined]
    assert all(torch.equal(held[name], tensor) for name, tensor in loaded.state_dict().items())
    assert (
        AutoTokenizer.from_pretrained(local)("3+5=").input_ids == AutoTokenizer.from_pretrained(tiny)("3+5=").input_ids
    )


def test_kept_weights_are_published_as_they_were_whatever_is_trained_since(rlhf: World) -> None:
    trainer = rlhf.trainer()
    before = trainer.publish(Publish(owner=1, version=0, prefix=rlhf.folder("weights", 0, "before"))).files
    trainer.keep(Keep(owner=1, version=0))
    trainer.train(_grpo(rlhf, 0))
    assert (trainer.health(False).kept, trainer.health(False).version) == (0, 1)
    after = trainer.publish(Publish(owner=1, version=0, prefix=rlhf.folder("weights", 0, "after"))).files
    assert [file.sha256 for file in after] == [file.sha256 for file in before]
    trainer.load(Load(owner=1, version=0, weights=rlhf.initial))
    assert trainer.health(False).kept is None, "a policy that was restored need not be bitwise the same"


def test_reference_is_version_0_for_good_and_policy_is_not(rlhf: World) -> None:
    trainer = rlhf.trainer()
    ref = rlhf.write("rollout", rollout(LENGTHS))

    def scored(which: str, version: int) -> pa.Table:
        body = {"owner": 1, "version": version, "which": which, "table": ref, "prefix": rlhf.prefix()}
        return read_table(rlhf.store, trainer.logprobs(Logprobs.model_validate(body)).tables[TABLE[which]])

    policy = scored("policy", 0)
    trainer.train(_grpo(rlhf, 0))
    reference = scored("reference", 1)
    assert reference["ref_logprobs"].equals(policy["prox_logprobs"])
    assert not scored("policy", 1)["prox_logprobs"].equals(reference["ref_logprobs"])
    with pytest.raises(StaleCommand):
        scored("policy", 0)
    masks = rollout(LENGTHS)["loss_mask"].to_pylist()
    for mask, values in zip(masks, reference["ref_logprobs"].to_pylist(), strict=True):
        assert [v < 0 for v in values] == mask


def test_a_first_step_on_its_own_samples_has_ratio_one(rlhf: World) -> None:
    """Logprobs of the policy itself as behaviour: no drift, and the loss is minus the mean advantage."""
    rlhf.recipe = rlhf_recipe(algorithm={"minibatches": 1})
    trainer = rlhf.trainer()
    table = rollout(LENGTHS)
    body = {"owner": 1, "version": 0, "which": "policy", "table": rlhf.write("rollout", table), "prefix": rlhf.prefix()}
    own = read_table(rlhf.store, trainer.logprobs(Logprobs.model_validate(body)).tables["proximal"])
    table = with_column(table, "logprobs", own["prox_logprobs"].to_pylist())
    gains = advantage(table)
    metrics = trainer.train(rlhf.train_command(0, {"rollout": table, "advantage": gains})).metrics
    counts = [n - 2 for n in LENGTHS]
    mean = sum(g[0] * n for g, n in zip(gains["advantages"].to_pylist(), counts, strict=True)) / sum(counts)
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["clip_fraction"] == 0.0
    assert metrics["loss"] == pytest.approx(-mean, abs=1e-5)


def test_a_recipe_of_the_other_kind_is_refused(rlhf: World) -> None:
    with pytest.raises(UserError, match="started for grpo, not for sft"):
        rlhf.trainer().train(_sft(rlhf, 0))


def test_answers_survive_json(rlhf: World) -> None:
    answer = rlhf.trainer().train(_grpo(rlhf, 0))
    assert Trained.model_validate_json(answer.model_dump_json()) == answer


@pytest.mark.parametrize("shared", [True, False])
def test_memory_is_given_back_where_servers_wait_for_it(
    shared: bool, monkeypatch: pytest.MonkeyPatch, rlhf: World
) -> None:
    given: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append("train"))
    rlhf.recipe = rlhf_recipe(inference={"engine": "sglang", "release_memory": shared})
    rlhf.trainer().train(_grpo(rlhf, 0))
    assert given == ["train"] * shared


def test_what_cannot_be_cleared_away_fails_no_command(rlhf: World) -> None:
    """Another program tidies up temporary folders while the trainer runs."""
    trainer = rlhf.trainer()
    shutil.rmtree(trainer.fetched.parent)
    trainer.clear()
    assert trainer.train(_grpo(rlhf, 0)).version == 1
