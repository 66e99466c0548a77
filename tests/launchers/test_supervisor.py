"""Services that start, that do not, that end, and what is left of them."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest
from scripted_starts import at_once
from small_service import make_app
from waiting import LIMIT, alive, wait_until

from areal_tasks.engines.service import UNAVAILABLE, ServiceSpec, make_server, register
from areal_tasks.launchers import protocol
from areal_tasks.launchers.cluster import PREEMPTED, ClusterUnreachable
from areal_tasks.launchers.local import InlineLauncher, LocalHandle, LocalLauncher
from areal_tasks.launchers.protocol import Job
from areal_tasks.launchers.supervisor import LONGEST_PAUSE_SECONDS, Ready, ServiceFailed, Supervisor
from areal_tasks.secret import HIDDEN, KEYS, TOKEN
from areal_tasks.store.backend import Store, Unavailable, open_store
from areal_tasks.store.parallel import in_background
from schemas.errors import UserError
from schemas.manifest import WeightsRef
from schemas.recipe.launcher import Launcher

MODULE = "small_service"
WEIGHTS = WeightsRef(version=3, attempt="a", path="r/weights/w.json", sha256="00", digest="11")

Begin = Callable[..., Supervisor]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store((tmp_path / "store").as_uri())


@pytest.fixture
def begin(store: Store, tmp_path: Path) -> Iterator[Begin]:
    """Starts a supervisor with services of the given names."""
    begun: list[Supervisor] = []

    def start(*names: str, startup_seconds: float = 600.0, restarts: int = 3) -> Supervisor:
        settings = Launcher(type="local", startup_seconds=startup_seconds, restarts=restarts)
        begun.append(Supervisor(store, settings, tmp_path / "logs"))
        for name in names:
            begun[-1].start(MODULE, spec(store, name))
        return begun[-1]

    yield start
    for supervisor in begun:
        supervisor.__exit__()


def spec(store: Store, name: str) -> ServiceSpec:
    return ServiceSpec(name=name, restart=0, store_url=store.url, run="r", owner=1, recipe={})


def handle(supervisor: Supervisor, name: str) -> LocalHandle:
    found = supervisor.services[name].handle
    assert isinstance(found, LocalHandle)
    return found


def about(supervisor: Supervisor, url: str) -> dict[str, object]:
    answer = httpx.get(f"{url}/about", headers={"Authorization": f"Bearer {supervisor.token}"}, timeout=LIMIT)
    found: dict[str, object] = answer.raise_for_status().json()
    return found


def test_a_service_that_dies_at_its_start_is_named_with_its_last_words(begin: Begin, tmp_path: Path) -> None:
    supervisor = begin("dies")
    with pytest.raises(ServiceFailed) as failed:
        supervisor.wait(["dies"])
    message = str(failed.value)
    assert message.startswith("service 'dies' ended with 1 while starting.")
    assert f"Last lines of {tmp_path / 'logs' / 'r' / 'dies-1-0.log'}:" in message
    assert message.endswith("line 39 of dies\n  error: there is no such model")
    assert "line 10 of" not in message, "the last lines only"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_service_that_is_killed_at_its_first_start_is_started_again(begin: Begin, number: int) -> None:
    supervisor = begin(f"killed-{number:d}")
    [url] = supervisor.wait([f"killed-{number:d}"])
    assert about(supervisor, url)["restart"] == 1


def test_one_that_is_killed_at_every_start_is_given_up(begin: Begin) -> None:
    supervisor = begin("always-9", restarts=1)
    with pytest.raises(ServiceFailed, match=r"'always-9' failed 2 times; launcher.restarts allows no more"):
        supervisor.wait(["always-9"])


def test_a_service_that_is_not_ready_in_time_is_named_with_the_knob(begin: Begin) -> None:
    supervisor = begin("silent", startup_seconds=2.0)
    with pytest.raises(ServiceFailed, match=r"'silent' was not ready within launcher.startup_seconds = 2"):
        supervisor.wait(["silent"])


def test_a_service_answers_nobody_without_the_token(begin: Begin) -> None:
    supervisor = begin("ready")
    [url] = supervisor.wait(["ready"])
    assert url.startswith("http://127.0.0.1:")
    assert about(supervisor, url)["name"] == "ready"
    assert httpx.get(f"{url}/about", timeout=LIMIT).status_code == 401
    assert httpx.get(f"{url}/about", headers={"Authorization": "Bearer x"}, timeout=LIMIT).status_code == 401
    process = psutil.Process(handle(supervisor, "ready").process.pid)
    assert supervisor.token not in " ".join(process.cmdline()) and TOKEN not in os.environ


def test_no_service_shows_a_secret_in_its_environment_and_all_have_what_they_need(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as it was started, which is what /proc shows of it, and not in what its own children would inherit."""
    for name in HIDDEN:
        monkeypatch.setenv(name, f"secret {name}")
    supervisor = begin("secrets")
    [url] = supervisor.wait(["secrets"])
    found = about(supervisor, url)
    assert found["keys"] == {name: f"secret {name}" for name in KEYS}
    process = psutil.Process(handle(supervisor, "secrets").process.pid)
    [child] = process.children()
    assert child.environ()["TMPDIR"], "it was started with an environment"
    for one in (process, child):
        shown = Path(f"/proc/{one.pid}/environ").read_text()
        assert "secret " not in shown and supervisor.token not in shown
    assert found["descriptors"] == 0, "of secrets, that a child could inherit"


def test_a_service_in_a_thread_does_not_flush_the_logs_of_its_process(store: Store) -> None:
    flushed: list[logging.Handler] = []

    class Watched(logging.Handler):
        """Prefect's sends what it has to its server, and waits 5 s for a thread that needs the lock held meanwhile."""

        def flush(self) -> None:
            flushed.append(self)

    handler = Watched()
    asked = spec(store, "ready")
    make_server(make_app(asked), asked, "token")[1].close()
    assert flushed == [] and handler in [known() for known in logging._handlerList]  # type: ignore[attr-defined]


def test_what_torch_compiles_outlives_the_service(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    launcher, job = LocalLauncher(), Job(MODULE, spec(store, "ready"), "token", tmp_path / "log")
    found = launcher._environment(job, tmp_path / "scratch")
    assert found["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache" / "arealflow" / "torchinductor")
    assert found["TMPDIR"] == str(tmp_path / "scratch")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    assert launcher._environment(job, tmp_path / "scratch")["TORCHINDUCTOR_CACHE_DIR"] == "/mine"
    launcher.close()


def test_what_ended_is_started_again_elsewhere_on_the_weights_in_force(begin: Begin) -> None:
    supervisor = begin("ready")
    [before] = supervisor.wait(["ready"])
    assert supervisor.wait(["ready"]) == [before], "what runs is left alone"
    handle(supervisor, "ready").process.kill()
    handle(supervisor, "ready").process.wait()
    [after] = supervisor.wait(["ready"], WEIGHTS)
    assert after != before
    found = about(supervisor, after)
    assert (found["restart"], found["weights"]) == (1, WEIGHTS.model_dump())


def test_nothing_waits_for_a_service_that_is_started_again(begin: Begin) -> None:
    supervisor = begin("ready", "other")
    urls = supervisor.wait(["ready", "other"])
    handle(supervisor, "ready").process.kill()
    handle(supervisor, "ready").process.wait()
    assert supervisor.ended(["ready"]) and not supervisor.ended(["other"])
    assert supervisor.poll(["ready", "other"], WEIGHTS) == [Ready(urls[1])], "the other is there at once"
    assert supervisor.poll(["ready"], WEIGHTS) == []
    supervisor.wait(["ready"], WEIGHTS)
    [there] = supervisor.poll(["ready"])
    assert (there.restart, there.weights) == (1, WEIGHTS) and not supervisor.ended(["ready"])


def test_a_service_that_fails_too_often_stops_the_run(begin: Begin) -> None:
    supervisor = begin("ready", restarts=0)
    supervisor.end(supervisor.wait(["ready"]), "it has had enough")
    with pytest.raises(ServiceFailed, match=r"(?s)'ready' failed 1 times; launcher.restarts .*\nit has had enough\n"):
        supervisor.wait(["ready"])


def test_an_end_that_is_explained_uses_up_no_restarts(begin: Begin) -> None:
    supervisor = begin("ready", restarts=0)
    for restart in range(2):
        [url] = supervisor.wait(["ready"])
        supervisor.end([url])
        assert supervisor.poll(["ready"], explained=lambda: [(url, restart)]) == []  # noqa: B023
    supervisor.end(supervisor.wait(["ready"]))
    with pytest.raises(ServiceFailed, match=r"failed 1 times"):
        wait_until(lambda: supervisor.poll(["ready"], explained=lambda: [(url, 1)]))


def test_one_of_several_that_fails_too_often_is_left_out(begin: Begin) -> None:
    supervisor = begin("ready", "other", restarts=0)
    [first, second] = supervisor.wait(["ready", "other"])
    supervisor.end([first])
    assert supervisor.wait(["ready", "other"]) == [second]
    supervisor.progressed()
    supervisor.end([second])
    with pytest.raises(ServiceFailed, match="'ready' failed 1 times"):
        supervisor.wait(["ready", "other"])


def test_a_service_that_was_ready_once_may_fail_while_it_starts_again(begin: Begin) -> None:
    """The memory of the one before may not be free yet, say: that is no mistake."""
    supervisor = begin("ready", restarts=3)
    supervisor.wait(["ready"])
    service = supervisor.services["ready"]
    supervisor.end([service.url])
    service.job = replace(service.job, module="no_such_module")
    while service.spec.restart < 1 or service.handle.exit_code() is None:
        supervisor.poll(["ready"])
    service.job = replace(service.job, module=MODULE)
    supervisor.wait(["ready"])
    assert service.spec.restart == 2


def test_a_service_that_finds_no_store_may_be_started_again(begin: Begin) -> None:
    with pytest.raises(Unavailable, match="'storeless' could not start: the store did not answer"):
        begin("storeless").wait(["storeless"])


class Scripted:
    """A launcher whose services listen at once, or end at once with the status that is named in `ends`."""

    def __init__(self) -> None:
        self.ends: int | Exception | None = None
        self.started: list[str] = []

    def start(self, job: Job) -> Ended:
        self.started.append(job.spec.name)
        if isinstance(self.ends, Exception):
            raise self.ends
        if self.ends is None:
            register(job.spec, f"http://{job.spec.name}/{job.spec.restart}")
        return Ended(self.ends)

    def close(self) -> None:
        """Nothing runs."""


@dataclass
class Ended:
    code: int | None

    def exit_code(self) -> int | None:
        return self.code

    def stop(self, grace_seconds: float = 5.0) -> None:
        self.code = -15 if self.code is None else self.code


@pytest.fixture
def scripted(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Supervisor, Scripted]]:
    """A supervisor of two services that are ready; each look at the clock is a second after the one before."""
    monkeypatch.setattr("areal_tasks.launchers.supervisor.time", SimpleNamespace(monotonic=itertools.count().__next__))
    monkeypatch.setattr(protocol, "in_background", at_once)
    with Supervisor(store, Launcher(restarts=2), tmp_path / "logs") as supervisor:
        supervisor.launcher = launcher = Scripted()
        for name in ("one", "two"):
            supervisor.start(MODULE, spec(store, name))
        assert len(supervisor.wait(["one", "two"])) == 2
        yield supervisor, launcher


def look_until(supervisor: Supervisor, holds: Callable[[], bool]) -> None:
    """Poll after both services until it holds; the first is well all the time."""
    for _ in range(1000):
        assert Ready("http://one/0") in supervisor.poll(["one", "two"])
        if holds():
            return
    pytest.fail("it does not come to that")


def test_a_store_that_is_away_uses_up_no_restarts(scripted: tuple[Supervisor, Scripted]) -> None:
    supervisor, launcher = scripted
    launcher.ends = UNAVAILABLE
    supervisor.services["two"].handle.stop()
    look_until(supervisor, lambda: launcher.started.count("two") == 6)
    assert supervisor.services["two"].failures == 1
    with pytest.raises(Unavailable, match="'two' could not start: the store did not answer"):
        supervisor.poll(["two"])
    launcher.ends = None
    look_until(supervisor, lambda: supervisor.services["two"].url != "")
    assert launcher.started.count("two") == 7 and supervisor.services["two"].failures == 1


def test_a_cluster_that_is_away_uses_up_no_restarts(scripted: tuple[Supervisor, Scripted]) -> None:
    """As little as one that has no machine for the service just now: it had one before."""
    supervisor, launcher = scripted
    launcher.ends = ClusterUnreachable("Ray's head does not answer")
    supervisor.services["two"].handle.stop()
    look_until(supervisor, lambda: launcher.started.count("two") == 4)
    launcher.ends = UserError("no node has so many GPUs")
    look_until(supervisor, lambda: launcher.started.count("two") == 6)
    assert supervisor.services["two"].failures == 1
    with pytest.raises(Unavailable, match="'two' could not start: no node has so many GPUs"):
        supervisor.poll(["two"])
    launcher.ends = None
    look_until(supervisor, lambda: supervisor.services["two"].url != "")
    assert supervisor.services["two"].failures == 1


def test_what_the_cluster_takes_back_uses_up_no_restarts(scripted: tuple[Supervisor, Scripted]) -> None:
    supervisor, launcher = scripted
    launcher.ends = PREEMPTED
    supervisor.services["two"].handle.code = PREEMPTED  # type: ignore[attr-defined]
    look_until(supervisor, lambda: launcher.started.count("two") == 6)
    assert supervisor.services["two"].failures == 0


def test_nothing_waits_for_the_end_of_a_silent_service(
    scripted: tuple[Supervisor, Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor, launcher = scripted
    silent, ended = supervisor.services["two"], threading.Event()
    stop = silent.handle.stop
    monkeypatch.setattr(silent.handle, "stop", lambda *seconds: ended.wait(LIMIT) and stop())
    supervisor.end([silent.url])
    for _ in range(100):
        assert supervisor.poll(["one", "two"]) == [Ready("http://one/0")]
    supervisor.end([silent.url])
    assert launcher.started.count("two") == 1, "not before all of it has ended"
    ended.set()
    wait_until(silent.stopped.done)  # type: ignore[union-attr]
    look_until(supervisor, lambda: launcher.started.count("two") == 2)


def test_nothing_waits_for_a_slow_start(scripted: tuple[Supervisor, Scripted], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a service that a cluster queues: others are looked at, ended and started again meanwhile."""
    supervisor, launcher = scripted
    monkeypatch.setattr(protocol, "in_background", in_background)
    accepted, start = threading.Event(), launcher.start

    def queued(job: Job) -> Ended:
        assert job.spec.name != "two" or accepted.wait(LIMIT)
        return start(job)

    monkeypatch.setattr(launcher, "start", queued)
    supervisor.services["two"].handle.stop()
    wait_until(lambda: supervisor.services["two"].spec.restart == 1 or not supervisor.poll(["one", "two"]))
    assert supervisor.services["two"].handle.waiting() == "its start is under way"
    supervisor.end(["http://one/0"])
    wait_until(lambda: supervisor.poll(["one", "two"]) == [Ready("http://one/1", 1)], "the next start of the other")
    supervisor.join(MODULE, spec(supervisor.store, "three"))
    wait_until(lambda: supervisor.poll(["three"]) != [], "one that joins")
    assert launcher.started.count("two") == 1, "the cluster has not accepted it"
    accepted.set()
    wait_until(lambda: Ready("http://two/1", 1) in supervisor.poll(["one", "two"]), "the slow one")


def _queued(launcher: Scripted, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, list[Ended]]:
    """What makes the cluster accept all services that are started from now on; their handles, once it has."""
    monkeypatch.setattr(protocol, "in_background", in_background)
    accepted, start, handles = threading.Event(), launcher.start, list[Ended]()

    def queued(job: Job) -> Ended:
        assert accepted.wait(LIMIT)
        handles.append(start(job))
        return handles[-1]

    monkeypatch.setattr(launcher, "start", queued)
    return accepted, handles


def test_a_service_that_is_ended_while_it_starts_is_stopped_once_it_has(
    scripted: tuple[Supervisor, Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor, launcher = scripted
    accepted, handles = _queued(launcher, monkeypatch)
    supervisor.join(MODULE, spec(supervisor.store, "three"))
    assert supervisor.services["three"].ready is None
    threading.Timer(0, accepted.set).start()
    supervisor.retire("three")
    assert [handle.code for handle in handles] == [-15]


@pytest.mark.parametrize("leaves", ["the service", "the run"])
def test_a_start_that_never_returns_is_not_waited_for_and_ends_what_it_yields_later(
    scripted: tuple[Supervisor, Scripted], monkeypatch: pytest.MonkeyPatch, leaves: str
) -> None:
    supervisor, launcher = scripted
    monkeypatch.setattr(protocol, "LONGEST_START", 0.1)
    accepted, handles = _queued(launcher, monkeypatch)
    supervisor.join(MODULE, spec(supervisor.store, "three"))
    if leaves == "the service":
        supervisor.retire("three")
    else:
        supervisor.__exit__()
    assert not handles, "the start still waits"
    accepted.set()
    wait_until(lambda: [handle.code for handle in handles] == [-15], "the end of what has started")


def test_starts_that_never_return_are_waited_for_at_the_same_time(
    scripted: tuple[Supervisor, Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor, launcher = scripted
    accepted, handles = _queued(launcher, monkeypatch)
    together = threading.Barrier(40)
    monkeypatch.setattr(protocol, "wait", lambda begun, seconds: together.wait(LIMIT))
    for number in range(together.parties):
        supervisor.join(MODULE, spec(supervisor.store, f"hangs-{number}"))
    supervisor.__exit__()
    accepted.set()
    wait_until(lambda: [handle.code for handle in handles] == [-15] * together.parties, "the end of what has started")


def test_a_start_that_never_returns_is_made_again_once_it_was_to_be_stopped(
    scripted: tuple[Supervisor, Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a service whose group begins again."""
    supervisor, launcher = scripted
    monkeypatch.setattr(protocol, "in_background", in_background)
    monkeypatch.setattr(protocol, "LONGEST_START", 0.1)
    accepted, start = threading.Event(), launcher.start

    def queued(job: Job) -> Ended:
        assert job.spec.restart or accepted.wait(LIMIT)
        return start(job)

    monkeypatch.setattr(launcher, "start", queued)
    supervisor.join(MODULE, spec(supervisor.store, "three"))
    three = supervisor.services["three"]
    supervisor._stop(three, "another of its group has ended", grace_seconds=0.0)
    wait_until(lambda: Ready("http://three/1", 1) in supervisor.poll(["one", "three"]), "its next start")
    assert not three.failures, "the cluster was away"
    accepted.set()


def test_between_two_starts_without_a_store_is_the_longest_pause(scripted: tuple[Supervisor, Scripted]) -> None:
    supervisor, launcher = scripted
    launcher.ends = UNAVAILABLE
    supervisor.services["two"].handle.stop()
    began = []
    for number in (3, 4, 5):
        look_until(supervisor, lambda: launcher.started.count("two") == number)  # noqa: B023
        began.append(supervisor.services["two"].started)
    assert all(later - earlier >= LONGEST_PAUSE_SECONDS for earlier, later in pairwise(began))


def test_the_log_says_once_which_service_is_given_up_and_why(
    scripted: tuple[Supervisor, Scripted], caplog: pytest.LogCaptureFixture
) -> None:
    """Others go on without it. A start that the machine refuses is a failure like any other."""
    supervisor, launcher = scripted
    launcher.ends = OSError(12, "Cannot allocate memory")
    service = supervisor.services["two"]
    service.handle.stop()
    look_until(supervisor, lambda: not supervisor.ended(["two"]))
    for _ in range(3):
        supervisor.poll(["one", "two"])
    [said] = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert "service 'two' failed 3 times; launcher.restarts allows no more" in said
    assert "Cannot allocate memory" in said and f"Last lines of {service.job.log}" in said
    with pytest.raises(ServiceFailed, match=r"(?s)'two' failed 3 times.*Cannot allocate memory"):
        supervisor.poll(["two"])


def test_failures_count_until_something_has_come_of_the_work(begin: Begin) -> None:
    supervisor = begin("ready", restarts=1)
    supervisor.wait(["ready"])
    for restart in (1, 2):
        handle(supervisor, "ready").stop(0.0)
        assert about(supervisor, supervisor.wait(["ready"])[0])["restart"] == restart
        supervisor.progressed()
    supervisor.services["ready"].failures = 1
    handle(supervisor, "ready").stop(0.0)
    with pytest.raises(ServiceFailed, match="'ready' failed 2 times"):
        supervisor.poll(["ready"])


def test_nothing_is_restarted_once_it_is_left(store: Store, tmp_path: Path) -> None:
    """A thread of the run may still have it polled: a publication that goes on while the run fails."""
    with Supervisor(store, Launcher(type="local"), tmp_path / "logs") as supervisor:
        supervisor.start(MODULE, spec(store, "a"))
        supervisor.wait(["a"])
    with pytest.raises(ServiceFailed, match="the run has ended"):
        supervisor.poll(["a"])
    assert supervisor.services["a"].spec.restart == 0


def test_leaving_stops_every_service_even_if_one_cannot_be(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = begin("ready", "silent")
    processes = [handle(supervisor, name).process for name in ("ready", "silent")]

    def fail(grace_seconds: float = 5.0) -> None:
        raise OSError("no such process group")

    monkeypatch.setattr(handle(supervisor, "ready"), "stop", fail)
    with pytest.raises(OSError, match="no such process group"):
        supervisor.__exit__()
    assert [process.wait(LIMIT) is None for process in processes] == [False, False]
    supervisor.services.clear()
    supervisor.launcher = InlineLauncher()  # its own is closed already


def test_leaving_stops_services_and_what_they_started(begin: Begin) -> None:
    supervisor = begin("parent")
    supervisor.wait(["parent"])
    one = handle(supervisor, "parent")
    family = [psutil.Process(one.process.pid), *psutil.Process(one.process.pid).children(recursive=True)]
    assert len(family) == 2
    supervisor.services["parent"].handle.stop()
    _, left = psutil.wait_procs(family, LIMIT)
    assert not any(map(alive, left))
    assert not Path(one.scratch.name).exists()


def test_a_service_whose_supervisor_is_gone_ends(begin: Begin) -> None:
    supervisor = begin("ready", "silent")
    supervisor.wait(["ready"])
    processes = [handle(supervisor, name).process for name in ("ready", "silent")]
    os.close(supervisor.launcher.write_end)  # type: ignore[attr-defined]
    supervisor.launcher.write_end = os.open(os.devnull, os.O_RDONLY)  # type: ignore[attr-defined]
    assert [process.wait(LIMIT) for process in processes] == [-9, -9]


def test_a_service_that_joins_and_cannot_start_does_not_end_the_others(begin: Begin, store: Store) -> None:
    supervisor = begin("ready", restarts=0)
    [url] = supervisor.wait(["ready"])
    supervisor.join(MODULE, spec(store, "dies"))
    assert supervisor.wait(["ready", "dies"]) == [url], "the other is given up"


def test_a_service_that_joins_where_no_machine_is_left_is_started_again_later(
    begin: Begin, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_tasks.launchers.supervisor.LONGEST_PAUSE_SECONDS", 0.5)
    supervisor = begin("ready")
    [url] = supervisor.wait(["ready"])
    with monkeypatch.context() as patch:
        patch.setattr(supervisor.launcher, "start", refuse)
        supervisor.join(MODULE, spec(store, "other"))
        assert [one.url for one in supervisor.poll(["ready", "other"])] == [url]
    assert len(supervisor.wait(["ready", "other"])) == 2


def refuse(job: Job) -> LocalHandle:
    raise UserError("no node of the cluster has so many GPUs")


def test_a_service_that_was_retired_may_join_again_under_its_name(begin: Begin, store: Store) -> None:
    supervisor = begin("ready", "other")
    supervisor.wait(["ready", "other"])
    process = handle(supervisor, "other").process
    supervisor.retire("other")
    assert process.poll() is not None and [one.restart for one in supervisor.poll(["ready"])] == [0]
    supervisor.join(MODULE, spec(store, "other"))
    supervisor.wait(["ready", "other"])
    assert supervisor.poll(["other"])[0].restart == 1, "its record is not taken for that of the one before"
