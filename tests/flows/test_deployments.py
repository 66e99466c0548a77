"""What `arealflow up` deploys, and the form that the Prefect UI makes of a flow's parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from prefect import Flow
from prefect.utilities.callables import parameter_schema
from prefect_api import ask
from servers import ROOT, Up

from areal_tasks.launchers.cluster import Resources
from areal_tasks.launchers.placement import service_needs
from areal_tasks.stages.graphs import iteration_plan
from flows.cli import automations
from flows.cli.processes import POOL
from flows.evaluate import evaluate
from flows.rlhf import rlhf
from flows.sft import sft
from schemas.recipe.load import RECIPES, load_recipe, parse_recipe


@pytest.fixture(scope="module")
def deployments(up: Up) -> list[dict[str, Any]]:
    """What the server holds after `arealflow up`."""
    found: list[dict[str, Any]] = up.post("deployments/filter")
    return found


def test_everything_in_prefect_yaml_is_deployed(deployments: list[dict[str, Any]]) -> None:
    wanted = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    entrypoints = [(d["entrypoint"], d["name"]) for d in deployments]
    assert sorted(entrypoints) == sorted((d["entrypoint"], d["name"]) for d in wanted)
    assert {d["work_pool_name"] for d in deployments} == {POOL}


def test_every_deployment_has_a_recipe_that_its_flow_accepts(deployments: list[dict[str, Any]]) -> None:
    for deployment in (d for d in deployments if d["entrypoint"] != "flows.replay.replay"):
        recipe = parse_recipe(deployment["parameters"]["recipe"])
        assert deployment["entrypoint"] == f"flows.{recipe.flow}.{recipe.flow}"
        assert deployment["enforce_parameter_schema"]


@pytest.mark.parametrize("cluster", ["ray", "slurm"])
def test_those_for_clusters_differ_in_where_services_run_and_share_no_gpus(
    deployments: list[dict[str, Any]], cluster: str
) -> None:
    [one] = [d for d in deployments if d["name"] == f"gsm8k-{cluster}"]
    recipe = parse_recipe(one["parameters"]["recipe"])
    assert recipe.launcher.type == cluster
    values, plain = recipe.model_dump(), load_recipe("gsm8k").model_dump()
    assert {name for name in plain if values[name] != plain[name]} == {"launcher", "inference"}
    assert values["inference"] == plain["inference"] | {"memory_fraction": 0}
    needs = service_needs(recipe, external=False)
    assert {needs[name] for name in ("trainer", "inference-0")} == {Resources(4, 1, 0)}
    assert iteration_plan(recipe, 0).stages


def test_every_deployment_runs_in_this_folder(deployments: list[dict[str, Any]]) -> None:
    for deployment in deployments:
        [step] = deployment["pull_steps"]
        assert [options["directory"] for options in step.values()] == [str(ROOT)]


@pytest.fixture
def logged_in(up: Up) -> Iterator[None]:
    with up.logged_in():
        yield


@pytest.mark.usefixtures("logged_in")
def test_the_server_refuses_a_run_whose_parameters_do_not_fit(up: Up, deployments: list[dict[str, Any]]) -> None:
    [one] = [d for d in deployments if d["entrypoint"] == "flows.rlhf.rlhf" and d["name"] == "quickstart"]
    recipe = {**one["parameters"]["recipe"], "rollout": {"groups": "many"}}
    body = {"parameters": {"recipe": recipe}}
    answer = ask("POST", f"{up.api}/deployments/{one['id']}/create_flow_run", body)
    assert answer.is_client_error and "many" in answer.text


@pytest.mark.usefixtures("logged_in")
@pytest.mark.parametrize(("gpus", "limit"), [("0,1", 1), ("", None)])
def test_with_gpus_the_pool_runs_one_flow_run_at_a_time(
    up: Up, monkeypatch: pytest.MonkeyPatch, gpus: str, limit: int | None
) -> None:
    pool = f"{up.api}/work_pools/of-{limit}"
    monkeypatch.setattr(automations, "POOL", f"of-{limit}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    automations.install(up.api)
    assert ask("GET", pool).json()["concurrency_limit"] == limit
    ask("PATCH", pool, {"concurrency_limit": 3}).raise_for_status()
    automations.install(up.api)
    assert ask("GET", pool).json()["concurrency_limit"] == 3


def test_a_replay_needs_no_recipe_and_describes_what_it_needs(deployments: list[dict[str, Any]]) -> None:
    [one] = [d for d in deployments if d["entrypoint"] == "flows.replay.replay"]
    properties = one["parameter_openapi_schema"]["properties"]
    assert one["parameters"] == {} and one["parameter_openapi_schema"]["required"] == ["original", "start"]
    assert all(shown.get("description") for shown in properties.values())
    assert properties["start"]["enum"] == ["verify", "advantage", "train"]


@pytest.mark.parametrize("run", [rlhf, sft, evaluate])
def test_the_form_has_every_section_and_describes_every_field(run: Flow[..., Any]) -> None:
    flow, schema = run.name, parameter_schema(run)
    forks = ["fork"] if flow in ("rlhf", "sft") else []
    assert list(schema.properties) == ["recipe", "run", "overrides", *forks]
    assert all(p.get("description") for p in schema.properties.values())
    model = RECIPES[flow]
    recipe = schema.definitions[model.__name__]["properties"]
    assert set(recipe) == set(model.model_fields)
    for name, definition in schema.definitions.items():
        for key, shown in definition.get("properties", {}).items():
            about = schema.definitions[shown["$ref"].split("/")[-1]] if "$ref" in shown else shown
            assert about.get("description"), f"{name}.{key} has no description in the form"
