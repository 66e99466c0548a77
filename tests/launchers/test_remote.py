"""Services behind node agents: leases, logs, ends, and who may talk to them. The "cluster" runs processes here."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import httpx
import psutil
import pytest
from processes import NETWORK
from s3_server import BUCKET, S3Server
from waiting import LIMIT, alive, wait_until

from areal_tasks.engines import tls
from areal_tasks.engines.service import ServiceSpec
from areal_tasks.engines.tls import Identity, mutual_tls
from areal_tasks.launchers import node as node_agent
from areal_tasks.launchers.cluster import LOST, PREEMPTED
from areal_tasks.launchers.node import Agent, address_in
from areal_tasks.launchers.remote import AGENT, RemoteHandle
from areal_tasks.launchers.supervisor import ServiceFailed, Supervisor
from areal_tasks.store import service_logs
from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.commit import read_record
from areal_tasks.store.paths import node as node_path
from schemas.errors import UserError
from schemas.manifest import NodeRecord
from schemas.recipe.launcher import Launcher

MODULE = "small_service"
PATHS = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}

Begin = Callable[..., Supervisor]


@pytest.fixture
def store(s3: S3Server, tmp_path: Path) -> Store:
    return open_store(f"s3://{BUCKET}/{tmp_path.name}-{uuid.uuid4().hex[:8]}")


@pytest.fixture
def begin(store: Store, tmp_path: Path) -> Iterator[Begin]:
    """Starts a supervisor with services of the given names."""
    begun: list[Supervisor] = []

    def start(*names: str, **settings_of_launcher: Any) -> Supervisor:
        settings = Launcher(**{"type": "processes:Processes", "network": NETWORK} | settings_of_launcher)
        begun.append(Supervisor(store, settings, tmp_path / "logs"))
        for name in names:
            begun[-1].start(MODULE, ServiceSpec(name=name, restart=0, store_url=store.url, run="r", owner=1, recipe={}))
        return begun[-1]

    yield start
    for supervisor in begun:
        supervisor.__exit__()


def node(store: Store, name: str, restart: int = 0) -> NodeRecord:
    return read_record(store, node_path("r", 1, name, restart), NodeRecord)


def about(supervisor: Supervisor, url: str) -> dict[str, object]:
    access = supervisor.access
    answer = httpx.get(f"{url}/about", headers=access.headers, verify=access.trust, timeout=LIMIT)
    found: dict[str, object] = answer.raise_for_status().json()
    return found


def pid_at(supervisor: Supervisor, url: str) -> int:
    return int(str(about(supervisor, url)["pid"]))


def test_a_service_on_another_machine_speaks_tls_and_knows_the_token(begin: Begin) -> None:
    supervisor = begin("ready")
    [url] = supervisor.wait(["ready"])
    assert url.startswith("https://127.0.0.1:")
    assert about(supervisor, url)["name"] == "ready"
    assert httpx.get(f"{url}/about", verify=supervisor.access.trust, timeout=LIMIT).status_code == 401
    with pytest.raises(httpx.ConnectError, match="certificate"):
        httpx.get(f"{url}/about", headers=supervisor.access.headers, timeout=LIMIT)
    with pytest.raises(httpx.HTTPError):
        httpx.get(url.replace("https", "http"), timeout=LIMIT)


def test_a_flow_may_be_a_day_ahead_of_its_machines(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "datetime", SimpleNamespace(now=lambda zone: datetime.now(zone) + timedelta(days=1)))
    supervisor = begin("ready")
    [url] = supervisor.wait(["ready"])
    assert about(supervisor, url)["name"] == "ready"


def test_an_agent_imports_nothing_of_the_folder_that_it_is_started_in(tmp_path: Path) -> None:
    (tmp_path / "psutil.py").write_text("raise SystemExit('imported')")
    started = subprocess.run(AGENT, cwd=tmp_path, env=os.environ | PATHS, capture_output=True, text=True, check=False)
    assert "imported" not in started.stderr
    assert "KeyError: 'AREAL_NODE_JOB'" in started.stderr


def test_a_service_of_another_run_is_not_trusted(begin: Begin) -> None:
    one, other = begin("ready"), begin("another")
    [url] = one.wait(["ready"])
    with pytest.raises(httpx.ConnectError, match="certificate"):
        httpx.get(f"{url}/about", verify=other.access.trust, timeout=LIMIT)


def test_an_agent_answers_its_flow_alone(begin: Begin, store: Store) -> None:
    supervisor = begin("ready")
    supervisor.wait(["ready"])
    agent = node(store, "ready")
    stranger = Identity("flow")
    shown = Identity("arealflow", authority=True).sign(stranger.certificate)
    body = node_agent.Stop(grace_seconds=0).model_dump_json()
    trusting = ssl.create_default_context(cadata=agent.certificate)
    for context in (trusting, mutual_tls(agent.certificate, stranger, shown)):
        with pytest.raises(httpx.HTTPError):
            httpx.post(f"{agent.url}/stop", content=body, verify=context, timeout=LIMIT)
    assert about(supervisor, supervisor.wait(["ready"])[0])["name"] == "ready"


def test_what_the_cluster_system_sees_holds_no_secret(begin: Begin, store: Store) -> None:
    supervisor = begin("ready")
    supervisor.wait(["ready"])
    agent = psutil.Process(node(store, "ready").pid)
    seen = " ".join([*agent.cmdline(), *agent.environ().values()])
    assert node_agent.JOB in agent.environ()
    assert supervisor.token not in seen and "PRIVATE KEY" not in seen


def test_an_end_is_noticed_at_once_and_the_log_is_here(begin: Begin, tmp_path: Path) -> None:
    supervisor = begin("dies")
    with pytest.raises(ServiceFailed) as failed:
        supervisor.wait(["dies"])
    assert str(failed.value).endswith("line 39 of dies\n  error: there is no such model")


def test_a_restarted_service_gets_an_agent_of_its_own(begin: Begin, store: Store) -> None:
    supervisor = begin("ready")
    [url] = supervisor.wait(["ready"])
    os.kill(pid_at(supervisor, url), signal.SIGKILL)
    wait_until(lambda: supervisor.services["ready"].handle.exit_code() == -signal.SIGKILL)
    [again] = supervisor.wait(["ready"])
    assert about(supervisor, again)["restart"] == 1
    assert node(store, "ready", 1).url != node(store, "ready").url


def test_a_service_ends_with_its_agent(begin: Begin, store: Store) -> None:
    supervisor = begin("ready")
    [url] = supervisor.wait(["ready"])
    pid = pid_at(supervisor, url)
    os.kill(node(store, "ready").pid, signal.SIGKILL)
    wait_until(lambda: not alive(pid))
    wait_until(lambda: supervisor.services["ready"].handle.exit_code() == LOST)


def test_a_service_ends_when_its_lease_is_not_renewed(
    begin: Begin, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "node").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "node"))
    supervisor = begin("ready", lease_seconds=5.0)
    [url] = supervisor.wait(["ready"])
    pid, agent = pid_at(supervisor, url), node(store, "ready").pid
    handle = supervisor.services["ready"].handle
    assert isinstance(handle, RemoteHandle)
    assert list(tmp_path.glob("node/arealflow-node-ready-*/agent/key.pem"))
    handle._leasing.cancel()  # as when the flow is lost
    wait_until(lambda: not alive(pid) and not alive(agent))
    assert not list(tmp_path.glob("node/*")), "keys and logs are removed"


def test_a_service_whose_machine_is_silent_counts_as_ended(begin: Begin, store: Store) -> None:
    supervisor = begin("ready", lease_seconds=5.0)
    supervisor.wait(["ready"])
    agent = node(store, "ready").pid
    os.kill(agent, signal.SIGSTOP)
    try:
        wait_until(lambda: supervisor.services["ready"].handle.exit_code() == LOST)
    finally:
        os.kill(agent, signal.SIGCONT)
    wait_until(lambda: not alive(agent))


def test_a_service_that_its_agent_cannot_start_counts_as_ended(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = RemoteHandle._ask

    async def refuse(self: RemoteHandle, what: str, *more: Any) -> bytes:
        if what == "start":
            raise aiohttp.ClientError
        return await ask(self, what, *more)

    monkeypatch.setattr(RemoteHandle, "_ask", refuse)
    with pytest.raises(ServiceFailed, match=r"(?s)ended with 69 while starting.*the agent on .* no longer"):
        begin("ready", lease_seconds=5.0).wait(["ready"])


def test_what_the_cluster_system_takes_back_is_no_failure(begin: Begin, store: Store) -> None:
    """It waits again, and its service is started elsewhere at once, not after a lease."""
    supervisor = begin("ready", restarts=0)
    supervisor.wait(["ready"])
    service = supervisor.services["ready"]
    assert isinstance(service.handle, RemoteHandle)
    wait_until(lambda: service.handle._ran, "an answer of its agent")  # type: ignore[attr-defined]
    service.handle._submitted.waiting = lambda: "Requeued"  # type: ignore[method-assign]
    os.kill(node(store, "ready").pid, signal.SIGKILL)
    supervisor.poll(["ready"])
    wait_until(lambda: supervisor.poll(["ready"]) and service.spec.restart == 1, "the next start", limit=30.0)
    assert service.failures == 0


@pytest.mark.parametrize(("says", "code"), [(PREEMPTED, PREEMPTED), (1, LOST)])
def test_why_an_agent_is_gone_is_known_later(begin: Begin, store: Store, says: int, code: int) -> None:
    (supervisor := begin("ready")).wait(["ready"])
    handle: Any = supervisor.services["ready"].handle
    handle._submitted.exit_code = iter([None, None, *[says] * 9]).__next__
    handle._leasing.cancel()
    os.kill(node(store, "ready").pid, signal.SIGKILL)
    handle.stop()
    assert handle.exit_code() == code


def test_a_start_that_the_cluster_system_repeats_ends(begin: Begin, store: Store, tmp_path: Path) -> None:
    supervisor = begin("ready")
    supervisor.wait(["ready"])
    agent = psutil.Process(node(store, "ready").pid)
    again = subprocess.run(agent.cmdline(), env=agent.environ(), check=False, timeout=LIMIT)
    assert again.returncode == PREEMPTED


def test_a_question_that_has_waited_for_too_long_renews_no_lease(tmp_path: Path) -> None:
    agent = agent_in(tmp_path, lease_seconds=5.0)
    agent._renewed -= 10.0
    asyncio.run(agent.poll(node_agent.Poll(seconds=0.0, log_from=0)))
    agent.start(node_agent.Start(token="", certificate=""))
    assert agent.lost and agent._handle is None


def test_an_agent_that_is_asked_to_end_does_not_report_the_end_of_its_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It causes that end; the cluster system knows whether it is a failure."""
    agent = agent_in(tmp_path)
    monkeypatch.setattr(agent, "_exit_code", lambda: -9)
    codes = [asyncio.run(agent.poll(node_agent.Poll(seconds=0.0, log_from=0))).exit_code]
    agent.release()
    codes.append(asyncio.run(agent.poll(node_agent.Poll(seconds=0.0, log_from=0))).exit_code)
    assert codes == [-9, None]
    with pytest.raises(InterruptedError):  # nor that it has been stopped
        agent.stop(node_agent.Stop(grace_seconds=0.0))


def test_a_question_while_the_folder_is_removed_is_answered(tmp_path: Path) -> None:
    agent = agent_in(tmp_path)
    (tmp_path / "service.log").write_bytes(b"the last words")
    agent.release()
    (tmp_path / "service.log").unlink()
    assert asyncio.run(agent.poll(node_agent.Poll(seconds=0.0, log_from=4))).log == b"last words"


def test_services_speak_over_ipv6(begin: Begin, store: Store) -> None:
    supervisor = begin("ready", network="::1/128")
    [url] = supervisor.wait(["ready"])
    assert url.startswith("https://[::1]:") and node(store, "ready").url.startswith("https://[::1]:")
    assert about(supervisor, url)["name"] == "ready"


def test_other_software_on_a_machine_is_named(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    own = node_agent.software() | {"torch": "1.0"}
    monkeypatch.setattr("areal_tasks.launchers.remote.software", lambda: own)
    supervisor = begin("ready")
    with pytest.raises(ServiceFailed, match=r"has other software than .*: torch .* instead of 1\.0"):
        supervisor.wait(["ready"])


def test_leases_are_renewed_while_the_programs_files_are_read(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, go_on, software = threading.Event(), threading.Event(), node_agent.software

    def slow() -> dict[str, str]:
        if not reading.is_set():
            reading.set()
            assert go_on.wait(LIMIT)
        return software()

    monkeypatch.setattr("areal_tasks.launchers.remote.software", slow)
    supervisor = begin("rollout-0")
    assert reading.wait(LIMIT)
    supervisor.start(
        MODULE, ServiceSpec(name="ready", restart=0, store_url=supervisor.store.url, run="r", owner=1, recipe={})
    )
    assert supervisor.wait(["ready"]), "its lease is held by the thread that starts rollout-0"
    go_on.set()
    assert supervisor.wait(["rollout-0"])


def test_versions_that_decide_verdicts_are_compared() -> None:
    assert all(node_agent.software()[name] for name in ("math-verify", "latex2sympy2-extended", "sympy"))


def test_a_machine_without_an_address_in_the_network_says_so() -> None:
    assert address_in("127.0.0.0/8") == "127.0.0.1"
    with pytest.raises(UserError, match=r"launcher.network: .* has no address in 203\.0\.113\.0/24"):
        address_in("203.0.113.0/24")


def test_a_store_on_this_machine_is_refused(tmp_path: Path) -> None:
    store = open_store((tmp_path / "store").as_uri())
    with pytest.raises(UserError, match="is a folder of this machine"):
        Supervisor(store, Launcher(type="processes:Processes", network=NETWORK), tmp_path)


def agent_in(folder: Path, lease_seconds: float = LIMIT) -> Agent:
    spec = ServiceSpec(name="ready", restart=0, store_url="", run="r", owner=1, recipe={})
    known = {"authority": "", "network": NETWORK, "lease_seconds": lease_seconds}
    return Agent(node_agent.NodeJob(module=MODULE, spec=spec, threads=1, **known), Identity("agent"), "", folder)


def test_a_log_arrives_whole_in_parts_and_the_exit_code_with_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also bytes that are no text, and characters between two parts."""
    monkeypatch.setattr("areal_tasks.launchers.node.LOG_BYTES", 5)
    agent, read, states = agent_in(tmp_path), b"", list[node_agent.State]()
    (tmp_path / "service.log").write_bytes(written := "añéï€ 20".encode() + b"\xff\xc3")
    monkeypatch.setattr(agent, "_exit_code", lambda: 0)
    while not states or states[-1].exit_code is None:
        answer = asyncio.run(agent.poll(node_agent.Poll(seconds=0.0, log_from=len(read))))
        states.append(node_agent.State.model_validate_json(answer.model_dump_json()))
        read += states[-1].log
    assert read == written
    assert [state.exit_code for state in states] == [*[None] * (len(written) // 5), 0]


def test_an_agent_frees_what_the_flow_has_read_of_a_long_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_logs, "ROTATE_BYTES", 4 << 20)
    agent, log, read = agent_in(tmp_path), tmp_path / "service.log", b""
    for n in range(600):
        with log.open("a") as file:
            file.write(f"{n} {'x' * 20_000}\n")
        read += asyncio.run(agent.poll(node_agent.Poll(seconds=0.0, log_from=len(read)))).log
        assert log.stat().st_blocks * 512 <= 5 << 20
    assert read.decode() == "".join(f"{n} {'x' * 20_000}\n" for n in range(600))


def test_what_an_agent_prints_is_read_from_the_store(begin: Begin, store: Store, tmp_path: Path) -> None:
    begin("ready").wait(["ready"])
    agent, logs = service_logs.LogName("ready.node", 1, 0), service_logs.local_logs(tmp_path / "logs" / "r")
    with logs[agent].open("a") as file:
        file.write("no memory is left\n")
    for name, written in logs.items():
        service_logs.LogCopy(store, "r", name, written)()
    [found] = (log for log in service_logs.service_logs(store, "r", tmp_path / "elsewhere") if log.name == agent)
    assert b"".join(found.read_from(0)).endswith(b"no memory is left\n")


def test_a_log_that_cannot_be_written_ends_the_service(begin: Begin, tmp_path: Path) -> None:
    supervisor = begin("ready")
    [log] = (tmp_path / "logs" / "r").glob("ready-*-0.log")
    log.unlink()
    log.mkdir()
    wait_until(lambda: supervisor.services["ready"].handle.exit_code() == os.EX_SOFTWARE)
