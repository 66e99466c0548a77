"""Logs of services: what is in the store is what was written, whatever fails, and the local file may lose its head."""

from __future__ import annotations

import itertools
import logging
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_builders import recipe
from store_listing import listed
from waiting import LIMIT, wait_until

from areal_tasks.store import paths, service_logs
from areal_tasks.store.backend import Store, Unavailable, open_store
from areal_tasks.store.history.audit import audit
from areal_tasks.store.objects.inventory import remove
from areal_tasks.store.opening import open_run
from areal_tasks.store.runs import Run
from areal_tasks.store.service_logs import LogCopy, LogName, ServiceLog, rotate
from flows.background import ServiceLogs
from flows.cli import services as command
from schemas.errors import UserError

TRAINER = LogName("trainer", 1, 0)
LOG = logging.getLogger("run")


def logs(store: Store, folder: Path) -> list[ServiceLog]:
    return service_logs.service_logs(store, "run", folder)


def text(log: ServiceLog, position: int = 0) -> bytes:
    return b"".join(log.read_from(position))


def append(folder: Path, name: LogName, data: bytes) -> Path:
    file = folder / "run" / name.file
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as opened:
        opened.write(data)
    return file


class Failing:
    """A store whose puts fail as listed: before (`lost`) or after (`unanswered`) they are stored."""

    def __init__(self, store: Store, faults: Iterator[str]) -> None:
        self._store, self._faults = store, faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def create(self, path: str, data: bytes) -> None:
        fault = next(self._faults)
        if fault != "lost":
            self._store.create(path, data)
        if fault != "stored":
            raise Unavailable("the store is away")


@settings(max_examples=60, deadline=None)
@given(
    written=st.lists(st.binary(max_size=30), max_size=8),
    faults=st.lists(st.sampled_from(["lost", "unanswered", "stored"]), max_size=12),
    lines=st.integers(1, 4),
)
def test_parts_are_the_log_whatever_puts_fail(written: list[bytes], faults: list[str], lines: int) -> None:
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(service_logs, "PART_BYTES", 7)
        folder, sound = Path(name) / "logs", open_store((Path(name) / "store").as_uri())
        failing = itertools.chain(faults, itertools.repeat("stored"))
        store: Any = Failing(sound, failing)
        copy, whole = LogCopy(store, "run", TRAINER, append(folder, TRAINER, b"")), b""
        for data in [*written, *[b""] * len(faults)]:
            append(folder, TRAINER, data)
            whole += data
            try:
                copy()
            except Unavailable:
                continue
            assert copy.stored == len(whole)
        copy()
        found = logs(sound, Path(name) / "elsewhere")
        assert b"".join(map(text, found)) == whole
        assert all(0 < p.stop - p.start <= 7 for log in found for p in log.pieces)
        for log in found:
            assert text(log, len(whole) // 2) == whole[len(whole) // 2 :]
            assert text(log, log.tail(lines)) == b"".join(split(whole)[-lines:])


def split(data: bytes) -> list[bytes]:
    """Lines with their ends; only `\\n` ends one."""
    return [line + b"\n" for line in data.split(b"\n")[:-1]] + ([last] if (last := data.rsplit(b"\n", 1)[-1]) else [])


def test_a_rotated_log_loses_nothing_and_keeps_its_positions(
    local_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_logs, "ROTATE_BYTES", 8 << 20)
    run = open_run(local_store, "run", recipe())
    whole = b"".join(b"%08d of the log\n" % n for n in range(700_000))
    file = append(tmp_path, TRAINER, whole)
    copy = LogCopy(local_store, "run", TRAINER, file)
    copy()
    append(tmp_path, TRAINER, b"later\n")
    assert file.stat().st_size == len(whole) + 6 and file.stat().st_blocks * 512 <= 3 << 20
    assert file.read_bytes()[-(1 << 20) :] == (whole + b"later\n")[-(1 << 20) :]
    (log,) = logs(local_store, tmp_path)
    assert log.file == file and text(log) == whole + b"later\n"
    copy()
    assert text(logs(local_store, tmp_path / "elsewhere")[0]) == whole + b"later\n"
    assert run.owner == 1


def test_a_log_that_is_not_copied_is_not_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_logs, "ROTATE_BYTES", 1 << 20)
    file = append(tmp_path, TRAINER, b"x" * (3 << 20))
    rotate(file, 0)
    assert file.read_bytes() == b"x" * (3 << 20)


@pytest.fixture
def run(store: Store) -> Run:
    return open_run(store, "run", recipe())


def test_logs_reach_the_store_with_one_put_each_and_audit_knows_them(run: Run, tmp_path: Path) -> None:
    other = append(tmp_path, TRAINER, b"of a removed run of this name\n")
    with ServiceLogs(run, tmp_path, LOG) as copies:
        append(tmp_path, TRAINER, b"one\ntwo\n")
        append(tmp_path, LogName("inference-0", 1, 2), b"")
        copies.repeat()
        append(tmp_path, LogName("rollout-1", 1, 3), b"three\n")
        append(tmp_path, LogName("rollout-1", 2, 0), b"of another start\n")
    assert listed(run.store, paths.logs("run")) == [
        "run/logs/owner=1/rollout-1-3/0.log",
        "run/logs/owner=1/trainer-0/0.log",
    ]
    assert other.with_suffix(".old").read_bytes() == b"of a removed run of this name\n"
    report = audit(run.store, "run")
    assert report.sound and report.unselected_files == 0
    run.store.create(TRAINER.part("run", 2), b"beyond a gap\n")
    assert [defect.path for defect in audit(run.store, "run").defects] == [TRAINER.part("run", 1)]
    remove(run.store, [TRAINER.part("run", 2)])


def test_a_store_that_is_away_disturbs_nothing(
    local_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ServiceLogs, "seconds", 0.01)
    faults = itertools.chain(["lost", "unanswered"], itertools.repeat("stored"))
    failing: Any = Failing(local_store, faults)
    run = replace(open_run(local_store, "run", recipe()), store=failing)
    with ServiceLogs(run, tmp_path, LOG):
        append(tmp_path, TRAINER, b"one\n")
        wait_until(lambda: local_store.exists(TRAINER.part("run", 0)), "the log's first part")
    assert "the store is away" in caplog.text
    assert text(logs(local_store, tmp_path / "elsewhere")[0]) == b"one\n"


def test_the_list_the_newest_start_and_names(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setenv("AREALFLOW_HOME", str(tmp_path))
    folder = tmp_path / "logs"
    with ServiceLogs(run, folder, LOG):
        append(folder, TRAINER, b"older\n")
        append(folder, replace(TRAINER, restart=1), b"one\ntwo\nthree")
    append(folder, replace(TRAINER, restart=1), b" four\n")  # not in the store yet
    command.logs("run", "trainer", store=run.store.url)
    command.logs("run", "trainer", tail=2, store=run.store.url)
    assert capfdbinary.readouterr().out == b"one\ntwo\nthree four\ntwo\nthree four\n"
    command.logs("run", store=run.store.url, as_json=True)
    listed = capfdbinary.readouterr().out
    assert listed.count(b'"service"') == 2 and b'"bytes": 19' in listed and str(folder).encode() in listed
    with pytest.raises(UserError, match="no log of a service 'critic' yet: there are logs of trainer"):
        command.logs("run", "critic", store=run.store.url)
    monkeypatch.setattr(socket, "gethostname", lambda: "another-machine")
    command.logs("run", "trainer", store=run.store.url)
    assert capfdbinary.readouterr().out == b"one\ntwo\nthree"


def test_a_follower_waits_for_the_first_line_of_a_service(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """As from another machine, where the store has nothing yet of what a service has begun to write."""
    copy = LogCopy(run.store, "run", TRAINER, append(tmp_path / "logs", TRAINER, b"one\n"))

    def pause(seconds: float) -> None:
        if copy.stored:
            raise KeyboardInterrupt
        copy()

    monkeypatch.setenv("AREALFLOW_HOME", str(tmp_path / "elsewhere"))
    monkeypatch.setattr(command.time, "sleep", pause)
    command.logs("run", "trainer", follow=True, store=run.store.url)
    out, err = capfdbinary.readouterr()
    assert out == b"one\n" and b"no log of a service 'trainer' yet" in err


def test_a_follower_sees_what_is_added_and_the_next_start(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setattr(command, "POLL_SECONDS", 0.02)
    folder, seen = tmp_path / "logs", [b""]
    append(folder, TRAINER, b"one\n")
    monkeypatch.setenv("AREALFLOW_HOME", str(tmp_path))

    def shown(wanted: bytes) -> bool:
        seen[0] += capfdbinary.readouterr().out
        return seen[0] == wanted

    over = threading.Event()

    def pause(seconds: float) -> None:
        if over.wait(seconds):
            raise KeyboardInterrupt

    monkeypatch.setattr(command.time, "sleep", pause)
    follower = threading.Thread(
        target=lambda: command.logs("run", "trainer", follow=True, store=run.store.url), daemon=True
    )
    follower.start()
    wait_until(lambda: shown(b"one\n"), "the first line")
    append(folder, TRAINER, b"two\n")
    wait_until(lambda: shown(b"one\ntwo\n"), "the second line")
    append(folder, replace(TRAINER, restart=1), b"three\n")
    wait_until(lambda: shown(b"one\ntwo\nthree\n"), "the next start")
    over.set()
    follower.join(LIMIT)
    assert not follower.is_alive()
