"""Every command of the documentation that reads or keeps a run is executed, page by page, on a real run.

Not those that train or start services: the demo and the tests of these commands do that.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest
from stage_driver import drive, store_in, tiny
from test_documentation import PAGES, ROOT, commands
from typer.testing import CliRunner

from flows.cli.main import app

ITERATIONS: Final = 2
#: Commands that need neither a GPU nor services, and how many of their first words name runs.
RUNS_NAMED: Final = {"audit": 1, "compact": 1, "diff": 2, "fork": 1, "log": 1, "report": 2, "sql": 1, "weights": 1}
UNNAMED: Final = ("gc", "plan", "runs")
PREPARED: Final = ("--sign", "--verify", "-f", "--remove")  # they need a file of the reader's, or a run that has ended
NAMES: Final = ("mine", "other")
STANDS_FOR: Final = {"K": "1", "RECIPE": "quickstart"}


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
                if name in UNNAMED:
                    yield [name, *here(arguments, 0)]
                elif name in RUNS_NAMED and arguments and complete(name, arguments):
                    yield [name, *here(arguments, RUNS_NAMED[name])]


def complete(name: str, arguments: Sequence[str]) -> bool:
    return name != "sql" or any(" " in word for word in arguments)


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_do_what_the_page_shows(
    page: Path, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(recorded, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AREALFLOW_STORE", store_in(tmp_path).url)
    for words in executable(page):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, f"arealflow {' '.join(words)}\n{done.output}\n{done.exception!r}"


def test_there_is_something_to_execute() -> None:
    assert sum(len(list(executable(page))) for page in PAGES) > 80
