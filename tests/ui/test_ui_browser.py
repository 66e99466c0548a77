"""The Prefect UI in a real browser: the form of a deployment, and the way from a task run to its manifest."""

from __future__ import annotations

import json
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
from playwright.sync_api import Browser, Locator, Page, TimeoutError, expect
from servers import Up
from waiting import LIMIT, wait_until
from webhook import Webhook

WIDTH, HEIGHT = 1440, 1000
EDITED = {"Iterations": "1", "Steps": "2", "Batch Size": "8"}


@pytest.fixture(scope="module")
def page(browser: Browser, up: Up) -> Page:
    """A page of the UI, which asks for the password that `up` tells, once."""
    found = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT}).new_page()
    found.set_default_timeout(1000 * LIMIT)
    found.goto(up.url)
    found.get_by_placeholder("admin:pass").fill(up.login)
    found.get_by_role("button", name="Login").click()
    found.wait_for_url(lambda url: "login" not in url)
    return found


#: What a page tries: to read and to write as scripts do, to write as forms do, without asking first (with all that the
#: browser has kept for the server), and to follow what happens in flow runs.
ATTACK: Final = """async api => {
    const tried = {}
    const attempt = async (name, path, options) => {
        try { tried[name] = (await fetch(api + path, options)).status } catch { tried[name] = "blocked" }
    }
    const json = {method: "POST", headers: {"Content-Type": "application/json"}, body: "{}"}
    const form = body => ({method: "POST", credentials: "include", body: new Blob([body])})
    await attempt("read the keys", "/block_documents/filter", {...json, body: '{"include_secrets": true}'})
    await attempt("read variables", "/variables/filter", json)
    await attempt("read settings", "/admin/settings", {credentials: "include"})
    await attempt("write", "/variables/", {...json, body: '{"name": "attacked", "value": 1}'})
    await attempt("write as a form", "/variables/", form('{"name": "attacked", "value": 1}'))
    await attempt("write unseen", "/variables/", {...form('{"name": "attacked", "value": 1}'), mode: "no-cors"})
    tried.follow = await new Promise(done => {
        const socket = new WebSocket(api.replace("http", "ws") + "/events/out", "prefect")
        socket.onopen = () => socket.send('{"type": "auth", "token": null}')
        socket.onmessage = message => done(message.data)
        socket.onclose = () => done("closed")
    })
    return tried
}"""


def test_another_page_of_the_same_browser_can_do_nothing(up: Up, page: Page, webhook: Webhook) -> None:
    """One of another origin; then one whose host name has come to mean this machine, so that it is of the same one."""
    port = up.url.rpartition(":")[2]
    other = page.context.new_page()
    for address in (webhook.url, f"http://attacker.localhost:{port}/api/health"):
        other.goto(address)
        rebound = address.endswith("health")
        api = "/api" if rebound else up.api
        tried = other.evaluate(ATTACK.replace("api.replace", "new URL(api, location).href.replace"), api)
        unseen = {"write unseen": 401 if rebound else 0, "follow": "closed"}
        assert tried == dict.fromkeys(tried, 401 if rebound else "blocked") | unseen
    assert up.post("variables/filter") == []
    other.close()


def field(page: Page, label: str) -> Locator:
    """The input below a label of the form."""
    text = f"*[normalize-space(text())='{label} (Optional)']"
    return page.locator(
        f"xpath=(//{text}/ancestor::*[.//input or .//textarea][1]//*[self::input or self::textarea])[1]"
    )


def submitted(page: Page) -> bool:
    """Click once more: the form takes no click while it checks what was filled in."""
    page.get_by_role("button", name="Submit").click()
    with suppress(TimeoutError):
        page.wait_for_url(lambda url: not url.endswith("/run"), timeout=20_000)  # then it is clicked again
    return not page.url.endswith("/run")


@pytest.fixture(scope="module")
def flow_run(up: Up, page: Page) -> dict[str, Any]:
    """Filled in, submitted, and run to its end by the worker."""
    deployment = up.fork_flows("sft/quickstart")
    page.goto(f"{up.url}/deployments/deployment/{deployment}/run")
    expect(field(page, "Iterations"), "the form shows the recipe of the deployment").to_have_value("5")
    for label, value in EDITED.items():
        field(page, label).fill(value)
    field(page, "run").fill("formed")
    field(page, "overrides").fill("launcher.type=inline seed=7")
    wait_until(lambda: submitted(page), "the server to take the form")

    def ended() -> dict[str, Any] | None:
        runs = up.post("flow_runs/filter", deployments={"id": {"any_": [deployment]}})
        return next((run for run in runs if run["state_type"] in ("COMPLETED", "FAILED", "CRASHED")), None)

    found = wait_until(ended, "the run's end")
    assert found["state_type"] == "COMPLETED", found["state"]["message"]
    return found


def test_the_run_obeys_the_form(up: Up, flow_run: dict[str, Any]) -> None:
    segment = json.loads((up.store / "formed" / "segments" / "0.json").read_text())
    recipe = segment["recipe"]
    assert (recipe["schedule"]["iterations"], recipe["algorithm"]["steps"], recipe["algorithm"]["batch_size"]) == (
        1,
        2,
        8,
    )
    assert recipe["seed"] == 7, "overrides too"
    assert sorted(path.name for path in (up.store / "formed").glob("iteration=*")) == ["iteration=000000"]


def test_a_field_out_of_bounds_is_refused_in_the_form(up: Up, page: Page) -> None:
    deployment = up.get("deployments/name/sft/quickstart")["id"]
    page.goto(f"{up.url}/deployments/deployment/{deployment}/run")
    mine = {"deployments": {"id": {"any_": [deployment]}}}
    before = up.post("flow_runs/count", **mine)
    field(page, "Iterations").fill("0")
    message = page.get_by_text(re.compile("greater than or equal to 1|less than the minimum|[Ii]nvalid")).first

    def refused() -> bool:
        page.get_by_role("button", name="Submit").click()
        with suppress(TimeoutError):
            message.wait_for(timeout=20_000)  # then it is clicked again
        return message.is_visible()

    wait_until(refused, "the form to refuse it")
    assert up.post("flow_runs/count", **mine) == before


def test_a_task_run_leads_to_its_manifest(up: Up, flow_run: dict[str, Any], page: Page) -> None:
    page.goto(f"{up.url}/runs/flow-run/{flow_run['id']}")
    page.get_by_text("Artifacts", exact=True).last.click()
    page.get_by_text("formed-iteration", exact=True).first.click()
    with page.expect_popup() as opened:  # links in an artifact open in a tab of their own
        page.get_by_role("link", name="train 0").click()
    task = opened.value
    expect(task.get_by_text("Committed").first).to_be_visible()
    task.get_by_text("Artifacts", exact=True).last.click()
    task.get_by_text("Manifest of train 0").click()
    expect(task.get_by_role("heading", name="train 0 of run formed")).to_be_visible()
    assert json.loads(task.locator("pre").last.inner_text())["stage"] == "train"


def test_no_other_file_of_this_machine_holds_the_login_and_no_other_user_reads_it(
    up: Up, flow_run: dict[str, Any]
) -> None:
    home = Path(up.environment["AREALFLOW_HOME"])
    assert len(up.login) > 40
    assert [file for file in home.rglob("*") if file.is_file() and up.login.encode() in file.read_bytes()] == [
        file := home / "prefect" / "login"
    ]
    assert (stat.S_IMODE(file.stat().st_mode), stat.S_IMODE(file.parent.stat().st_mode)) == (0o600, 0o700)
    commands = [word for process in psutil.process_iter(["cmdline"]) for word in process.info["cmdline"] or []]
    assert commands and not [word for word in commands if up.login in word]


def test_states_tell_what_was_built(up: Up, flow_run: dict[str, Any], page: Page) -> None:
    page.goto(f"{up.url}/runs/flow-run/{flow_run['id']}")
    page.get_by_text("Task Runs", exact=True).last.click()
    for name in ("initialise", "prompts", "train 0", "publish 0"):
        expect(page.get_by_text(name, exact=True).first).to_be_visible()
    expect(page.get_by_text("Committed").first).to_be_visible()
