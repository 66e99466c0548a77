"""Commands of the documentation that read, change, fork or replay a run are executed, page by page, on a real run.

Those that begin a run are made short, and are slow tests. Those that need `arealflow up` are in
test_pages_deployed.py.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Final

import pytest
from cryptography.fernet import Fernet
from stage_driver import drive, store_in, tiny
from test_documentation import NEXT, PAGES, ROOT, blocks, commands, shell
from typer.testing import CliRunner
from waiting import LIMIT, wait_until
from warm_processes import Popen

from areal_tasks.store.history.journal import append_log
from areal_tasks.store.history.signing import verify
from areal_tasks.store.opening import open_run
from areal_tasks.store.query import run_sql
from areal_tasks.store.runs import Run, run_names
from areal_tasks.store.service_logs import LogCopy, LogName
from areal_tasks.store.system import SystemLog
from flows.cli import services
from flows.cli.main import app

ITERATIONS: Final = 2
#: Commands that need neither a GPU nor services, and how many of their first words name runs.
RUNS_NAMED: Final = dict.fromkeys(
    ("audit", "compact", "fork", "log", "logs", "replay", "set", "sql", "top", "weights"), 1
) | {"diff": 2, "report": 2}
UNNAMED: Final = ("doctor", "gc", "init", "plan", "runs")
#: Options of commands that have tests of their own: they need a key, do not end, or need a run that has ended.
PREPARED: Final = ("--sign", "--verify", "-f", "--remove")
NAMES: Final = ("mine", "other")
#: For `set`: a run with iterations left, whose groups are generated ahead.
AHEAD: Final = "ahead"
FILE: Final = re.compile(r"# (\w+\.(py|yaml))\b")
STANDS_FOR: Final = {
    "K": "1",
    "N": "30",
    "RECIPE": "quickstart",
    "STAGE": "verify",
    "key=value": "rollout.groups=2",
    **dict.fromkeys(("SERVICE", "SERVICE.node"), "inference-0"),
    **dict.fromkeys(("NAME", "old-try"), "other"),
}
#: Added to commands that begin a run: an iteration of few samples, from random weights, in threads of this process.
SHORT: Final = (
    *("model.warm_start=", "model.scratch={}", "rollout.groups=4", "evaluation={}", "schedule.iterations=1"),
    *("launcher.type=inline", "inference.slots=16", "reward.verifier=stage_reward:digits"),
)
#: Added to the recipe of README.md, so that it runs without a GPU and a download, with its reward.
ON_CPU: Final = (
    *("model.path=", "model.scratch={}", "model.max_length=16", "model.dtype=float32"),
    *("data={source: sums://4}", "rollout.groups=4", "rollout.max_new_tokens=4", "trainer.backend=local"),
    *("inference={slots: 16}", "launcher.type=inline", "schedule.iterations=1"),
)


@pytest.fixture(scope="module")
def recorded(api: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store of two runs, and one that has just begun. A Prefect server, so that no fork starts one."""
    folder = tmp_path_factory.mktemp("pages")
    for name in NAMES:
        observed(drive(folder, name, tiny(schedule={"iterations": ITERATIONS})), folder)
    eta = {"max_head_offpolicyness": 2}
    open_run(store_in(folder), AHEAD, tiny(rollout=eta, schedule={"iterations": 9}))
    return folder


def observed(run: Run, folder: Path) -> None:
    """Store what the flow stores of a service that is a process: its log, and a sample."""
    sample = {"service": "inference-0", "busy": 0.4, "doing": "generates", "state_seconds": 1.0, "cpu": 1.0}
    samples = SystemLog(run)
    samples.add([sample | {"owner": 1, "host": "node", "memory": 1, "waits_for": "", "time": datetime(2026, 1, 1)}])
    samples.write()
    log = folder / "inference-0.log"
    log.write_text("ready\n")
    LogCopy(run.store, run.name, LogName("inference-0", 1, 0), log)()


def typed(page: Path) -> Iterator[list[str]]:
    """The words of each command, as the program gets them."""
    return ([word.replace(NEXT, "\n") for word in words if word != "PART"] for words in commands(page))


def reads(words: Sequence[str]) -> bool:
    """Whether this command can be executed on the runs of `recorded`."""
    match words:
        case ["arealflow", name, *arguments]:
            known = name in UNNAMED or name in RUNS_NAMED
            return known and not set(arguments) & set(PREPARED) and complete(name, arguments)
    return False


def prepared(words: Sequence[str]) -> bool:
    return words[:1] == ["arealflow"] and words[1] in ("audit", "gc", "logs") and bool(set(words) & set(PREPARED))


def begins(words: Sequence[str]) -> bool:
    """Whether this command begins a run of a shipped recipe for CPUs."""
    return words[:2] == ["arealflow", "run"] and "quickstart" in " ".join(words[2:3])


def executable(page: Path) -> Iterator[list[str]]:
    """Commands of `reads`, with the run names that exist here."""
    for _, name, *arguments in filter(reads, typed(page)):
        yield [name, *here(arguments, RUNS_NAMED.get(name, 0), (AHEAD,) if name == "set" else NAMES)]


def everywhere(wanted: Callable[[list[str]], bool]) -> list[tuple[str, ...]]:
    """The arguments of these commands on all pages, with the run names that exist here."""
    found = [words[1:] for page in PAGES for words in typed(page) if wanted(words)]
    return sorted({(name, *here(rest, RUNS_NAMED.get(name, 0))) for name, *rest in found})


def as_written(start: str) -> str:
    """The line that begins so in a shell block of a page, for a shell."""
    blocks = [text for page in PAGES for text in shell(page)]
    [line] = {line for text in blocks for line in text.splitlines() if line.startswith(start)}
    return line


def write_files(page: Path, folder: Path) -> None:
    """The reader's files that the page shows, which begin with their names."""
    for text in blocks(page, "python", "yaml"):
        if named := FILE.match(text):
            (folder / named[1]).write_text(text)


def complete(name: str, arguments: Sequence[str]) -> bool:
    """Whether a run or folder, a query, and the stage where a replay starts are given, where they are needed."""
    asked = {"sql": any(" " in word for word in arguments), "replay": "--from" in arguments}
    return asked.get(name, bool(arguments) or (name in UNNAMED and name != "init"))


def here(arguments: Sequence[str], named: int, known: Sequence[str] = NAMES) -> list[str]:
    """Arguments with run names that exist here, and versions and iterations that these runs have."""
    names = iter(known)
    found = []
    for place, word in enumerate(arguments):
        if place < named and not word.startswith("-") and "=" not in word:
            found.append(",".join(next(names) for _ in word.split(",")))
        else:
            found.append("1" if word.isdigit() and int(word) > ITERATIONS else STANDS_FOR.get(word, word))
    return found


def invoke(words: Sequence[str]) -> None:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, f"arealflow {' '.join(words)}\n{done.output}\n{done.exception!r}"


def in_shell(line: str) -> str:
    """What a line prints in a shell whose `python` is this one."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(["bash", "-ec", line], env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a store. What is imported from it is forgotten at the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AREALFLOW_STORE", store_in(tmp_path).url)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_do_what_the_page_shows(
    page: Path, recorded: Path, desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(recorded, desk, dirs_exist_ok=True)
    write_files(page, desk)
    monkeypatch.setattr(services, "FRESH_SECONDS", 0.0)  # `top` waits for no newer sample
    for words in executable(page):
        invoke(words)


def test_a_run_is_signed_and_verified_by_the_keys_that_the_page_makes(recorded: Path, desk: Path) -> None:
    shutil.copytree(recorded, desk, dirs_exist_ok=True)
    in_shell(as_written("openssl "))
    for option in ("--sign", "--verify"):
        [words] = everywhere(lambda words, option=option: option in words and prepared(words))
        invoke(words)
    [found] = verify(store_in(desk), "mine", desk / "key.pub")
    assert (found.signature.iteration, found.problem, found.known) == (ITERATIONS - 1, "", True)


@contextmanager
def following(words: Sequence[str], shown: Path) -> Iterator[Popen]:
    """The command in a process, which prints to this file, and which Ctrl-C ends in order."""
    with shown.open("w") as sink:
        process = Popen([sys.executable, "-m", "arealflow.command", *words], stdout=sink, stderr=subprocess.STDOUT)
    try:
        yield process
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT) == 0
    finally:
        process.kill()


@pytest.mark.parametrize("words", everywhere(lambda words: "-f" in words and prepared(words)), ids=" ".join)
def test_a_log_is_followed_until_ctrl_c(words: tuple[str, ...], recorded: Path, desk: Path) -> None:
    shutil.copytree(recorded, desk, dirs_exist_ok=True)
    log, shown = desk / "service.log", desk / "shown"
    copy = LogCopy(store_in(desk), "mine", LogName(words[2], 2, 0), log)
    log.write_text("first line\n")
    copy()
    with following(words, shown):
        wait_until(lambda: shown.read_text() == "first line\n", "what the log has")
        log.write_text("first line\nsecond line\n")
        copy()
        wait_until(lambda: shown.read_text() == "first line\nsecond line\n", "what was added")


def test_a_log_is_waited_for_until_ctrl_c(recorded: Path, desk: Path) -> None:
    shutil.copytree(recorded, desk, dirs_exist_ok=True)
    with following(["logs", "mine", "rollout-0", "-f"], desk / "shown"):
        wait_until(lambda: "waiting for one" in (desk / "shown").read_text(), "the line that says so")


def test_a_run_that_has_ended_is_removed(recorded: Path, desk: Path) -> None:
    shutil.copytree(recorded, desk, dirs_exist_ok=True)
    append_log(store_in(desk), "other", "finished", {"owner": 1})
    [words] = everywhere(lambda words: "--remove" in words and prepared(words))
    invoke(words)
    assert "other" not in run_names(store_in(desk)) and "mine" in run_names(store_in(desk))


def test_the_newest_run_of_the_demo_is_found(desk: Path) -> None:
    for name in ("mine", "quickstart-20260101-000000", "quickstart-20260102-000000", "quickstart-20260102-000000-sft"):
        (desk / ".arealflow" / "store" / name).mkdir(parents=True)
    assert in_shell(f'{as_written("run=")}\necho "$run"') == "quickstart-20260102-000000\n"


def test_the_key_for_prefects_blocks_is_one(desk: Path) -> None:
    Fernet(in_shell(as_written("python -c ")).strip())


@pytest.mark.slow("whole runs by the command; the one of the recipe on the first screen is in `make test`")
@pytest.mark.parametrize("words", everywhere(begins), ids=" ".join)
def test_runs_that_a_page_begins(words: tuple[str, ...], api: str, desk: Path) -> None:
    invoke([*words, *SHORT])


def test_the_recipe_on_the_first_screen_runs(api: str, desk: Path) -> None:
    write_files(ROOT / "README.md", desk)
    invoke(["run", "mine.yaml", "run=mine", *ON_CPU])
    assert run_sql(store_in(desk), "mine", "SELECT DISTINCT verifier FROM samples").to_pylist() == [
        {"verifier": "my_reward:says_it"}
    ]
