"""Alerts from end to end: the command, a real server and worker, runs that go wrong, and a webhook on this machine."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from servers import ROOT, Up
from stage_driver import tiny
from waiting import wait_until
from webhook import Webhook

from flows.cli.automations import BLOCK, WEBHOOK_VARIABLE, filled, install_alerts, remove_alerts, save_block
from schemas.errors import UserError
from schemas.recipe.load import parse_recipe

SAMPLES = 16
STALL_SECONDS = 3600.0  # until the run is killed
AUTOMATIONS = yaml.safe_load((ROOT / "deployments" / "automations" / "alerts.yaml").read_text())["automations"]
CAUSES = {
    "reward-collapse": "the mean reward of the last 1 iterations is 0; it was 0.92",
    "verifier-failures": "6% of the completions could not be verified",
    "kl-explosion": "nats per token (alerts.max_kl 1e-09)",
    "engines-disagree": "nats apart on average (alerts.max_logprob_gap 1e-09)",
}
NAMES = [automation["name"] for automation in AUTOMATIONS]


@pytest.fixture(scope="module")
def alerts(up: Up, webhook: Webhook) -> Webhook:
    """The alerts are on the server."""
    assert "where should alerts go?" in up.arealflow("alerts").stderr
    done = up.arealflow("alerts", "--stalled-minutes", "0.17", **{WEBHOOK_VARIABLE: webhook.url})
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in NAMES)
    assert "s3cr3t" not in done.stdout + done.stderr
    return webhook


def start(up: Up, run: str, recipe: dict[str, Any]) -> str:
    """A flow run of the worker."""
    deployment = up.fork_flows("rlhf/quickstart")
    made = up.post(f"deployments/{deployment}/create_flow_run", parameters={"recipe": recipe, "run": run})
    return str(made["id"])


def recipe_for(folder: Path, stall: float, **changes: dict[str, Any]) -> dict[str, Any]:
    """A small recipe whose verifier goes wrong and then takes `stall` seconds over a call."""
    calls = {"calls": str(folder / "calls"), "samples": SAMPLES, "stall": stall}
    judge = {"verifier": "alert_reward:scripted", "arguments": calls, "timeout_seconds": 3600.0, "workers": 1}
    strict = {"window": 1, "max_kl": 1e-9, "max_logprob_gap": 1e-9}
    values = tiny(schedule={"iterations": 3}, reward=judge, alerts=strict, **changes).model_dump(mode="json")
    return parse_recipe({**values, "evaluation": {}}).model_dump(mode="json")


@pytest.fixture(scope="module")
def wrong(up: Up, alerts: Webhook, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Webhook]:
    """A run goes wrong in every way, stalls, and is killed; another cannot begin."""
    recipe = recipe_for(tmp_path_factory.mktemp("wrong"), STALL_SECONDS)
    run = start(up, "wrong", recipe)
    start(up, "bad", {**recipe, "data": {**recipe["data"], "source": "/no/such/{split}.jsonl"}})
    for cause in CAUSES:
        wait_until(lambda cause=cause: alerts.of(f"arealflow-{cause}"), cause)  # type: ignore[misc]
    wait_until(lambda: stalls(alerts), "the stall")
    [process] = [p for p in psutil.process_iter(["environ", "cmdline"]) if is_flow(p, run)]
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: alerts.of("arealflow-crashed"), "the crash")
    wait_until(lambda: alerts.of("arealflow-failed"), "the failure")
    yield alerts
    up.post(f"flow_runs/{run}/set_state", state={"type": "CANCELLING"}, force=True)


def stalls(alerts: Webhook) -> list[dict[str, Any]]:
    """The stalls of the run `wrong`: on a busy machine the other run, which cannot begin, may seem to stall first."""
    return [body for body in alerts.of("arealflow-stalled") if body["run"] == "wrong"]


def is_flow(process: psutil.Process, flow_run: str) -> bool:
    """Whether it is the flow run's own process."""
    environ, command = process.info["environ"] or {}, process.info["cmdline"] or ()
    return environ.get("PREFECT__FLOW_RUN_ID") == flow_run and list(command[1:3]) == ["-m", "prefect.engine"]


@pytest.mark.parametrize(("alert", "said"), CAUSES.items())
def test_what_goes_wrong_in_a_run_is_posted(wrong: Webhook, alert: str, said: str) -> None:
    body = wrong.of(f"arealflow-{alert}")[0]
    assert said in body["message"] and body["text"].startswith("arealflow: wrong, iteration ")
    assert body["run"] == "wrong" and body["iteration"] in (0, 1)
    assert body["value"] != body["threshold"]
    assert (body["path"], body["type"]) == ("/s3cr3t-path", "application/json")


def test_a_stall_is_posted(wrong: Webhook) -> None:
    [body, *_] = stalls(wrong)
    assert "has committed no iteration since 20" in body["text"]


def test_a_crash_is_posted(up: Up, wrong: Webhook) -> None:
    body = wrong.of("arealflow-crashed")[0]
    assert body["run"] == "wrong" and "is Crashed" in body["text"]
    assert body["url"] == f"{up.url}/runs/flow-run/{body['flow_run']}"


def test_a_failure_is_posted_with_its_reason(wrong: Webhook) -> None:
    body = wrong.of("arealflow-failed")[0]
    assert body["run"] == "bad" and "there is no such file" in body["message"]


def test_the_address_is_in_the_block_and_nowhere_else(up: Up, alerts: Webhook) -> None:
    automations = up.post("automations/filter")
    assert {a["name"] for a in automations} >= set(NAMES)
    assert "s3cr3t" not in json.dumps(automations)
    assert "s3cr3t" not in json.dumps(up.get(f"block_types/slug/webhook/block_documents/name/{BLOCK}"))


def test_again_changes_nothing_but_what_is_asked_for(up: Up, wrong: Webhook) -> None:
    before = {a["name"]: a["id"] for a in up.post("automations/filter")}
    with up.logged_in():
        install_alerts(up.api, 45)
    after = {a["name"]: a for a in up.post("automations/filter")}
    assert {name: a["id"] for name, a in after.items()} == before
    assert after["arealflow-stalled"]["trigger"]["within"] == 45 * 60


def test_what_is_no_address_is_refused_and_not_shown() -> None:
    with pytest.raises(UserError, match="http:// or https://") as refused:
        save_block("http://127.0.0.1:1/api", "hooks.test/s3cr3t")
    assert "s3cr3t" not in str(refused.value)


def test_a_stall_of_seconds_is_refused() -> None:
    [stalled] = [automation for automation in AUTOMATIONS if automation["name"] == "arealflow-stalled"]
    with pytest.raises(UserError, match="no less than 10 seconds"):
        filled(stalled, "block", 0.1)


def test_they_can_be_taken_off(up: Up, wrong: Webhook) -> None:
    with up.logged_in():
        assert f"removed {len(NAMES)} alerts" in remove_alerts(up.api)
    assert not {a["name"] for a in up.post("automations/filter")} & set(NAMES)
