"""What pages say of `arealflow up`: one is started, its deployments run, and it ends, all by commands of the pages.

The tests are in the order of their execution. Flow runs are made short, of random weights, with services that are
threads. Not executed: deployments that need a GPU, a cluster or files of the reader's.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest
import yaml
from s3_server import BUCKET, S3Server
from servers import TESTS, Up
from stage_driver import drive, store_in
from test_documentation import ROOT
from test_pages_run import SHORT, everywhere, invoke, write_files
from waiting import LIMIT

from areal_tasks.engines.ports import probe_port
from areal_tasks.store.backend import Store, open_store
from areal_tasks.store.query import run_sql
from areal_tasks.store.runs import load_run, run_names
from flows.cli import machine, processes
from schemas.recipe.load import load_recipe
from schemas.recipe.recipe import Recipe
from schemas.recipe.recorded import value_at

pytestmark = pytest.mark.slow("a Prefect server, worker and keeper of its own, several deployments and flow runs")

STARTS: Final = ("up", "deploy")
ENDS: Final = ("alerts", "s3-keys", "down")
ITERATIONS: Final = 2
SHORTER: Final = f"schedule.iterations={ITERATIONS}"
#: Deployments that run on a CPU without a download, and what makes their runs short.
OURS: Final = {
    "rlhf/quickstart": (*SHORT, SHORTER),
    "rlhf/recipe": ("rollout.groups=4", "evaluation={}", "launcher.type=inline", "inference.slots=16", SHORTER),
    "replay/run": (),
}
#: The run that is forked and replayed, and its iteration in place of the page's.
ORIGINAL: Final = "qs"
FORKED: Final = f"{ORIGINAL}@{ITERATIONS - 1}"
S3_STORE: Final = f"s3://{BUCKET}/pages"


def serves(words: Sequence[str]) -> bool:
    """Whether this command starts, uses or ends what `arealflow up` starts."""
    return words[:1] == ["arealflow"] and words[1] in (*STARTS, *ENDS) and words != ["arealflow", "deploy"]


def deploys(words: Sequence[str]) -> bool:
    return words[:3] == ["prefect", "deployment", "run"] and words[3] in OURS


def served(*names: str) -> list[tuple[str, ...]]:
    """The arguments of the commands of these names, in their order; `--remove` comes last of a command's."""
    found = [words for words in everywhere(serves) if words[0] in names]
    return sorted(found, key=lambda words: (names.index(words[0]), "--remove" in words, words))


def parameters(words: Sequence[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for option, word in pairwise(words) if option == "--param")


def shortened(words: Sequence[str]) -> list[str]:
    """The command with names and a place that exist here, overrides that make its run short, and `--watch`."""
    asked = {name: value.replace("s3://bucket/prefix", S3_STORE) for name, value in parameters(words).items()}
    asked = {name: re.sub(f"^{ORIGINAL}@.*", FORKED, value) for name, value in asked.items()}
    overrides = " ".join([asked.pop("overrides", ""), *OURS[words[2]]])
    given = [f"--param={name}={value}" for name, value in {**asked, "overrides": overrides}.items()]
    return ["deployment", "run", words[2], "--watch", *given]


@pytest.fixture(scope="module")
def folder(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The reader's current folder, while `arealflow up` runs with it and with the keys of a real S3 server."""
    place = tmp_path_factory.mktemp("deployed")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.delenv("PREFECT_API_URL", raising=False)
        patch.setenv(processes.LOGIN, "")
        patch.setenv("AREALFLOW_HOME", str(place / "home"))
        patch.setenv("AREALFLOW_STORE", store_in(place).url)
        patch.setenv("AREALFLOW_ALERT_WEBHOOK", "http://127.0.0.1:1/alerts")
        patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{TESTS}")
        patch.setattr(processes, "START_SECONDS", LIMIT)
        write_files(ROOT / "README.md", place)
        write_project_file(place)
        recipe = load_recipe("quickstart", OURS["rlhf/quickstart"])
        assert isinstance(recipe, Recipe)
        drive(place, ORIGINAL, recipe)
        invoke(["init", "my-project"])
        try:
            for words in served(*STARTS):
                invoke([*words, *(["--port", str(probe_port())] if words[0] == "up" else [])])
            yield place
        finally:
            machine._end_all()


def write_project_file(place: Path) -> None:
    """The deployments of prefect.yaml that are run here; tests/flows/test_deployments.py deploys all of them."""
    values = yaml.safe_load((ROOT / "prefect.yaml").read_text())
    names = {f"{one['entrypoint'].split('.')[-1]}/{one['name']}": one for one in values["deployments"]}
    ours = [one for name, one in names.items() if name in OURS]
    (place / "prefect.yaml").write_text(yaml.safe_dump({**values, "deployments": ours}))


def flow_run(words: Sequence[str]) -> None:
    """Run a deployment by Prefect's command; its flow run is completed, which `--watch` waits for and says."""
    api = processes.running()
    Up(api.removesuffix("/api"), {"AREALFLOW_HOME": os.environ["AREALFLOW_HOME"]}).fork_flows(words[2])
    command = [str(Path(sys.executable).with_name("prefect")), *words]
    done = subprocess.run(command, env={**os.environ, "PREFECT_API_URL": api}, capture_output=True, text=True)
    assert done.returncode == 0 and "Completed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("words", everywhere(deploys), ids=" ".join)
def test_a_deployment_makes_the_run_that_the_page_says(words: tuple[str, ...], folder: Path) -> None:
    flow_run(shortened(words))
    asked = parameters(words)
    overrides = [one for one in asked.get("overrides", "").split() if "iterations" not in one]
    place = open_store(S3_STORE) if overrides == ["store.url=s3://bucket/prefix"] else store_in(folder)
    run = load_run(place, asked.get("run") or unnamed(words[2], place))
    assert run.committed == ITERATIONS
    assert (run.record.parent, run.record.kind, run.first) == derivation(asked)
    if place.url != S3_STORE:
        expected = load_recipe("quickstart", overrides).model_dump(mode="json")
        fields = [one.partition("=")[0] for one in overrides]
        recipe = run.recipe_at(ITERATIONS - 1)
        assert [value_at(recipe, field) for field in fields] == [value_at(expected, field) for field in fields]
    if words[2] == "rlhf/recipe":
        found = run_sql(place, run.name, "SELECT DISTINCT verifier FROM samples").to_pylist()
        assert found == [{"verifier": "my_reward:score"}]


def unnamed(deployment: str, place: Store) -> str:
    """The only run there whose name is that of a recipe or run, and of the flow run."""
    begin = {"rlhf/recipe": "my-project-", "rlhf/quickstart": "quickstart-", "replay/run": f"{ORIGINAL}-"}[deployment]
    [name] = [name for name in run_names(place) if name.startswith(begin)]
    return name


def derivation(asked: Mapping[str, str]) -> tuple[str, str, int]:
    """Parent, kind and first iteration of the run."""
    if "fork" in asked:
        return ORIGINAL, "fork", ITERATIONS - 1
    return (ORIGINAL, "replay", 0) if "original" in asked else ("", "", 0)


def test_the_demo_runs_and_its_questions_are_answered(folder: Path) -> None:
    short = [one for one in OURS["rlhf/quickstart"] if not one.startswith("evaluation")]
    command = ["bash", str(ROOT / "deployments" / "demo.sh"), *short, "evaluation.limit=8"]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [name] = re.findall(r"^run (quickstart-\S+): ", done.stdout, re.MULTILINE)
    assert load_run(store_in(folder), name).committed == ITERATIONS
    assert done.stdout.count("\narealflow sql ") == 5
    assert re.search(r"^│ train +│ \d", done.stdout, re.MULTILINE), "the answer to the last question"


def test_what_pages_say_of_the_server_and_its_end(folder: Path) -> None:
    for words in served(*ENDS):
        invoke(words)
    assert not processes.parts("server", "worker", "keeper"), "the last command is `down`"
