"""What a run waits for begins as early as it can, and side by side."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
from stage_driver import store_in, tiny, tiny_evaluation, tiny_sft
from waiting import wait_until

from areal_tasks.engines.models import file_states
from areal_tasks.engines.service import ModelFolder, ServiceSpec
from areal_tasks.engines.session import Engines
from areal_tasks.engines.starting import may_load_early, startable_folder
from areal_tasks.rewards.pool import VerifierPool
from areal_tasks.stages.build import Built
from areal_tasks.stages.jobs import Job, run_directly
from areal_tasks.stages.loop import Loop
from areal_tasks.store.opening import open_run
from schemas.manifest import WeightsRef
from schemas.recipe.load import load_recipe
from schemas.recipe.recipe import Recipe


def test_the_trainer_starts_before_there_are_weights_and_servers_before_there_are_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny()
    run, order = open_run(store_in(tmp_path), "r", recipe), list[str]()

    def execute(jobs: Sequence[Job]) -> list[Built]:
        order.append(jobs[0].label)
        return run_directly(jobs)

    with Engines(run, recipe, tmp_path / "logs") as engines:
        monkeypatch.setattr(engines.supervisor, "start", lambda module, spec, *more, **group: order.append(spec.name))
        monkeypatch.setattr(engines, "load_early", lambda version: order.append(f"load {version}"))
        Loop(run, recipe, engines, execute)._begin()
    assert order == ["trainer", "rollout-0", "initialise", "inference-0", "rollout-evaluation", "load 0", "prompts"]


def test_the_trainer_has_loaded_before_it_is_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    recipe = tiny_sft(launcher={"type": "local"})
    run = open_run(store_in(tmp_path), "r", recipe)
    with Engines(run, recipe, tmp_path / "logs") as engines:
        Loop(run, recipe, engines)._begin()
        wait_until(lambda: "no policy loaded; restoring version 0" in caplog.messages)
        assert caplog.messages.count("no policy loaded; restoring version 0") == 1
        assert engines.actor.at(0).health().version == 0
    assert caplog.messages.count("no policy loaded; restoring version 0") == 1


def test_verifiers_do_not_start_after_the_end_of_a_run(tmp_path: Path) -> None:
    """As an evaluation asks for, whose flow has been cancelled while it generated."""
    recipe = tiny()
    with Engines(open_run(store_in(tmp_path), "r", recipe), recipe, tmp_path / "logs") as engines:
        pass
    with pytest.raises(RuntimeError, match="closed"):
        engines.verifiers.verify(())


def sglang(model: Path | str, *overrides: str) -> Recipe:
    return load_recipe("gsm8k", [f"model.path={model}", *overrides])


def test_servers_start_on_the_models_own_folder_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model := tmp_path / "model").mkdir()
    (model / "config.json").write_text("{}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    recipe, specs = sglang(model, "inference.servers=2"), list[ServiceSpec]()
    run = open_run(store_in(tmp_path), "r", recipe)
    with Engines(run, recipe, tmp_path / "logs") as engines:
        monkeypatch.setattr(engines.supervisor.launcher, "start", lambda job: specs.append(job.spec))
        monkeypatch.setattr(VerifierPool, "__enter__", lambda pool: pool)
        engines.begin()
        assert [(spec.name, spec.weights, spec.gpus) for spec in specs] == [
            ("trainer", None, ("0",)),
            ("rollout-0", None, ()),
            ("inference-0", None, ("1",)),
            ("inference-1", None, ("2",)),
        ]
        assert specs[2].folder == specs[3].folder == ModelFolder(path=str(model), files=file_states(model))
        written = WeightsRef(version=0, attempt="a", path="", sha256="", digest="")
        engines.start(written, written, written)
        assert [spec.name for spec in specs[4:]] == ["rollout-evaluation"] and engines.servers.written == written
        engines.supervisor.services.clear()


def test_only_the_first_start_of_a_run_begins_with_the_folder_that_it_copies(tmp_path: Path) -> None:
    (model := tmp_path / "model").mkdir()
    (model / "config.json").write_text("{}")
    recipe = sglang(model)
    run = open_run(store_in(tmp_path), "r", recipe)
    assert startable_folder(run, recipe) is not None
    assert startable_folder(open_run(store_in(tmp_path), "r", recipe), recipe) is None
    for other in (sglang("run://x"), sglang("org/name"), tiny(), tiny_sft()):
        assert startable_folder(run, other) is None


LENDS = ["launcher.type=local", "inference.release_memory=true"]


@pytest.mark.parametrize(
    ("recipe", "early"),
    [
        (tiny(launcher={"type": "local"}), True),
        (tiny_sft(launcher={"type": "local"}), True),
        (tiny(), False),
        (tiny_sft(), False),
        (tiny_evaluation("run://r"), False),
        (load_recipe("gsm8k"), True),
        (load_recipe("gsm8k", LENDS), False),
    ],
)
def test_the_trainer_loads_early_unless_that_disturbs_the_servers(recipe: Recipe, early: bool) -> None:
    assert may_load_early(recipe) is early
