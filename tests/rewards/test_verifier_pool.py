"""The pool with real processes and real signals: a verifier can only ever harm its own sample."""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from waiting import LIMIT, alive, wait_until

from areal_tasks.rewards import processes
from areal_tasks.rewards.pool import Call, VerifierPool, VerifyResult
from areal_tasks.rewards.processes import Forkserver, Worker
from areal_tasks.rewards.protocol import Result, Row
from schemas.errors import UserError
from schemas.recipe.sections import Reward

DEADLINE = 1.0
#: CPU seconds of a process that is in an endless loop by now: imports take fewer.
LOOPING = 0.7

#: Seconds that processes left behind sleep; tells this session's from another's.
NAP = os.environ["MISBEHAVING_NAP"] = str(10_000_000 + os.getpid())


def settings(**changes: Any) -> Reward:
    given = {"verifier": "misbehaving:act", "timeout_seconds": DEADLINE, "wall_seconds": 600, "workers": 2}
    return Reward(**{"memory_mb": 128, **given, **changes})


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    with VerifierPool(settings()) as pool:
        yield pool


@pytest.fixture(scope="module")
def patient() -> Iterator[VerifierPool]:
    """For verdicts that do not depend on time."""
    with VerifierPool(settings(timeout_seconds=30)) as pool:
        yield pool


def judge(pool: VerifierPool, *completions: str) -> list[VerifyResult]:
    return pool.verify([Row("prompt", completion, "answer") for completion in completions])


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def processes_left() -> bool:
    """Whether a process that a verifier of this session started still runs."""
    return any(NAP in (p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"]))


MISDEEDS = {
    "loop": ("timeout", f"reward.timeout_seconds = {DEADLINE:g}"),
    "regex": ("timeout", "reward.timeout_seconds"),
    "busy child": ("timeout", "reward.timeout_seconds"),
    "busy session": ("timeout", "reward.timeout_seconds"),
    "late": ("timeout", "reward.timeout_seconds"),
    "late child": ("timeout", "reward.timeout_seconds"),
    "memory": ("error", "reward.memory_mb"),
    "segfault": ("error", "signal 11"),
    "abort": ("error", "signal 6"),
    "leave": ("error", "status 3"),
    "sys.exit": ("error", "SystemExit: 0 (misbehaving.py:"),
    "raise": ("error", "KeyError: 'missing' (misbehaving.py:"),
    "unprintable": ("error", "Unprintable"),
    "recurse": ("error", "RecursionError"),
    "garbage": ("error", "no result"),
    "nothing": ("error", "returned NoneType; it must return a Verdict or a number"),
    "string": ("error", "returned str"),
    "nan": ("error", "nan is not a finite number"),
    "huge": ("error", "reward 1e+39 is not a finite number that float32 can hold: scale your rewards"),
    "bad verdict": ("error", "'right' is none of correct"),
}


@pytest.mark.parametrize("misdeed", MISDEEDS)
def test_a_misdeed_costs_its_own_sample_and_nothing_else(
    pool: VerifierPool, patient: VerifierPool, misdeed: str
) -> None:
    completions = ["x" * (i % 3) for i in range(40)]
    completions[17] = misdeed
    verdict, detail = MISDEEDS[misdeed]
    results = judge(pool if verdict == "timeout" else patient, *completions)
    culprit = results.pop(17)
    assert culprit.verdict == verdict and detail in culprit.detail
    assert culprit.reward == 0.0 if verdict == "timeout" else math.isnan(culprit.reward)
    assert culprit.verifier == "misbehaving:act"
    del completions[17]
    assert [r.reward for r in results] == [float(len(c)) for c in completions]
    assert [r.verdict for r in results] == ["correct" if c else "incorrect" for c in completions]


def test_misdeeds_in_any_mixture(patient: VerifierPool) -> None:
    quick = [m for m in MISDEEDS if MISDEEDS[m][0] == "error"]
    completions = quick * 3 + ["xx"] * 60
    random.Random(1).shuffle(completions)
    for completion, result in zip(completions, judge(patient, *completions), strict=True):
        assert result.verdict == ("correct" if completion == "xx" else "error")


def test_every_culprit_has_the_deadline_for_itself(pool: VerifierPool) -> None:
    results = judge(pool, *["regex", "regex", *["xx"] * 60])
    assert [r.verdict for r in results] == ["timeout"] * 2 + ["correct"] * 60
    assert all(r.seconds > 0.9 * DEADLINE for r in results[:2])  # one core: no more CPU seconds than others


def test_the_deadline_counts_cpu_seconds_not_those_of_the_wall_clock(pool: VerifierPool) -> None:
    """`nap` waits for twice the deadline, as a verifier does whose machine is busy with something else."""
    (result,) = judge(pool, "nap")
    assert result.verdict == "correct" and result.seconds > 1.9 * DEADLINE


def test_what_waits_for_ever_is_ended_by_the_wall_clock() -> None:
    with VerifierPool(settings(wall_seconds=0.6)) as pool:
        (result,) = judge(pool, "sleep")
    assert result.verdict == "error" and math.isnan(result.reward)
    assert result.detail == "wall clock: not finished within 0.6 s (reward.wall_seconds)"


@pytest.mark.parametrize("culprit", ["thread", "background", "session", "daemon"])
def test_what_a_call_leaves_running_costs_no_other_sample(pool: VerifierPool, culprit: str) -> None:
    """A thread in C that holds the interpreter's lock, a process that uses CPU, and ones of sessions of their own."""
    results = judge(pool, culprit, *["xx"] * 40)
    assert {r.verdict for r in results[1:]} == {"correct"}
    wait_until(lambda: not processes_left())


def test_a_process_that_a_verifier_forks_gives_no_answer(patient: VerifierPool) -> None:
    results = judge(patient, "fork", "x", "fork and exit", *["xx"] * 10)
    assert [r.reward for r in results] == [0.0, 1.0, 7.0] + [2.0] * 10


def test_a_worker_is_ended_although_a_process_that_was_forked_holds_its_channel() -> None:
    with contextlib.closing(VerifierPool(settings(workers=1))) as pool:
        forkserver = forkserver_of(pool)
        call = pool.submit([Row("p", "loop", "a")])
        wait_until(lambda: any(used(process) > 0.1 for process in forkserver.children()), "a worker in the loop")
        (worker,) = [process for process in forkserver.children() if used(process) > 0.1]
        if (child := os.fork()) == 0:
            signal.pause()
        try:
            assert call.result()[0].verdict == "timeout"
            wait_until(lambda: not alive(worker), "the end of the worker")
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_a_forkserver_that_ends_before_it_is_told_what_to_load() -> None:
    begin = subprocess.Popen

    def ended(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        process = begin([sys.executable, "-c", ""], **options)
        process.wait()
        return process

    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match="ends the importing process"):
        patch.setattr(subprocess, "Popen", ended)
        Worker(Forkserver("misbehaving:act", {}, 128))


def test_each_call_says_why_a_verifier_cannot_be_loaded() -> None:
    """The thread that hears of it first ends the forkserver while others wait for it."""
    for _ in range(4):
        with contextlib.closing(VerifierPool(settings(verifier="nowhere_at_all:f", workers=4))) as pool:
            errors = [pool.submit([Row("p", "x", "a")]).exception() for _ in range(6)]
        assert {type(error) for error in errors} == {UserError}
        assert all("no module 'nowhere_at_all'" in str(error) for error in errors)


def test_texts_are_cut_and_valid_and_prints_do_no_harm(patient: VerifierPool) -> None:
    long, printed, odd = judge(patient, "long", "print", "a\ud800\nb\0")
    assert long.parsed == "é?" * 250 and long.detail == "x" * 500
    assert printed.verdict == "error" and "NoneType" in printed.detail
    assert odd.reward == 5.0


def test_no_rows_and_rows_larger_than_any_buffer(patient: VerifierPool) -> None:
    assert judge(patient) == []
    assert [r.reward for r in judge(patient, *["x" * 2_000_000] * 8)] == [2_000_000.0] * 8


@pytest.mark.parametrize("misdeed", ["child", "abandon", "busy child", "busy session"])
def test_what_a_verifier_started_dies_with_it(misdeed: str) -> None:
    with VerifierPool(settings(wall_seconds=2.0)) as pool:
        assert judge(pool, misdeed)[0].verdict in ("timeout", "error")
        wait_until(lambda: not processes_left())


def test_rewards_follow_the_recipe() -> None:
    with VerifierPool(settings(on_unverified="reward", unverified_reward=-2.0)) as pool:
        assert judge(pool, "leave")[0].reward == -2.0
    with VerifierPool(settings(verifier="misbehaving:unparseable", unparseable_reward=-0.5)) as pool:
        result = judge(pool, "x")[0]
    assert (result.reward, result.verdict) == (-0.5, "unparseable")


@pytest.mark.parametrize(("timeout_reward", "expected"), [(0.0, 0.0), (-1.5, -1.5), (None, -2.0)])
def test_a_timeout_has_its_own_reward_or_is_treated_as_an_error(timeout_reward: float | None, expected: float) -> None:
    stated = {"on_unverified": "reward", "unverified_reward": -2.0, "timeout_reward": timeout_reward}
    with VerifierPool(settings(timeout_seconds=0.1, **stated)) as pool:
        assert judge(pool, "loop")[0].reward == expected


def test_a_timeout_without_a_reward_has_none() -> None:
    with VerifierPool(settings(timeout_seconds=0.1, timeout_reward=None)) as pool:
        assert math.isnan(judge(pool, "loop")[0].reward)


def test_workers_are_fresh_only_after_harm() -> None:
    with VerifierPool(settings(verifier="misbehaving:returns_process_id")) as pool:
        seen = {r.parsed for _ in range(3) for r in judge(pool, *["x"] * 64)}
    assert len(seen) <= 2


def test_works_from_a_thread_that_ends() -> None:
    """PR_SET_PDEATHSIG fires when the thread that started a process ends, not only its process."""
    pool = VerifierPool(settings())
    thread = threading.Thread(target=pool.__enter__)
    thread.start()
    thread.join()
    try:
        assert judge(pool, "xx", "leave", "xx")[2].verdict == "correct"
    finally:
        pool.close()


def test_close_leaves_no_process_and_is_for_good() -> None:
    before = psutil.Process().children()  # not all below it: one of them starts processes for other tests
    pool = VerifierPool(settings())
    forkserver = forkserver_of(pool)
    assert judge(pool, "x")[0].reward == 1.0
    started = [forkserver, *descendants(forkserver.pid)]
    assert len(started) >= 3
    pool.close()
    pool.close()
    wait_until(lambda: not any(map(alive, started)), "their end")
    with pytest.raises(RuntimeError, match="closed"):
        judge(pool, "xx")
    with pytest.raises(RuntimeError, match="closed"):
        pool.__enter__()  # as a thread does that was to load it early, and comes too late
    assert set(psutil.Process().children()) <= set(before)


def test_close_does_not_wait_for_a_verifier_that_is_being_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "endless.py").write_text(
        "import os, pathlib, signal\npathlib.Path(os.environ['ENDLESS_REACHED']).touch()\nsignal.pause()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("ENDLESS_REACHED", str(tmp_path / "reached"))
    before = psutil.Process().children()
    pool = VerifierPool(settings(verifier="endless:f"))
    with ThreadPoolExecutor(1) as early:
        loading = early.submit(pool.__enter__)
        wait_until((tmp_path / "reached").exists)
        pool.close()
        with pytest.raises(RuntimeError, match="closed"):
            loading.result()
    wait_until(lambda: set(psutil.Process().children()) <= set(before), "the end of what was loading")


def forkserver_of(pool: VerifierPool) -> psutil.Process:
    """The process that starts the pool's workers, started now."""
    before = psutil.Process().children()
    pool.__enter__()
    (found,) = [p for p in psutil.Process().children() if p not in before]
    return found


def test_losing_the_forkserver_in_a_call_costs_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers die with it; another is started, and what had no result is judged again."""
    monkeypatch.setenv("MISBEHAVING_GATE", str(tmp_path))
    pool = VerifierPool(settings())
    forkserver = forkserver_of(pool)
    started = [forkserver, *forkserver.children()]
    with ThreadPoolExecutor(1) as caller:
        results = caller.submit(judge, pool, *["xx"] * 40, "gate", *["xx"] * 40)
        wait_until((tmp_path / "reached").exists)
        os.kill(forkserver.pid, signal.SIGKILL)
        wait_until(lambda: not any(map(alive, started)))
        (tmp_path / "open").touch()
        assert {r.verdict for r in results.result()} == {"correct"}
    pool.close()


def test_a_worker_that_is_seen_to_have_ended_before_the_forkserver_is_costs_no_verdict() -> None:
    """Both were killed at once: the row that could not be handed over is not to blame."""
    ours, theirs = socket.socketpair()

    class Lost:
        loaded, reply_seconds = True, LIMIT

        def fork(self) -> socket.socket:
            return ours

        def lost(self) -> Exception:
            return ConnectionError("lost")

    theirs.sendall(b"1\n")
    worker = Worker(cast(Forkserver, Lost()))
    theirs.close()
    with pytest.raises(ConnectionError, match="lost"):
        list(worker.verify([Row("p", "xx", "a")], DEADLINE, LIMIT))
    worker.close()


def test_calls_share_the_workers_and_a_cancelled_one_takes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MISBEHAVING_GATE", str(tmp_path))
    with VerifierPool(settings(workers=1, timeout_seconds=30)) as pool:
        first = pool.submit([Row("p", "gate", "a")])
        wait_until((tmp_path / "reached").exists)
        others = [pool.submit([Row("p", "x" * n, "a")] * n) for n in range(1, 6)]
        cancelled = others.pop()
        assert cancelled.cancel()
        (tmp_path / "open").touch()
        assert [[r.reward for r in other.result()] for other in others] == [[n] * n for n in range(1, 5)]
        assert first.result()[0].reward == 1.0 and not cancelled.results


def test_calls_in_progress_fail_when_the_pool_is_closed() -> None:
    pool = VerifierPool(settings(workers=1))
    forkserver_of(pool)
    call = pool.submit([Row("p", "sleep", "a")] * 3)
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        call.result()


def test_an_error_of_the_pool_itself_ends_its_call_alone() -> None:
    def broken(pid: int) -> float:
        raise psutil.AccessDenied(pid)

    with VerifierPool(settings(workers=1)) as pool:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(psutil.AccessDenied):
            patch.setattr(processes, "_cpu_seconds", broken)
            judge(pool, "nap", "xx")
        assert judge(pool, "xxx")[0].reward == 3.0


def test_losing_the_forkserver_between_calls_costs_nothing() -> None:
    pool = VerifierPool(settings())
    forkserver = forkserver_of(pool)
    forkserver.kill()
    assert judge(pool, "xx")[0].reward == 2.0
    pool.close()


def test_a_verifier_that_kills_the_forkserver_costs_its_own_sample() -> None:
    with VerifierPool(settings(workers=1)) as pool:
        first, culprit, last = judge(pool, "xx", "kill", "xx")
    assert culprit.verdict == "error" and "the process that starts verifiers ended with status -9" in culprit.detail
    assert first.reward == last.reward == 2.0


def test_a_forkserver_that_is_lost_again_and_again_without_a_verifier_at_work_is_an_error() -> None:
    class Doomed(VerifierPool):
        def _running(self) -> Forkserver:
            server = super()._running()
            server.loaded = True
            server._control.shutdown(socket.SHUT_RDWR)
            return server

    pool = Doomed(settings(workers=1))
    with pytest.raises(ConnectionError, match="the process that starts verifiers"):
        judge(pool, "xx")
    pool.close()


PARENT = """
from areal_tasks.rewards import processes
from areal_tasks.rewards.pool import VerifierPool
from schemas.recipe.sections import Reward
pool = VerifierPool(Reward(verifier={verifier!r}, timeout_seconds=600, memory_mb=128))
print("begun", flush=True)
pool.verify([("", {completion!r}, "")] * 4)
"""


@pytest.mark.parametrize(
    ("verifier", "completion", "processes", "looping"),
    [("misbehaving:act", "regex", 4, 2), ("misbehaving:act", "child", 6, 0), ("hangs_on_import:act", "", 2, 1)],
)
def test_nothing_outlives_a_killed_parent(verifier: str, completion: str, processes: int, looping: int) -> None:
    """Forkserver, watchdog, two workers (and a child of each); or stuck in C while the verifier is imported."""
    code = PARENT.format(verifier=verifier, completion=completion)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"begun\n"
        wait_until(lambda: len(descendants(parent.pid)) >= processes, "its processes")
        started = descendants(parent.pid)
        wait_until(lambda: sum(used(process) > LOOPING for process in started) >= looping, "them in the loop")
        parent.kill()
    try:
        wait_until(lambda: not any(map(alive, started)), started)
    finally:
        for process in filter(alive, started):
            process.kill()


def used(process: psutil.Process) -> float:
    """CPU seconds."""
    return float(process.cpu_times().user)


def test_a_verifier_that_cannot_be_loaded_is_the_users_mistake() -> None:
    with (
        pytest.raises(UserError, match="no module 'nowhere_at_all'"),
        VerifierPool(settings(verifier="nowhere_at_all:f")),
    ):
        pass
    with (
        pytest.raises(UserError, match="importing leaves_on_import"),
        VerifierPool(settings(verifier="leaves_on_import:f")),
    ):
        pass


def test_a_warm_pool_starts_nothing_and_sends_few_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is why it judges 256 rows in 5 ms on two idle cores."""
    verify, sent = Worker.verify, list[int]()

    def counted(worker: Worker, rows: Sequence[Row], *limits: float) -> Iterator[Result]:
        sent.append(len(rows))
        return verify(worker, rows, *limits)

    pool = VerifierPool(Reward(verifier="exact"))
    forkserver, rows = forkserver_of(pool), [Row("1+1=", "2", "2")] * 256
    wait_until(lambda: pool.verify(rows) and len(forkserver.children()) == 3, "the watchdog and two workers")
    before = set(descendants(forkserver.pid))  # not of this process: what other tests have started starts others
    monkeypatch.setattr(Worker, "verify", counted)
    for _ in range(6):
        assert all(r.reward == 1 for r in pool.verify(rows))
    assert set(descendants(forkserver.pid)) == before and forkserver.is_running()
    pool.close()
    assert sum(sent) == 6 * 256 and len(sent) < 6 * 64


def test_small_calls_are_not_divided_while_others_wait() -> None:
    pool, row = VerifierPool(Reward(verifier="exact", workers=2)), Row("1+1=", "2", "2")
    pool._calls = [Call([row] * 8) for _ in range(32)]  # as groups that finish at once
    sent = []
    while any(call.waiting for call in pool._calls):
        taken = pool._take()
        assert taken is not None
        sent.append(len(taken[1]))
    assert sum(sent) == 256 and sent[:24] == [8] * 24 and sent[-1] == 1


def test_a_forkserver_that_hangs_is_replaced_in_the_same_call() -> None:
    pool = VerifierPool(settings(workers=1))
    server = forkserver_of(pool)
    assert pool._server is not None
    pool._server.reply_seconds = 0.2
    workers = server.children()
    server.suspend()
    for worker in workers:
        worker.kill()
    results = judge(pool, "correct", "correct")
    assert not alive(server)
    assert results[1].verdict == "correct"  # the first may have been given to the process that was killed
    pool.close()
