"""Services that hang: they are named with what the run waits for, ended, started again, and no bit is lost."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from stage_driver import digests, drive, tiny

from areal_tasks.engines import lending, server_pool, trainer_client
from areal_tasks.engines.trainer.local import LocalBackend
from areal_tasks.engines.watchdog import Sign, Watchdog
from areal_tasks.stages.build import Built
from areal_tasks.stages.loop import Job, run_directly
from areal_tasks.store.under_way import Ledger
from schemas.recipe.sections import Launcher

WARN, HANG = 1.0, 8.0
WATCHED = tiny(launcher={"type": "local", "warn_seconds": WARN, "hang_seconds": HANG})


def test_services_that_hang_are_named_ended_and_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive(tmp_path, "whole", WATCHED)
    monkeypatch.setattr(server_pool, "NO_SERVER_SECONDS", 0.3)
    for module in (lending, trainer_client):
        monkeypatch.setattr(module, "LOOK_SECONDS", 0.5)
    victims = {"train 1": "trainer", "rollout 2": "inference-0"}

    def execute(jobs: Sequence[Job]) -> list[Built]:
        if (victim := victims.pop(jobs[0].label, None)) is not None:
            handle = jobs[0].context.engines.supervisor.services[victim].handle
            os.killpg(handle.process.pid, signal.SIGSTOP)  # type: ignore[attr-defined]
        return run_directly(jobs)

    with caplog.at_level(logging.WARNING, "areal_tasks"):
        drive(tmp_path, "r", WATCHED, execute)
    assert digests(tmp_path, "r") == digests(tmp_path, "whole")
    told(caplog.messages, "trainer", r"/(health|train of version 1)")
    told(caplog.messages, "inference-0", "generation or new weights")
    logs = {path.name for path in (tmp_path / "logs" / "r").iterdir()}
    assert logs == {f"{name}-1-{restart}.log" for name in ("trainer", "inference-0") for restart in range(2)}


def told(messages: Sequence[str], victim: str, waits_for: str) -> None:
    """The log names `victim` twice at least, then says that it is ended."""
    warned = [m for m in messages if re.search(rf"waiting for {victim}, {waits_for}: no progress since ", m)]
    assert len(warned) >= 2, messages  # at a first interval, and at a longer one
    assert re.search(r"since \d\d:\d\d:\d\d \(\d s\); .*After 8 s \(launcher\.hang_seconds\)", warned[0])
    [ended] = [m for m in messages if "ending it" in m and f"service {victim} " in m]
    assert re.search(rf"service {victim} at http://\S+ hangs at {waits_for}: no progress since", ended)


# ── the rules, by themselves ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def watch() -> Iterator[Callable[..., tuple[Watchdog, list[str]]]]:
    """Makes a watchdog and the list of what it ends."""
    made: list[Watchdog] = []

    def make(ledger: Ledger | None = None, kind: str = "local") -> tuple[Watchdog, list[str]]:
        settings = Launcher.model_validate({"type": kind, "warn_seconds": 0.1, "hang_seconds": 0.4})
        ended: list[str] = []
        made.append(Watchdog(settings, lambda name, why: ended.append(f"{name} {why}"), ledger or Ledger()))
        return made[-1], ended

    yield make
    for watchdog in made:
        watchdog.close()


Watch = Callable[..., tuple[Watchdog, list[str]]]


def steady() -> Callable[[], Mapping[str, Sign]]:
    """A service that gets on all the time."""
    return lambda: {"slow": Sign(time.monotonic(), "slowly")}


def test_whoever_gets_on_is_left_alone_however_long_it_takes(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    watchdog, ended = watch()
    with watchdog.waiting("a long step", steady()):
        time.sleep(1.5)
    assert not ended and not caplog.messages


def test_only_the_one_that_is_silent_is_ended(watch: Watch) -> None:
    watchdog, ended = watch()
    with watchdog.waiting("work", lambda: {**steady()(), "stuck": Sign(7, "at 7"), "dead": Sign(None, "no answer")}):
        time.sleep(1.0)
    assert {line.split()[0] for line in ended} == {"dead", "stuck"}
    assert re.search(r"stuck hangs at work: no progress since [\d:]{8} \(\d s\); at 7", "\n".join(ended))


def test_whoever_hangs_again_is_ended_again(watch: Watch) -> None:
    watchdog, ended = watch()
    with watchdog.waiting("work", lambda: {"stuck": Sign(len(ended), f"at {len(ended)}")}):
        end = time.monotonic() + 10.0
        while len(ended) < 2 and time.monotonic() < end:
            time.sleep(0.05)
    assert [line[-4:] for line in ended[:2]] == ["at 0", "at 1"]


def test_complaints_become_rarer(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    watchdog, ended = watch()
    with watchdog.waiting("work", lambda: {"stuck": Sign(7, "at 7")}, ends=False):
        time.sleep(1.2)
    assert 3 <= len(caplog.messages) <= 4 and not ended  # after 0.1, 0.2, 0.4 and 0.8 s
    assert "is started again" not in caplog.text


def test_threads_of_this_process_are_named_and_cannot_be_ended(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    watchdog, ended = watch(kind="inline")
    with watchdog.waiting("work", lambda: {"stuck": Sign(7, "at 7")}):
        time.sleep(0.8)
    assert caplog.messages and not ended


def test_who_has_nothing_to_do_is_not_looked_at(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    watchdog, ended = watch()
    turns = iter([{"a": Sign(1, "")}, {}] * 100)
    with watchdog.waiting("work", lambda: next(turns)):
        time.sleep(0.8)
    assert not ended and not caplog.messages


def test_a_look_that_fails_does_not_end_the_watch(watch: Watch) -> None:
    watchdog, ended = watch()

    def broken() -> Mapping[str, Sign]:
        raise RuntimeError("cannot look")

    with watchdog.waiting("one", broken), watchdog.waiting("other", lambda: {"stuck": Sign(7, "at 7")}):
        time.sleep(0.8)
    assert ended


def test_what_the_store_does_not_answer_is_named(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger()
    _, ended = watch(ledger)
    with ledger.entry("read", "s3://bucket/run/x.json"):
        time.sleep(0.5)
    assert re.search(r"waiting for the store, read s3://bucket/run/x\.json: no answer since [\d:]{8}", caplog.text)
    assert not ended and ledger.under_way() == [] and ledger.ended == 1


# ── what a trainer says of its progress ─────────────────────────────────────────────────────────────────────────────


def test_each_pass_through_the_model_is_a_sign_of_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a step may take as long as it likes: what must not last longer than the deadline is one micro-batch."""
    signs: list[object] = []
    learn = LocalBackend.learn

    def execute(jobs: Sequence[Job]) -> list[Built]:
        if jobs[0].label == "train 0":
            client = jobs[0].context.engines.trainer_at(0)

            def noted(*arguments: Any) -> Any:
                signs.append(client.sign().progress)
                return learn(*arguments)

            monkeypatch.setattr(LocalBackend, "learn", noted)
        return run_directly(jobs)

    drive(tmp_path, "r", tiny(schedule={"iterations": 1}, trainer={"micro_batch_tokens": 16}), execute)
    assert len(set(signs)) == len(signs) >= 8 and None not in signs
