"""Digests of users' code: which edits change them, which stages' keys contain them, and who compares them."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_tasks.code_digests import FIELDS, code_digests, code_values, digest_of
from areal_tasks.engines.service import ServiceSpec
from areal_tasks.rewards.pool import VerifierPool
from areal_tasks.rewards.protocol import Row
from areal_tasks.rollout.made_with import judged_with, made_with
from areal_tasks.rollout.orders import Begin
from areal_tasks.rollout.worker.process import Worker
from areal_tasks.stages.graphs import stages
from areal_tasks.store.fork import Origin
from areal_tasks.user_code import find_object
from flows.cli.start import replay_name
from schemas.errors import UserError
from schemas.recipe.load import load_recipe
from schemas.recipe.recipe import RlhfRecipe
from schemas.recipe.sections import Reward

#: Ways to import a module, anywhere in a file.
IMPORTS = (
    "import {}",
    "from {} import x",
    "def f():\n    import {}.y as z",
    "import importlib\nimportlib.import_module('{}.y')",
    "if False:\n    from {}.y import *",
)
MINE = ("reward.verifier=mine:judge", "workflow.name=mine:Flow", "workflow.arguments={}")


def digest(name: str) -> str:
    return code_digests({"reward": {"verifier": f"{name}:judge"}})["reward.verifier"]


@given(
    edges=st.dictionaries(st.tuples(st.integers(0, 5), st.integers(0, 5)), st.sampled_from(IMPORTS), max_size=10),
    edited=st.integers(0, 5),
    packages=st.sets(st.integers(0, 5)),
)
def test_an_edit_counts_where_imports_lead(edges: dict[Any, str], edited: int, packages: set[int]) -> None:
    """Modules and packages m0 to m5 of the user; the recipe names m0."""
    reached, before = {0}, set[int]()
    while reached != before:
        before, reached = reached, reached | {b for a, b in edges if a in reached}
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        for i in range(6):
            path = Path(folder, f"m{i}", "deep", "x.py") if i in packages else Path(folder, f"m{i}.py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(
                "\n".join(["raise SystemExit", *(how.format(f"m{b}") for (a, b), how in edges.items() if a == i)])
            )
            if i == edited:
                target = path
        found = digest("m0")
        assert found == digest("m0") != ""
        target.write_text(target.read_text() + "\n# edited")
        assert (digest("m0") != found) == (edited in reached)
        assert not any(name.startswith("m0") for name in sys.modules)


def test_files_that_python_does_not_import_count_for_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Emacs's lock of a file that is being edited, a link to no file; and a notebook's checkpoints."""
    (tmp_path / "judges" / ".ipynb_checkpoints").mkdir(parents=True)
    (tmp_path / "judges" / "one.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    before = digest("judges.one")
    (tmp_path / "judges" / ".#one.py").symlink_to("me@here.4711")
    (tmp_path / "judges" / "folder.py").mkdir()
    (tmp_path / "judges" / ".ipynb_checkpoints" / "one.py").write_text("1")
    assert digest("judges.one") == before
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    assert digest("judges.one") == before, "a package without __init__.py, found twice, as from its own folder"
    assert digest("no_such_package.x") == ""


def test_installed_packages_count_by_their_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where pip installs into any folder; a file that somebody put there counts by its content."""
    installed, mine = tmp_path / "installed", tmp_path / "mine"
    (installed / "lib_of_others-1.0.dist-info").mkdir(parents=True)
    mine.mkdir()
    record = installed / "lib_of_others-1.0.dist-info" / "METADATA"
    record.write_text("Metadata-Version: 2.1\nName: lib_of_others\nVersion: 1.0\n")
    for path in (installed / "lib_of_others.py", installed / "dropped.py"):
        path.touch()
    (mine / "judge.py").write_text("import lib_of_others, dropped, json, not_installed")
    monkeypatch.syspath_prepend(installed)
    monkeypatch.syspath_prepend(mine)
    found = [digest("judge")]
    (installed / "lib_of_others.py").write_text("1")
    assert digest("judge") == found[0]
    for edit in (
        lambda: record.write_text(record.read_text().replace("1.0", "1.1")),
        lambda: (installed / "dropped.py").write_text("1"),
        lambda: (mine / "not_installed.py").touch(),
    ):
        edit()
        found.append(digest("judge"))
    assert len(set(found)) == 4


def test_a_process_tells_the_code_that_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "code_that_runs.py").write_text("x = 1")
    monkeypatch.syspath_prepend(tmp_path)
    find_object("code_that_runs:x", "workflow.name")
    imported = digest_of("code_that_runs")
    (tmp_path / "code_that_runs.py").write_text("x = 22")
    assert digest_of("code_that_runs") == imported, "the old module is in its memory"
    monkeypatch.delitem(sys.modules, "code_that_runs")
    assert digest_of("code_that_runs") != imported


# ── what is made with it ────────────────────────────────────────────────────────────────────────────────────────────


def recipe_of(*overrides: str) -> RlhfRecipe:
    recipe = load_recipe("quickstart", [*MINE, *overrides])
    assert isinstance(recipe, RlhfRecipe)
    return recipe


@pytest.mark.parametrize(
    ("overrides", "verifier"),
    [((), {"verify", "evaluate"}), (("rollout.filters.function=mine:keeps",), {"verify", "evaluate", "rollout"})],
)
def test_the_code_is_in_the_key_of_every_stage_that_uses_it(overrides: tuple[str, ...], verifier: set[str]) -> None:
    recipe = recipe_of(*overrides)
    code = code_digests(recipe.model_dump(mode="json")) | dict.fromkeys(
        ["rollout.filters.function"] if overrides else ()
    )
    using = {
        "reward.verifier": verifier,
        "workflow.name": {"rollout", "evaluate"},
        "rollout.filters.function": {"rollout"},
    }
    for field in code:
        found = {stage.name for stage in stages(recipe) if f"code of {field}" in code_values(code, stage.fields)}
        assert found == using[field]
    before, edited = dict.fromkeys(code, "1"), {field: dict.fromkeys(code, "1") | {field: "2"} for field in code}
    groups = {field for field in code if made_with(recipe, "p", edited[field]) != made_with(recipe, "p", before)}
    assert groups == (set(FIELDS) if overrides else {"workflow.name"}), "without filters the reward decides nothing"
    verdicts = {field for field in code if judged_with(recipe, edited[field]) != judged_with(recipe, before)}
    assert verdicts == {"reward.verifier"}


def test_without_users_code_the_keys_are_those_of_before() -> None:
    recipe = load_recipe("quickstart", ["rollout.filters.equal_rewards=true"])
    assert code_digests(recipe.model_dump(mode="json")) == {}


def test_a_replay_has_another_name_after_an_edit_of_what_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name derives from the command, so that the same command resumes it; it judges with one code alone."""
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[Origin, set[str]] = {}
    for text in ("x = 1", "x = 22"):
        (tmp_path / "mine.py").write_text(text)
        for start, keeps in (("verify", True), ("train", True), ("train", False)):
            origin = Origin("r", 0, "replay", keeps, start)
            names.setdefault(origin, set()).add(replay_name(origin, [], recipe_of()))
    assert [len(found) for found in names.values()] == [2, 1, 2]
    assert replay_name(origin, [], load_recipe("quickstart")) == replay_name(origin, [], load_recipe("quickstart"))


# ── processes that start while a run goes on ────────────────────────────────────────────────────────────────────────


def test_a_new_verifier_process_refuses_code_that_was_edited_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "edited_judge.py"
    code.write_text("def judge(prompt, completion, answer): return 1")
    monkeypatch.syspath_prepend(tmp_path)
    settings, row = Reward(verifier="edited_judge:judge", workers=1), Row("", "", "")
    digests = code_digests({"reward": {"verifier": settings.verifier}})
    with VerifierPool(settings, digests) as pool:
        code.write_text("def judge(prompt, completion, answer): return 22")
        assert pool.verify([row])[0].reward == 1, "the processes that run have the code of the start"
        assert pool._server is not None
        pool._end(pool._server)
        with pytest.raises(
            UserError, match=r"reward\.verifier: the code of a new verifier process \(\w+\) is not what"
        ):
            pool.verify([row])


def test_a_rollout_worker_refuses_other_code_than_its_flow_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Edited before the worker was started again, or another copy on its machine. Verifiers check their own code."""
    (tmp_path / "mine.py").write_text("class Flow:\n    async def run(self, prompt, context): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    recipe = recipe_of().model_dump(mode="json")
    worker = Worker(cast(ServiceSpec, SimpleNamespace(store_url=tmp_path.as_uri(), recipe=recipe)))
    code, rest = code_digests(recipe), {"recipe": recipe, "evaluates": False, "folder": str(tmp_path)}
    refused = r"workflow\.name: the code of the rollout worker on .* is not what this start"
    with pytest.raises(UserError, match=refused):
        asyncio.run(worker.begin(Begin.model_construct(code=code | {"workflow.name": "another"}, **rest)))
    with pytest.raises(AttributeError, match="prompts"):  # which come next
        asyncio.run(worker.begin(Begin.model_construct(code=code | {"reward.verifier": "another"}, **rest)))
    monkeypatch.delitem(sys.modules, "mine")


def test_code_in_a_linked_folder_counts_once_and_loops_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's import follows such links."""
    monkeypatch.syspath_prepend(tmp_path)
    (shared := tmp_path / "shared").mkdir()
    (package := tmp_path / "linked_package").mkdir()
    (package / "__init__.py").touch()
    (package / "common").symlink_to(shared)
    (shared / "back").symlink_to(package)
    (shared / "score.py").write_text("GOOD = 1\n")
    before = digest("linked_package")
    (shared / "score.py").write_text("GOOD = 2\n")
    assert digest("linked_package") != before
