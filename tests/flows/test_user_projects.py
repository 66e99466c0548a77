"""A user's own folder: `arealflow init`, a run, and a deployment of an arealflow that pip has installed."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal_tasks.store.backend import open_store
from areal_tasks.store.query import run_sql
from areal_tasks.store.runs import load_run
from arealflow.packages import INSTALLED, PACKAGES
from flows.cli import main, processes, projects
from flows.cli.automations import ask, install
from flows.cli.projects import FILES, deploy_all, deployment_names, filled, print_commands, project, recipe_name
from flows.deploy import enter
from schemas.errors import UserError
from schemas.recipe.load import load_recipe, parse_recipe

SHORT = ("schedule.iterations=2", "rollout.groups=4", "evaluation={}", "launcher.type=inline", "inference.slots=16")


def readme(command: str) -> list[str]:
    """The words of a command of README.md's section about a user's own recipes, without its name."""
    section = (INSTALLED / "README.md").read_text().split("## Your own recipe", 1)[1]
    [line] = [line for line in section.splitlines() if line.startswith(f"arealflow {command} ")]
    return shlex.split(line, comments=True)[1:]


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["arealflow", *words])
    monkeypatch.setattr(sys, "path", list(sys.path))
    main.app(standalone_mode=False)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, in which a user works: it is no checkout of arealflow."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("AREALFLOW_STORE", str(tmp_path / "store"))
    return folder


def make_namesakes(folder: Path) -> None:
    """Prefect's usual layout: packages with names that arealflow's have too, one of them without `__init__.py`."""
    for name in ("flows", "schemas", "deployments"):
        (folder / name).mkdir()
        if name != "schemas":
            (folder / name / "__init__.py").write_text("raise ImportError('this is the package of the user')")


def judged(store: Path, run: str) -> list[dict[str, Any]]:
    query = "SELECT DISTINCT verifier, verdict, completion = answer AS same FROM samples"
    return run_sql(open_store(str(store)), run, query).to_pylist()


# ── init ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_init_writes_runs_as_it_is(
    api: str, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_namesakes(work)
    call(monkeypatch, *readme("init"))
    told = capsys.readouterr().out
    assert f"arealflow {shlex.join(readme('run'))}\n" in told and f"arealflow {shlex.join(readme('up'))} " in told
    assert "prefect deployment run" not in told, "it would need the server's address, which `up` prints"
    assert sorted(path.name for path in (work / "my-project").iterdir()) == sorted(FILES)
    assert f"arealflow {shlex.join(readme('run'))}" in (work / "my-project" / "recipe.yaml").read_text()
    call(monkeypatch, *readme("run"), "run=mine", *SHORT)
    run = load_run(open_store(str(tmp_path / "store")), "mine")
    assert run.record.flow == "rlhf" and run.head() is not None
    found = judged(tmp_path / "store", "mine")
    assert {row["verifier"] for row in found} == {"my_reward:score"}
    assert all((row["verdict"] == "correct") == row["same"] for row in found)


def test_the_recipe_is_checked_and_every_value_in_it_is_a_fields(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call(monkeypatch, "init", ".")
    recipe = load_recipe(work / "recipe.yaml")
    assert recipe.name == "work" and recipe.flow == "rlhf"
    for split in ("train", "test"):
        rows = [json.loads(line) for line in (work / f"{split}.jsonl").read_text().splitlines()]
        assert all(row["question"] == f"{row['answer']}=" for row in rows) and len(rows) >= 20


def test_nothing_is_overwritten(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (work / "my_reward.py").write_text("mine")
    with pytest.raises(UserError, match=r"already has my_reward\.py"):
        call(monkeypatch, "init", ".")
    assert [path.name for path in work.iterdir()] == ["my_reward.py"]
    with pytest.raises(UserError, match="cannot be written"):
        call(monkeypatch, "init", "my_reward.py/folder")


@pytest.mark.parametrize("name", ["Plain", "Ünï code", "a'b\"c", "{x}: #", "-.-", "0", "1e3", "true"])
def test_any_folder_gives_a_recipe(name: str, tmp_path: Path) -> None:
    text = (INSTALLED / "flows/cli/template/recipe.yaml").read_text()
    recipe = parse_recipe(yaml.safe_load(filled(text, tmp_path / name)))
    assert recipe.data.source == "{split}.jsonl"
    assert recipe.name == recipe_name(tmp_path / name)


# ── deployments ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_deployment_is_named_after_its_flow_and_its_file(work: Path) -> None:
    shutil.copy(INSTALLED / "deployments" / "quickstart.yaml", work / "mine.yaml")
    assert deployment_names(["mine.yaml", "quickstart-sft"]) == ["rlhf/mine", "sft/quickstart-sft"]
    (work / "sub").mkdir()
    shutil.copy(work / "mine.yaml", work / "sub" / "mine.yaml")
    with pytest.raises(UserError, match=r"two of these recipes would be the deployment rlhf/mine"):
        deployment_names(["mine.yaml", "sub/mine.yaml"])


def test_a_recipe_that_is_none_is_refused_before_a_server_is_looked_for(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("AREALFLOW_HOME", str(work))
    for command in ("deploy", "up"):
        with pytest.raises(UserError, match=r"recipe file 'nosuch\.yaml' does not exist"):
            call(monkeypatch, command, "nosuch.yaml")
    with pytest.raises(UserError, match="no Prefect server runs here: start it with `arealflow up`"):
        call(monkeypatch, "deploy", "quickstart")
    assert list(work.iterdir()) == []


@dataclass(frozen=True)
class Installed:
    """An arealflow that pip has installed into a folder, in place of this checkout; and a user's folder."""

    environment: Mapping[str, str]
    folder: Path

    def __call__(self, *command: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=folder or self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done


@pytest.fixture(scope="module")
def installed(api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    source, site, work = (tmp_path_factory.mktemp(name) for name in ("source", "site", "work"))
    for name in ("arealflow", *PACKAGES):
        shutil.copytree(INSTALLED / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(INSTALLED / name, source / name)
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target"]
    subprocess.run([sys.executable, *pip, str(site), str(source)], check=True, capture_output=True)
    make_namesakes(work)
    own = {"PYTHONPATH": str(site), "AREALFLOW_HOME": str(work / "home"), "PREFECT_API_URL": api}
    kept = {name: value for name, value in os.environ.items() if name != "AREALFLOW_STORE"}
    install(api)
    yield Installed({**kept, **own}, work)


@pytest.mark.slow("pip installs the package, and a flow run takes 20 s of CPU")
def test_a_users_recipe_runs_by_deployment_where_pip_has_installed_arealflow(api: str, installed: Installed) -> None:
    where = installed("-P", "-c", "import flows; print(flows.__file__)").stdout.strip()
    assert where.startswith(installed.environment["PYTHONPATH"])
    installed("-P", "-m", "arealflow.command", *readme("init"))
    deployed = installed("-P", "-m", "arealflow.command", *readme("deploy"))
    assert "prefect deployment run rlhf/recipe" in deployed.stdout
    assert "note: flows/ and schemas/ and deployments/ in" in deployed.stderr
    deployment = ask("GET", f"{api}/deployments/name/rlhf/recipe").raise_for_status().json()
    assert deployment["entrypoint"] == "flows.rlhf.rlhf" and deployment["enforce_parameter_schema"]
    assert parse_recipe(deployment["parameters"]["recipe"]).name == "my-project"
    body = {"parameters": {"run": "mine", "overrides": " ".join((*SHORT, "store.url=runs"))}}
    flow_run = ask("POST", f"{api}/deployments/{deployment['id']}/create_flow_run", body).raise_for_status().json()
    as_worker = {**installed.environment, "PREFECT__FLOW_RUN_ID": flow_run["id"]}
    elsewhere = installed.folder / "elsewhere"
    elsewhere.mkdir()
    Installed(as_worker, elsewhere)("-m", "prefect.engine")
    state = ask("GET", f"{api}/flow_runs/{flow_run['id']}").json()["state"]
    assert state["type"] == "COMPLETED", state
    assert {row["verifier"] for row in judged(installed.folder / "runs", "mine")} == {"my_reward:score"}


def test_a_deployment_runs_in_the_folder_it_was_deployed_in(work: Path) -> None:
    shutil.copy(INSTALLED / "deployments" / "quickstart.yaml", work / "mine.yaml")
    there = project(["mine.yaml", "sft-gsm8k"], ["rlhf/mine", "sft/sft-gsm8k"])["deployments"]
    assert [(one["name"], one["entrypoint"]) for one in there] == [
        ("mine", "flows.rlhf.rlhf"),
        ("sft-gsm8k", "flows.sft.sft"),
    ]
    assert all(one["pull"] == [{"flows.deploy.enter": {"directory": str(work), "modules": str(work)}}] for one in there)
    [step] = there[0]["build"]
    assert step["flows.deploy.read_recipe"]["name"] == str(work / "mine.yaml")


def test_the_commands_begin_with_the_one_that_gives_a_shell_our_servers_address_and_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home, url, ours = tmp_path / "it's mine", "http://here:1/api", ""
    monkeypatch.setenv("AREALFLOW_HOME", str(home))
    monkeypatch.setenv(processes.LOGIN, "")
    monkeypatch.setattr(projects, "running", lambda: ours)
    print_commands(["rlhf/mine"], url)
    assert capsys.readouterr().out.splitlines() == ["prefect deployment run rlhf/mine"], "a server that the user names"
    processes.make_login()
    login, ours = os.environ[processes.LOGIN], url
    print_commands(["rlhf/mine"], url)
    export, last = capsys.readouterr().out.splitlines()
    assert last == "prefect deployment run rlhf/mine" and login not in export
    values = subprocess.run(
        ["sh", "-c", f"cd /; {export}; printenv PREFECT_API_URL {processes.LOGIN}"], capture_output=True, text=True
    )
    assert values.stdout.splitlines() == [url, login], values.stderr


def test_the_commands_of_the_readme_are_in_an_order_that_works() -> None:
    section = (INSTALLED / "README.md").read_text().split("## Your own recipe", 1)[1].split("```")[1]
    words = [line.split()[0] for line in section.strip().splitlines()]
    assert words.index("export") < words.index("prefect") and "export PREFECT_API_URL=http://" in section


def test_up_says_where_there_is_nothing_to_deploy(api: str, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deploy_all([], api)
    assert "nothing is deployed: there is no prefect.yaml here" in capsys.readouterr().out


def test_a_folder_that_is_gone_is_named_with_the_remedy(work: Path) -> None:
    with pytest.raises(UserError, match=r"gone no longer exists: `arealflow deploy` the recipe again"):
        enter(str(work), str(work / "gone"))
