"""Commands of the documentation that read, keep, fork or replay a run are executed, page by page, on a real run.

Those that begin a run are made short, and are slow tests. Not executed: what needs a run in progress (`set`, `top`), a
service's log, Prefect's worker, several machines or a GPU. The tests of these commands do that, and the demo.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest
from stage_driver import drive, store_in, tiny
from test_documentation import PAGES, ROOT, blocks, commands
from typer.testing import CliRunner

from areal_tasks.store.query import run_sql
from flows.cli.main import app

ITERATIONS: Final = 2
#: Commands that need neither a GPU nor services, and how many of their first words name runs.
RUNS_NAMED: Final = dict.fromkeys(("audit", "compact", "fork", "log", "replay", "sql", "weights"), 1) | {
    "diff": 2,
    "report": 2,
}
UNNAMED: Final = ("doctor", "gc", "init", "plan", "runs")
PREPARED: Final = ("--sign", "--verify", "-f", "--remove")  # they need a file of the reader's, or a run that has ended
NAMES: Final = ("mine", "other")
FILE: Final = re.compile(r"# (\w+\.(py|yaml))\b")
STANDS_FOR: Final = {"K": "1", "RECIPE": "quickstart", "STAGE": "verify"}
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
    """A folder with a store of two runs. There is a Prefect server, so that no fork starts one."""
    folder = tmp_path_factory.mktemp("pages")
    for name in NAMES:
        drive(folder, name, tiny(schedule={"iterations": ITERATIONS}))
    return folder


def executable(page: Path) -> Iterator[list[str]]:
    """The words of the commands that can be executed, with the run names that exist here."""
    for words in commands(page):
        match [word.replace(" ; ", "\n") for word in words if word != "PART"]:
            case ["arealflow", name, *arguments] if not set(arguments) & set(PREPARED):
                if (name in UNNAMED or name in RUNS_NAMED) and complete(name, arguments):
                    yield [name, *here(arguments, RUNS_NAMED.get(name, 0))]


def begun() -> set[tuple[str, ...]]:
    """The words of the commands that begin a run of a shipped recipe for CPUs."""
    found = [tuple(word for word in words if word != "PART") for page in PAGES for words in commands(page)]
    return {words[1:] for words in found if words[:2] == ("arealflow", "run") and "quickstart" in " ".join(words[2:3])}


def write_files(page: Path, folder: Path) -> None:
    """The reader's files that the page shows, which begin with their names."""
    for text in blocks(page, "python", "yaml"):
        if named := FILE.match(text):
            (folder / named[1]).write_text(text)


def complete(name: str, arguments: Sequence[str]) -> bool:
    """Whether a run or folder, a query, and the stage where a replay starts are given, where they are needed."""
    asked = {"sql": any(" " in word for word in arguments), "replay": "--from" in arguments}
    return asked.get(name, bool(arguments) or (name in UNNAMED and name != "init"))


def here(arguments: Sequence[str], named: int) -> list[str]:
    """Arguments with run names that exist here, and versions and iterations that these runs have."""
    names = iter(NAMES)
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
def test_commands_do_what_the_page_shows(page: Path, recorded: Path, desk: Path) -> None:
    shutil.copytree(recorded, desk, dirs_exist_ok=True)
    write_files(page, desk)
    for words in executable(page):
        invoke(words)


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
