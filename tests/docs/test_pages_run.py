"""Commands of the documentation that read, change, fork or replay a run are executed, page by page, on a real run.

Those that begin a run are made short, and are slow tests, as are those that need `arealflow up`. Not executed: what
follows a log or a run until Ctrl-C, `prefect deployment run`, `make`, and what needs several machines or a GPU. The
tests of these commands do that, and the demo.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

import pytest
from stage_driver import drive, store_in, tiny
from test_documentation import PAGES, ROOT, blocks, commands
from typer.testing import CliRunner
from waiting import LIMIT

from areal_tasks.engines.ports import probe_port
from areal_tasks.store.opening import open_run
from areal_tasks.store.query import run_sql
from areal_tasks.store.runs import Run
from areal_tasks.store.service_logs import LogCopy, LogName
from areal_tasks.store.system import SystemLog
from flows.cli import machine, processes, services
from flows.cli.main import app
from flows.credentials import NEEDED

ITERATIONS: Final = 2
#: Commands that need neither a GPU nor services, and how many of their first words name runs.
RUNS_NAMED: Final = dict.fromkeys(
    ("audit", "compact", "fork", "log", "logs", "replay", "set", "sql", "top", "weights"), 1
) | {"diff": 2, "report": 2}
UNNAMED: Final = ("doctor", "gc", "init", "plan", "runs")
PREPARED: Final = ("--sign", "--verify", "-f", "--remove")  # they need a file of the reader's, or a run that has ended
NAMES: Final = ("mine", "other")
#: For `set`: a run with iterations left, whose groups are generated ahead.
AHEAD: Final = "ahead"
#: Commands that start, use or stop what `arealflow up` starts, in the order of their execution.
SERVED: Final = ("up", "deploy", "alerts", "s3-keys", "down")
FILE: Final = re.compile(r"# (\w+\.(py|yaml))\b")
STANDS_FOR: Final = {
    "K": "1",
    "N": "30",
    "RECIPE": "quickstart",
    "STAGE": "verify",
    "key=value": "rollout.groups=2",
    **dict.fromkeys(("SERVICE", "SERVICE.node"), "inference-0"),
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


def executable(page: Path) -> Iterator[list[str]]:
    """The words of the commands that can be executed, with the run names that exist here."""
    for words in commands(page):
        match [word.replace(" ; ", "\n") for word in words if word != "PART"]:
            case ["arealflow", name, *arguments] if not set(arguments) & set(PREPARED):
                if (name in UNNAMED or name in RUNS_NAMED) and complete(name, arguments):
                    yield [name, *here(arguments, RUNS_NAMED.get(name, 0), (AHEAD,) if name == "set" else NAMES)]


def begun() -> set[tuple[str, ...]]:
    """The words of the commands that begin a run of a shipped recipe for CPUs."""
    found = [tuple(word for word in words if word != "PART") for page in PAGES for words in commands(page)]
    return {words[1:] for words in found if words[:2] == ("arealflow", "run") and "quickstart" in " ".join(words[2:3])}


def served() -> list[list[str]]:
    """The words of the commands of SERVED, in their order; `--remove` comes last of a command's."""
    found = {tuple(word for word in words if word != "PART") for page in PAGES for words in commands(page)}
    ours = {tuple(here(words[1:], 0)) for words in found if words[:1] == ("arealflow",) and words[1:2] != ()}
    known = [list(words) for words in ours if words[0] in SERVED and words != ("deploy",)]
    return sorted(known, key=lambda words: (SERVED.index(words[0]), "--remove" in words, words))


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


@pytest.mark.slow("a Prefect server, worker and keeper of its own, and several deployments")
def test_what_pages_say_of_up_and_its_server(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREALFLOW_HOME", str(desk / "home"))
    monkeypatch.setenv("AREALFLOW_ALERT_WEBHOOK", "http://127.0.0.1:1/alerts")
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setattr(processes, "START_SECONDS", LIMIT)
    for name in NEEDED:
        monkeypatch.setenv(name, "of a test")
    write_files(ROOT / "README.md", desk)
    invoke(["init", "my-project"])
    try:
        for words in served():
            invoke([*words, *(["--port", str(probe_port())] if words[0] == "up" else [])])
        assert not processes.parts("server", "worker", "keeper"), "the last command is `down`"
    finally:
        machine._end_all()


@pytest.mark.slow("whole runs by the command; the one of the recipe on the first screen is in `make test`")
@pytest.mark.parametrize("words", sorted(begun()), ids=" ".join)
def test_runs_that_a_page_begins(words: tuple[str, ...], api: str, desk: Path) -> None:
    invoke([*words, *SHORT])


def test_the_recipe_on_the_first_screen_runs(api: str, desk: Path) -> None:
    write_files(ROOT / "README.md", desk)
    invoke(["run", "mine.yaml", "run=mine", *ON_CPU])
    assert run_sql(store_in(desk), "mine", "SELECT DISTINCT verifier FROM samples").to_pylist() == [
        {"verifier": "my_reward:says_it"}
    ]


def test_there_is_something_to_execute() -> None:
    assert sum(len(list(executable(page))) for page in PAGES) > 100
