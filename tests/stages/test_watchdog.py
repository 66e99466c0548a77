"""Services that hang: they are named with what the run waits for, ended, started again, and no bit is lost."""

from __future__ import annotations

import itertools
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from logging.handlers import MemoryHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flying_clock import SETTINGS, FlyingClock, poll_often
from stage_driver import digests, drive, tiny
from waiting import LIMIT
from warm_processes import Process

from areal_tasks.engines import server, starting, trainer_client
from areal_tasks.engines.service import UNAVAILABLE
from areal_tasks.engines.trainer.local import LocalBackend
from areal_tasks.engines.watchdog import THIS_PROCESS, Heartbeat, Watchdog
from areal_tasks.stages.build import Built
from areal_tasks.stages.jobs import Job, run_directly
from areal_tasks.store.backend import open_store
from areal_tasks.store.in_flight import Ledger
from schemas.recipe.launcher import Launcher

WATCHED = tiny(launcher=SETTINGS)


def test_services_that_hang_are_named_ended_and_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive(tmp_path, "whole", WATCHED)
    poll_often(monkeypatch)
    for module in (server, trainer_client):
        monkeypatch.setattr(module, "HEALTH_SECONDS", 0.1)
    victims = {"train 1": "trainer", "rollout 2": "inference-0"}

    def execute(jobs: Sequence[Job]) -> list[Built]:
        if (victim := victims.pop(jobs[0].label, None)) is not None:
            engines = jobs[0].context.engines
            FlyingClock(engines.watchdog).stop(engines.supervisor.services[victim].handle)  # type: ignore[arg-type]
        return run_directly(jobs)

    with caplog.at_level(logging.WARNING, "areal_tasks"):
        drive(tmp_path, "r", WATCHED, execute)
    assert digests(tmp_path, "r") == digests(tmp_path, "whole")
    told(caplog.messages, "trainer", r"/(health|train of version 1)")
    told(caplog.messages, "inference-0", "generation")
    logs = {path.name for path in (tmp_path / "logs" / "r").iterdir()}
    assert logs == {f"{name}-1-{restart}.log" for name in ("trainer", "inference-0") for restart in range(2)} | {
        "rollout-0-1-0.log",
        "rollout-evaluation-1-0.log",
    }


def told(messages: Sequence[str], victim: str, waits_for: str) -> None:
    """The log names `victim` twice at least, then says that it is ended."""
    warned = [m for m in messages if re.search(rf"waiting for {victim}, {waits_for}: no progress since ", m)]
    assert len(warned) >= 2, messages  # at a first interval, and at a longer one
    assert re.search(r"since \d\d:\d\d:\d\d \(\d+ s\); .*After 120 s \(launcher\.hang_seconds\)", warned[0])
    [ended] = [m for m in messages if "ending it" in m and f"service {victim} " in m]
    assert re.search(rf"service {victim} at http://\S+ hangs at {waits_for}: no progress since", ended)


# ── the rules, by themselves ────────────────────────────────────────────────────────────────────────────────────────

WARN, HANG = 10.0, 40.0


class Watched(Watchdog):
    """A watchdog that polls only when called, with a clock that stands still in between; and what it has ended."""

    def __init__(self, kind: str = "local") -> None:
        settings = Launcher.model_validate({"type": kind, "warn_seconds": WARN, "hang_seconds": HANG})
        self.now, self.ended, self.ledger = 0.0, list[str](), Ledger(lambda: self.now)
        super().__init__(
            settings, lambda name, why: self.ended.append(f"{name} {why}"), self.ledger, clock=lambda: self.now
        )

    def _run(self, poll: Callable[[], None]) -> None:
        """Nothing happens by itself."""

    def for_seconds(self, seconds: float, every: float = 2.5) -> None:
        """Poll as often as it does by itself, or more rarely."""
        end = self.now + seconds
        while self.now < end:
            self.now += every
            self.check_store()
            self.poll_all()


def stuck() -> Mapping[str, Heartbeat]:
    return {"stuck": Heartbeat(7, "at 7")}


def test_whoever_gets_on_is_left_alone_however_long_it_takes(caplog: pytest.LogCaptureFixture) -> None:
    watchdog = Watched()
    with watchdog.waiting("a long step", lambda: {"slow": Heartbeat(watchdog.now, "slowly")}):
        watchdog.for_seconds(100 * HANG)
    assert not watchdog.ended and not caplog.messages


def test_only_the_one_that_is_silent_is_ended() -> None:
    watchdog = Watched()

    def poll() -> Mapping[str, Heartbeat]:
        return {"slow": Heartbeat(watchdog.now, "slowly"), **stuck(), "dead": Heartbeat(None, "no answer")}

    with watchdog.waiting("work", poll):
        watchdog.for_seconds(HANG - 2.5)
        assert not watchdog.ended
        watchdog.for_seconds(5.0)
    assert [line.split()[0] for line in watchdog.ended] == ["dead", "stuck"]
    assert re.search(r"stuck hangs at work: no progress since [\d:]{8} \(40 s\); at 7", "\n".join(watchdog.ended))


def test_whoever_hangs_again_is_ended_again() -> None:
    watchdog = Watched()
    with watchdog.waiting("work", lambda: {"stuck": Heartbeat(n := len(watchdog.ended), f"at {n}")}):
        watchdog.for_seconds(2.5 * HANG)
    assert [line[-4:] for line in watchdog.ended] == ["at 0", "at 1"]


def test_complaints_become_rarer(caplog: pytest.LogCaptureFixture) -> None:
    watchdog = Watched()
    with watchdog.waiting("work", stuck, limit="something else"):
        watchdog.for_seconds(12 * WARN)
    assert len(caplog.messages) == 4 and not watchdog.ended  # after 1, 2, 4 and 8 times as long
    assert "it is restarted" not in caplog.text


def test_of_two_that_are_at_one_thing_that_whose_sign_names_another_end_is_left_alone() -> None:
    watchdog = Watched()
    with watchdog.waiting("work", lambda: stuck() | {"foreign": Heartbeat(7, "at 7", "its own limit")}):
        watchdog.for_seconds(1.5 * HANG)
        assert {wait.at: wait.limit for wait in watchdog.waits(0.0)}["foreign"] == "its own limit"
    assert [line.split()[0] for line in watchdog.ended] == ["stuck"]


def test_what_else_ends_the_work_of_a_service_is_told_and_what_ends_a_wait_may_change() -> None:
    watchdog, limit = Watched(), "none until a machine runs it"
    with watchdog.waiting("work", lambda: {"a": Heartbeat(7, "", limit, "60 s for each group")}):
        watchdog.for_seconds(10.0)
        assert watchdog.waits(0.0)[0].limit == limit
        limit = ""
        watchdog.for_seconds(5.0)
        hung = "no progress for 40 s (launcher.hang_seconds)"
        assert watchdog.waits(0.0)[0].limit == f"{hung}; 60 s for each group"
        watchdog.for_seconds(HANG)
    assert watchdog.ended


def test_a_service_has_no_time_to_start_in_before_a_machine_runs_it() -> None:
    watchdog, limits, waiting = Watched(), list[str](), ["Resources", ""]

    def wait(*_: object) -> list[str]:
        while waiting:
            watchdog.for_seconds(5.0)
            limits.append(watchdog.waits(0.0)[0].limit)
            waiting.pop(0)
        return []

    handle = SimpleNamespace(waiting=lambda: waiting[0])
    spec, job = SimpleNamespace(name="a"), SimpleNamespace(log="its log")
    group = [SimpleNamespace(handle=handle, url="", spec=spec, job=job, logged=False, reason="")]
    supervisor: Any = SimpleNamespace(members=lambda _: group, wait=wait, services={"a": group[0]})
    starting.ready(supervisor, watchdog, ["a"])
    assert limits == [starting.NO_MACHINE, "launcher.startup_seconds"]


def test_threads_of_this_process_are_named_and_cannot_be_ended(caplog: pytest.LogCaptureFixture) -> None:
    watchdog = Watched(kind="inline")
    with watchdog.waiting("work", stuck):
        watchdog.for_seconds(2 * HANG)
        assert watchdog.waits(0.0)[0].limit == "none for a thread (launcher.type inline)"
    assert caplog.messages and not watchdog.ended


def test_who_has_nothing_to_do_is_not_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    watchdog = Watched()
    turns = itertools.cycle([{"a": Heartbeat(1, "")}, {}])
    with watchdog.waiting("work", lambda: next(turns)):
        watchdog.for_seconds(2 * HANG)
    assert not watchdog.ended and not caplog.messages


def test_a_look_that_fails_does_not_end_the_watch() -> None:
    watchdog = Watched()

    def broken() -> Mapping[str, Heartbeat]:
        raise RuntimeError("cannot poll")

    with watchdog.waiting("one", broken), watchdog.waiting("other", stuck):
        watchdog.for_seconds(HANG + 2.5)
    assert watchdog.ended


def test_what_the_store_does_not_answer_is_named(caplog: pytest.LogCaptureFixture) -> None:
    watchdog = Watched()
    with watchdog.ledger.entry("read", "s3://bucket/run/x.json"):
        watchdog.for_seconds(WARN)
    assert re.search(
        r"waiting for the store, read s3://bucket/run/x\.json: no answer since [\d:]{8} \(10 s\)", caplog.text
    )
    assert not watchdog.ended and watchdog.ledger.in_flight() == [] and watchdog.ledger.ended == 1


def test_a_store_that_hangs_ends_the_process(caplog: pytest.LogCaptureFixture) -> None:
    statuses: list[int] = []
    watchdog = Watched()
    watchdog.ledger.end_process = statuses.append
    watchdog.settings = watchdog.settings.model_copy(update={"store_seconds": 30.0})
    with watchdog.ledger.entry("read", "/disk/run/x.json"):
        watchdog.for_seconds(25.0)
        assert statuses == [] and "30 s (launcher.store_seconds)" in watchdog.waits(20.0)[0].limit
        watchdog.for_seconds(10.0)
    assert UNAVAILABLE in statuses
    assert "no answer to read /disk/run/x.json in launcher.store_seconds = 30; this process ends" in caplog.text


def waits_for_the_store(name: str, why: str) -> None:
    threading.Event().wait()


def hang_at_the_store(path: str) -> None:
    """A process that reads a store whose file never answers: a pipe that has no writer.

    What ends a service that hangs waits for the store, too. The log is written when it is flushed.
    """
    settings = Launcher.model_validate({"warn_seconds": 0.1, "hang_seconds": 0.2, "store_seconds": 1.0})
    logging.root.addHandler(MemoryHandler(1000, logging.CRITICAL + 1, logging.FileHandler(f"{path}.log")))
    watchdog = Watchdog(settings, waits_for_the_store)
    with watchdog.waiting("work", stuck):
        open_store(f"file://{Path(path).parent}").read(Path(path).name)


def test_a_process_whose_disk_hangs_ends(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.json")
    process = Process(hang_at_the_store, str(tmp_path / "x.json"))
    assert process.wait(LIMIT) == UNAVAILABLE
    assert "the store hangs: no answer to read " in (tmp_path / "x.json.log").read_text()


def test_what_is_waited_for_is_told_with_who_is_at_it_since_when_and_what_ends_it() -> None:
    watchdog = Watched()

    def told(seconds: float = 20.0) -> list[tuple[str, str, float, str]]:
        return [(wait.at, wait.what, wait.seconds, wait.says) for wait in watchdog.waits(seconds)]

    with watchdog.waiting("a stage"):
        watchdog.for_seconds(25.0)
        assert told() == [(THIS_PROCESS, "a stage", 25.0, "")] and not told(30.0)
        with watchdog.waiting("work", stuck), watchdog.ledger.entry("read", "x.json"):
            watchdog.for_seconds(20.0)
            assert told() == [("the store", "read x.json", 20.0, ""), ("stuck", "work", 20.0, "at 7")]
            assert "launcher.hang_seconds" in watchdog.waits(20.0)[1].limit
        with watchdog.waiting("verdicts", stuck, limit="reward.wall_seconds"):
            watchdog.for_seconds(20.0)
            assert watchdog.waits(20.0)[0].limit == "reward.wall_seconds"
        assert [what for _, what, _, _ in told()] == ["a stage"]
    assert not told(0.0)


def test_it_looks_by_itself() -> None:
    ended = threading.Event()
    settings = Launcher.model_validate({"type": "local", "warn_seconds": 0.05, "hang_seconds": 0.1})
    watchdog = Watchdog(settings, lambda name, why: ended.set(), Ledger())
    try:
        with watchdog.waiting("work", stuck):
            assert ended.wait(LIMIT)
    finally:
        watchdog.close()


# ── what a trainer says of its progress ─────────────────────────────────────────────────────────────────────────────


def test_each_pass_through_the_model_is_a_sign_of_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a step may take as long as it likes: what must not last longer than the deadline is one micro-batch."""
    heartbeats: list[object] = []
    learn = LocalBackend.learn

    def execute(jobs: Sequence[Job]) -> list[Built]:
        if jobs[0].label == "train 0":
            client = jobs[0].context.engines.actor.at(0)

            def noted(*arguments: Any) -> Any:
                heartbeats.append(client.heartbeat().progress)
                return learn(*arguments)

            monkeypatch.setattr(LocalBackend, "learn", noted)
        return run_directly(jobs)

    drive(tmp_path, "r", tiny(schedule={"iterations": 1}, trainer={"micro_batch_tokens": 16}), execute)
    assert len(set(heartbeats)) == len(heartbeats) >= 8 and None not in heartbeats
