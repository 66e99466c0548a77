"""Every page of the documentation: its links lead somewhere, its commands and recipes are ones that the program takes.

What can be executed on a CPU is: see test_every_command.py, and for the cookbook tests/sql/test_cookbook.py.
"""

from __future__ import annotations

import fnmatch
import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from flows.cli.main import COMMANDS, load_command
from flows.execute import with_overrides
from schemas.recipe.fields import nested_section
from schemas.recipe.load import RECIPES, load_recipe, parse_recipe

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")])
PARTS = ("areal_tasks", "flows", "schemas", "benchmarks", "tests")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`((?:arealflow|prefect deployment run|make|python -m) [^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([\w/*]+\.py)`")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
COMMENT = re.compile(r"""("[^"]*"|'[^']*')|(?<!\S)#[^\n]*""")
TYPED = re.compile(r"^\$ (.*\n)", re.MULTILINE)
#: A line's end: a word of its own between words, and part of one in quotes.
NEXT = " ; "
#: Not a query that has brackets.
PLACEHOLDER = re.compile(r"…|\.\.\.|^[^ ]*[<\[|]")


def blocks(page: Path, *languages: str) -> Iterator[str]:
    return (text for language, text in FENCE.findall(page.read_text()) if language in languages)


def shell(page: Path) -> Iterator[str]:
    """The page's shell blocks, without comments; of a session (`console`), what was typed."""
    for language, text in FENCE.findall(page.read_text()):
        typed = "".join(TYPED.findall(text)) if language == "console" else text
        if language in ("bash", "console"):
            yield COMMENT.sub(r"\1", typed)


def lines(page: Path) -> Iterator[list[str]]:
    """The words of each line of the shell blocks; a line that is continued is one."""
    for text in shell(page):
        yield from split(shlex.split(text.replace("\\\n", " ").replace("\n", NEXT)), ";")


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command, in shell blocks and in sentences; what stands for something else is left out."""
    for line in [*lines(page), *sentences(page)]:
        for words in split(line, "&&", "||", "|"):
            yield [word for word in words if not PLACEHOLDER.search(word)]


def sentences(page: Path) -> Iterator[list[str]]:
    for span in SPAN.findall(page.read_text()):
        with suppress(ValueError):  # no shell's
            yield [*shlex.split(span), "PART"]


def split(words: Iterable[str], *ends: str) -> list[list[str]]:
    return [[*part] for is_end, part in groupby(words, lambda word: word in ends) if not is_end]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    titles = (re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", title) for title in HEADING.findall(page.read_text()))
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    without_code = FENCE.sub("", page.read_text())
    for link in LINK.findall(without_code):
        if "://" in link or link.startswith("mailto:"):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{link} leads nowhere"
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), f"{link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_ones_that_there_are(page: Path) -> None:
    for words in commands(page):
        match words:
            case ["arealflow", name, *arguments] if name[0].islower():
                check_command(name, arguments)
            case ["prefect", "deployment", "run", name, *arguments] if "/" in name and name.islower():
                check_deployment(name, arguments)
            case ["python", "-m", module, *_] if module.split(".")[0] in ("benchmarks", "schemas", "flows"):
                assert find_spec(module), f"there is no module {module}"
            case ["make", target, *_] if target.isidentifier() or "-" in target:
                assert re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


def check_command(name: str, arguments: list[str]) -> None:
    """Its options are there; the whole is understood, unless a word in capitals stands for something."""
    assert name in COMMANDS, f"there is no command arealflow {name}"
    command = load_command(name)
    options = {option for one in command.params for option in (*one.opts, *one.secondary_opts)}
    asked = {word.partition("=")[0] for word in arguments if word.startswith("--")}
    assert asked <= options | {"--help"}, f"arealflow {name} has no {asked - options}"
    if arguments and not any(word.isupper() for word in arguments):
        command.make_context(name, arguments)


def check_deployment(name: str, arguments: list[str]) -> None:
    flow, _, deployment = name.partition("/")
    known = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    recipes = {(one["entrypoint"].split(".")[-1], one["name"]): one.get("build") for one in known}
    if deployment == "recipe":  # of the reader's own
        return
    assert (flow, deployment) in recipes, f"there is no deployment {name}"
    for value in arguments:
        if value.startswith("overrides=") and flow != "replay":
            [build] = recipes[flow, deployment]
            read = build["flows.deploy.read_recipe"]
            with_overrides(load_recipe(read["name"], read.get("overrides", ())), value.removeprefix("overrides="))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_recipes_have_fields_that_there_are(page: Path) -> None:
    for text in blocks(page, "yaml"):
        values = yaml.safe_load(text)
        if not isinstance(values, dict):
            continue
        if "flow" in values and "name" in values:
            parse_recipe(values)
        elif values.keys() <= {name for recipe in RECIPES.values() for name in recipe.model_fields}:
            assert any(known(values, recipe) for recipe in RECIPES.values()), f"no recipe has these fields:\n{text}"


def known(values: Any, model: type[BaseModel] | None) -> bool:
    """Whether all keys, at any depth, are fields."""
    if model is None or not isinstance(values, dict):
        return True
    return all(
        name in model.model_fields and known(value, nested_section(model.model_fields[name]))
        for name, value in values.items()
    )


def test_internals_name_files_that_exist() -> None:
    files = [f"/{path.relative_to(ROOT)}" for part in PARTS for path in (ROOT / part).rglob("*.py")]
    pages = sorted(ROOT.glob("docs/internals/*.md"))
    named = {(page.name, name) for page in pages for name in CODE.findall(page.read_text())}
    assert len(named) > 50
    assert not [one for one in named if not fnmatch.filter(files, f"*/{one[1]}")]
