"""Services of a group, as a trainer on several machines is: they end together, and find each other after a restart."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from scripted_starts import at_once
from waiting import LIMIT, wait_until

from areal_tasks.engines import session
from areal_tasks.engines.service import UNAVAILABLE, ServiceSpec, register
from areal_tasks.launchers import protocol
from areal_tasks.launchers.cluster import PREEMPTED
from areal_tasks.launchers.protocol import Job
from areal_tasks.launchers.supervisor import ServiceFailed, Supervisor
from areal_tasks.store.backend import Unavailable, open_store
from areal_tasks.store.parallel import in_background
from schemas.manifest import WeightsRef
from schemas.recipe.launcher import Launcher

NAMES = ("trainer", "trainer-1")


class Scripted:
    """A launcher and its handles: services listen at once, wait for a machine, or end with the status in `ends`."""

    authority = ""

    def __init__(self) -> None:
        self.ends: int | None = None
        self.waits: set[str] = set()
        self.silent: set[str] = set()

    def start(self, job: Job) -> Scripted.Handle:
        if self.ends is None and job.spec.name not in self.waits | self.silent:
            register(job.spec, f"http://{job.spec.name}/{job.spec.restart}")
        return Scripted.Handle(job.spec.name, self.ends, self)

    def close(self) -> None:
        """Nothing runs."""

    class Handle:
        def __init__(self, name: str, code: int | None, launcher: Scripted) -> None:
            self.name, self.code, self.launcher = name, code, launcher
            self.taken = False  # by the cluster, which says so once it is stopped

        def exit_code(self) -> int | None:
            return self.code

        def waiting(self) -> str:
            return "no machine is free" if self.name in self.launcher.waits else ""

        def usage(self) -> None:
            """It takes nothing."""

        def stop(self, grace_seconds: float = 5.0) -> None:
            if self.code is None:
                self.code = PREEMPTED if self.taken else -15


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Supervisor, Scripted]]:
    """A supervisor without services; each look at the clock is a second after the one before."""
    monkeypatch.setattr("areal_tasks.launchers.supervisor.time", SimpleNamespace(monotonic=itertools.count().__next__))
    monkeypatch.setattr(protocol, "in_background", at_once)
    store = open_store((tmp_path / "store").as_uri())
    with Supervisor(store, Launcher(restarts=3), tmp_path / "logs") as supervisor:
        supervisor.launcher = launcher = Scripted()
        yield supervisor, launcher


def start(supervisor: Supervisor) -> None:
    for name in NAMES:
        url = supervisor.store.url
        spec = ServiceSpec(name=name, restart=0, store_url=url, run="r", owner=1, recipe={})
        supervisor.start("m", spec, group="trainer")
        supervisor.services[name].started = 0.0


def restarts(supervisor: Supervisor) -> set[int]:
    return {supervisor.services[name].spec.restart for name in NAMES}


@pytest.mark.parametrize("first", NAMES)
def test_a_group_restarts_together_while_the_store_comes_and_goes(
    group: tuple[Supervisor, Scripted], first: str
) -> None:
    """Its members meet under the number of their start, so that number has to be the same."""
    supervisor, launcher = group
    start(supervisor)
    assert len(supervisor.wait(NAMES)) == 2
    launcher.ends = UNAVAILABLE
    supervisor.services[first].handle.code = UNAVAILABLE  # type: ignore[attr-defined]
    for _ in range(60):
        quietly(supervisor)
    launcher.ends = None
    for _ in range(60):
        quietly(supervisor)
    assert len(supervisor.poll(NAMES)) == 2
    assert len(restarts(supervisor)) == 1, [supervisor.services[name].spec.restart for name in NAMES]


def quietly(supervisor: Supervisor) -> None:
    with suppress(Unavailable):
        supervisor.poll(NAMES)


def test_a_member_that_runs_may_await_one_without_a_machine(group: tuple[Supervisor, Scripted]) -> None:
    supervisor, launcher = group
    launcher.waits, launcher.silent = {"trainer"}, {"trainer-1"}
    start(supervisor)
    for _ in range(1000):  # longer than launcher.startup_seconds
        assert supervisor.poll(NAMES) == []
    launcher.waits = set()
    with pytest.raises(ServiceFailed, match="was not ready within"):
        for _ in range(1000):
            supervisor.poll(NAMES)


def test_a_cluster_that_gives_no_machine_in_time_ends_the_run(group: tuple[Supervisor, Scripted]) -> None:
    supervisor, launcher = group
    supervisor.settings = supervisor.settings.model_copy(update={"queue_seconds": 1000.0})
    launcher.waits = {"trainer-1"}
    start(supervisor)
    with pytest.raises(ServiceFailed, match=r"was given no machine within launcher\.queue_seconds = 1000"):
        for _ in range(100_000):
            supervisor.poll(NAMES)


@pytest.mark.parametrize("failures", [0, 3])
def test_the_error_is_that_of_the_member_with_which_it_began(group: tuple[Supervisor, Scripted], failures: int) -> None:
    supervisor, launcher = group
    launcher.silent = set() if failures else set(NAMES)
    start(supervisor)
    supervisor.poll(NAMES)
    second = supervisor.services["trainer-1"]
    second.job.log.parent.mkdir(parents=True)
    second.job.log.write_text("no memory is left")
    second.failures, second.handle.code = failures, 1  # type: ignore[attr-defined]
    said = r"failed 4 times" if failures else "ended with 1 while starting"
    with pytest.raises(ServiceFailed, match=rf"(?s)service 'trainer-1' {said}.*no memory is left"):
        for _ in range(50):
            supervisor.poll(NAMES)


def test_a_trainer_is_restarted_while_the_flow_waits_for_its_answer(
    group: tuple[Supervisor, Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 cannot answer without the others, and a run without rollout workers waits for nothing else."""
    monkeypatch.setattr(session, "SUPERVISE_SECONDS", 0.01)
    supervisor, _ = group
    start(supervisor)
    closed, servers = threading.Event(), SimpleNamespace(all_workers=[])
    engines = SimpleNamespace(
        supervisor=supervisor, servers=servers, trainers={"trainer": SimpleNamespace(names=NAMES)}, _closed=closed
    )
    supervising = in_background(lambda: session.Engines._supervise(cast(Any, engines)), "supervise")
    wait_until(lambda: all(supervisor.services[name].url for name in NAMES), "both parts")
    supervisor.services["trainer-1"].handle.code = 69  # type: ignore[attr-defined]
    wait_until(lambda: restarts(supervisor) == {1}, "the next start of both")
    closed.set()
    supervising.result(LIMIT)


def test_what_the_cluster_takes_from_one_counts_for_none(group: tuple[Supervisor, Scripted]) -> None:
    supervisor, launcher = group
    launcher.silent = set(NAMES)
    start(supervisor)
    for restart in range(6):
        supervisor.services["trainer-1"].handle.code = PREEMPTED  # type: ignore[attr-defined]
        while restarts(supervisor) == {restart}:
            supervisor.poll(NAMES)
        supervisor.poll(NAMES)  # takes the handles of both starts
    assert [supervisor.services[name].failures for name in NAMES] == [0, 0]


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("said_later", [False, True])
def test_nor_counts_the_failure_of_those_that_need_it(
    group: tuple[Supervisor, Scripted], silent: bool, said_later: bool
) -> None:
    """Rank 0 sees at once that its connection to another has ended; the cluster system says why after that."""
    supervisor, launcher = group
    launcher.silent = set(NAMES) if silent else set()
    start(supervisor)
    for restart in range(6):
        supervisor.poll(NAMES)
        first, second = (cast(Scripted.Handle, supervisor.services[name].handle) for name in NAMES)
        first.code, second.taken = 1, True
        if not said_later:
            second.stop()
        while restarts(supervisor) == {restart}:
            supervisor.poll(NAMES)
    assert [supervisor.services[name].failures for name in NAMES] == [0, 0]


def test_all_end_though_one_ends_during_a_poll(
    group: tuple[Supervisor, Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor, _ = group
    start(supervisor)
    supervisor.wait(NAMES)
    end_groups = supervisor._end_groups

    def end_groups_before_it_ends() -> None:
        end_groups()
        if restarts(supervisor) == {0}:
            supervisor.services["trainer"].handle.code = 1  # type: ignore[attr-defined]

    monkeypatch.setattr(supervisor, "_end_groups", end_groups_before_it_ends)
    for _ in range(200):
        supervisor.poll(NAMES)
    assert restarts(supervisor) == {1}


def test_all_that_join_have_the_same_number(group: tuple[Supervisor, Scripted]) -> None:
    """They meet under it, though the thread that supervises rollout workers may retire one meanwhile."""
    supervisor, _ = group
    alone = ServiceSpec(name="rollout-1", restart=0, store_url=supervisor.store.url, run="r", owner=1, recipe={})
    supervisor.start("m", alone)
    supervisor.join("m", alone.model_copy(update={"name": NAMES[0]}), group="trainer")
    supervisor.retire("rollout-1")
    supervisor.join("m", alone.model_copy(update={"name": NAMES[1]}), group="trainer")
    assert restarts(supervisor) == {0}
    supervisor.join("m", alone)
    assert supervisor.services["rollout-1"].spec.restart == 1


def test_a_member_that_fails_too_often_ends_the_run(group: tuple[Supervisor, Scripted]) -> None:
    supervisor, launcher = group
    start(supervisor)
    supervisor.wait(NAMES)
    supervisor.services["trainer-1"].failures = 3
    launcher.ends = 1
    supervisor.services["trainer-1"].handle.stop()
    with pytest.raises(ServiceFailed):
        for _ in range(50):
            supervisor.poll(NAMES)


def test_who_knows_the_first_of_a_group_knows_all(group: tuple[Supervisor, Scripted]) -> None:
    """As those who use a server over several machines do."""
    supervisor, _ = group
    start(supervisor)
    [url] = supervisor.wait(NAMES[:1])
    supervisor.services["trainer-1"].handle.code = 1  # type: ignore[attr-defined]
    while restarts(supervisor) != {1}:
        supervisor.poll(NAMES[:1])
    assert supervisor.wait(NAMES[:1]) == [url.replace("/0", "/1")]
    weights = WeightsRef(version=3, attempt="", path="", sha256="", digest="")
    supervisor.began_on(NAMES[0], weights)
    assert all(supervisor.services[name].spec.weights == weights for name in NAMES)
    supervisor.retire(NAMES[0])
    assert not supervisor.services
