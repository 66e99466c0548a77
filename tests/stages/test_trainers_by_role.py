"""A run's trainers by role: a second one trains, is watched, restarted and ended beside the actor."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from flying_clock import SETTINGS, FlyingClock, poll_often
from stage_driver import digests, drive, store_in, tiny_sft
from waiting import LIMIT, alive, held_back, wait_until

from areal_tasks.engines import session, starting, trainer_client
from areal_tasks.engines.sampling import Sampler
from areal_tasks.engines.session import Engines
from areal_tasks.engines.starting import ACTOR, Role
from areal_tasks.engines.trainer.local import LocalBackend
from areal_tasks.engines.trainer_client import TrainerDown
from areal_tasks.launchers.placement import service_needs
from areal_tasks.stages.build import Built
from areal_tasks.stages.jobs import Job, run_directly
from areal_tasks.stages.loop import Loop
from areal_tasks.store.opening import open_run
from areal_tasks.store.parallel import in_background

CRITIC = Role("critic")


@pytest.fixture(autouse=True)
def with_critic(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (starting, session):
        monkeypatch.setattr(module, "ROLES", (ACTOR, CRITIC))


def test_one_that_hangs_is_restarted_and_trains_bitwise_what_the_actor_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real processes, the critic of the actor's weights. The actor trains on meanwhile."""
    drive(tmp_path, "whole", tiny_sft())
    poll_often(monkeypatch)
    monkeypatch.setattr(trainer_client, "HEALTH_SECONDS", 0.1)
    recipe = tiny_sft(launcher=SETTINGS)
    run = open_run(store_in(tmp_path), "r", recipe)

    def execute(jobs: Sequence[Job]) -> list[Built]:
        if jobs[0].label == "train 1":
            critic, services = engines.trainers[CRITIC], engines.supervisor.services
            assert critic.at(1).health().version == 1
            FlyingClock(engines.watchdog).stop(services["critic"].handle)  # type: ignore[arg-type]
            with pytest.raises(TrainerDown):
                critic.at(1)
        return run_directly(jobs)

    with Engines(run, recipe, tmp_path / "logs") as engines:
        Loop(run, recipe, engines, execute)()
        assert engines.trainers[CRITIC].at(3).health().version == 3
        retrained = engines.trainers[CRITIC].take_retrained()
        assert retrained is not None and retrained.same and retrained.weights == 0
        assert engines.actor.take_retrained() is None
        urls = [engines.supervisor.services[name].url for name in ("trainer", "critic")]
        pids = [service.handle.process.pid for service in engines.supervisor.services.values()]  # type: ignore[attr-defined]
        assert len(set(urls)) == len(set(pids)) == 2 and all(map(alive, pids))
    assert not any(map(alive, pids)) and os.getpid() not in pids
    assert digests(tmp_path, "r") == digests(tmp_path, "whole")
    assert {path.name for path in (tmp_path / "logs" / "r").iterdir()} == {
        "trainer-1-0.log",
        "critic-1-0.log",
        "critic-1-1.log",
    }


def test_what_each_does_and_needs_is_its_own(tmp_path: Path) -> None:
    recipe = tiny_sft(schedule={"iterations": 1})
    run = open_run(store_in(tmp_path), "r", recipe)
    assert service_needs(recipe, False).keys() == {"trainer", "critic"}
    with Engines(run, recipe, tmp_path / "logs") as engines:
        Loop(run, recipe, engines)()
        sampler = Sampler(engines)

        def doing() -> dict[str, str]:
            sampler.observe()
            return {row["service"]: row["doing"] for row in sampler.sample()}

        with held_back(LocalBackend, "learn") as go_on:
            restored = in_background(lambda: engines.trainers[CRITIC].at(1), "critic")
            wait_until(lambda: doing()["critic"] == "train", "the critic's command")
            assert doing()["trainer"] == ""
            go_on.set()
            assert restored.result(LIMIT).health().version == 1
