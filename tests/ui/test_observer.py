"""What the observer makes of a real run, against a Prefect client that remembers, or that fails."""

from __future__ import annotations

import json
import logging
import math
import re
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from markdown_it import MarkdownIt
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.settings import PREFECT_API_URL, temporary_settings
from stage_driver import store_in, tiny
from waiting import LIMIT

from areal_tasks.engines.session import Engines
from areal_tasks.stages.build import Built, PrefectIds
from areal_tasks.stages.jobs import Job
from areal_tasks.stages.loop import Loop
from areal_tasks.store.opening import open_run
from areal_tasks.store.query import run_sql
from areal_tasks.store.runs import Run
from flows import artifacts, observe
from flows.artifacts import Artifacts
from flows.observe import Observer

UI = "http://prefect.test"
LOG = logging.getLogger("test_observer")


@dataclass
class Client:
    """Takes the place of Prefect's client. `broken`: raises as one does whose server is gone."""

    broken: bool = False
    made: list[ArtifactCreate] = field(default_factory=list)
    progress: list[Any] = field(default_factory=list)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def create_artifact(self, wanted: ArtifactCreate) -> Any:
        self._check()
        self.made.append(wanted)
        return _Made(uuid.UUID(int=len(self.made)))

    def update_artifact(self, _artifact: uuid.UUID, wanted: ArtifactUpdate) -> None:
        self._check()
        self.progress.append(wanted.data)

    def _check(self) -> None:
        if self.broken:
            raise httpx.ConnectError("All connection attempts failed")

    def with_key(self, key: str) -> list[ArtifactCreate]:
        return [one for one in self.made if one.key == key]


@dataclass(frozen=True)
class _Made:
    id: uuid.UUID


@dataclass
class Watched:
    """A run that was observed: its task runs by label, what was made of it, and the events it emitted."""

    run: Run
    client: Client
    tasks: dict[str, str]
    emitted: list[tuple[str, dict[str, str], dict[str, Any]]]
    observer: Observer


def watched(folder: Path, patch: pytest.MonkeyPatch, broken: bool, **changes: dict[str, Any]) -> Watched:
    client, tasks, emitted = Client(broken), dict[str, str](), list[tuple[str, dict[str, str], dict[str, Any]]]()
    patch.setattr(artifacts, "_new_client", lambda: client)
    patch.setattr(observe, "get_run_logger", lambda: LOG)
    patch.setattr(observe, "emit_event", lambda name, about, payload: emitted.append((name, about, payload)))

    def execute(jobs: Sequence[Job]) -> list[Built]:
        tasks.update({job.label: str(uuid.uuid4()) for job in jobs})
        return [job.run(PrefectIds("", tasks[job.label])) for job in jobs]

    recipe = tiny(**changes)
    run = open_run(store_in(folder), "r", recipe)
    with (
        temporary_settings({PREFECT_API_URL: f"{UI}/api"}),
        Observer(run, recipe) as observer,
        Engines(run, recipe, folder / "logs") as engines,
    ):
        Loop(run, recipe, engines, execute, observer)()
    return Watched(run, client, tasks, emitted, observer)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observe, "ADVANCED_SECONDS", math.inf)
        return watched(tmp_path_factory.mktemp("seen"), patch, False, schedule={"iterations": 3, "artifact_every": 2})


def table_of(page: str) -> list[list[str]]:
    """The cells of a page's only table, links as `text -> address`."""
    tokens = MarkdownIt("commonmark").enable("table").parse(page)
    rows: list[list[str]] = []
    for i, token in enumerate(tokens):
        if token.type == "tr_open":
            rows.append([])
        if token.type in ("td_open", "th_open"):
            parts = tokens[i + 1].children or []
            links = [str(part.attrs["href"]) for part in parts if part.type == "link_open"]
            text = "".join(part.content for part in parts)
            rows[-1].append(f"{text} -> {links[0]}" if links else text)
    return rows


def test_the_page_of_an_iteration_lists_its_stages_with_task_runs_and_manifests(seen: Watched) -> None:
    pages = seen.client.with_key("r-iteration")
    assert [str(page.description).split(":")[0] for page in pages] == ["Iteration 0 of r", "Iteration 2 of r"]
    head, *rows = table_of(str(pages[-1].data))
    assert head == ["task run", "state", "manifest", "rows", "seconds", "numbers"]
    listed = {row[0]: row for row in rows}
    expected = {label: f"{label} -> {UI}/runs/task-run/{task}" for label, task in seen.tasks.items()}
    own = {"rollout 2", "verify 2", "reference 2", "advantage 2", "train 2", "publish 2", "evaluate version 2"}
    for label in own:
        row = listed[expected[label]]
        assert row[1] == "Committed" and row[2].startswith(f"manifest -> {UI}/artifacts/artifact/")
    for label in ("initialise", "prompts"):
        assert listed[expected[label]][1:3] == ["Reused", ""]
    assert listed["scalars 2"][1:4] == ["Committed", "", "16"]
    assert "reward" in listed[expected["verify 2"]][5]


def test_a_task_run_leads_to_its_manifest(seen: Watched) -> None:
    manifests = {str(one.task_run_id): str(one.data) for one in seen.client.made if one.task_run_id is not None}
    labels = [label for label in seen.tasks if not label.endswith(" 1")]
    assert set(manifests) == {seen.tasks[label] for label in labels}, "one for each task run of iterations 0 and 2"
    page = manifests[seen.tasks["train 2"]]
    commit = seen.run.commit(2)
    ref = next(ref for ref in commit.stages if ref.stage == "train")
    stored = seen.run.read_stage(ref)
    body = page.split("## Manifest\n\n")[1]
    assert json.loads(body) == json.loads(stored.model_dump_json())
    for shard in stored.tables["train_steps"].shards:
        assert seen.run.store.uri(shard.path) in page


def test_the_queries_on_the_pages_can_be_run(seen: Watched) -> None:
    pages = [str(one.data) for one in seen.client.made if one.task_run_id is not None or one.key == "r-iteration"]
    queries = {found for page in pages for found in re.findall(r'arealflow sql r "([^"]+)"', page)}
    assert len(queries) > 10
    for query in queries:
        rows = run_sql(seen.run.store, "r", query)
        assert len(rows) > 0, query


def test_the_address_of_the_store_stands_before_the_commands(seen: Watched) -> None:
    page = str(seen.client.with_key("r-iteration")[0].data)
    assert f"    export AREALFLOW_STORE={seen.run.store.url}\n    arealflow report r\n" in page


def test_progress_and_rollouts(seen: Watched) -> None:
    [started] = seen.client.with_key("r-progress")
    assert started.type == "progress" and started.data == pytest.approx(100 / 3)
    assert seen.client.progress == [100.0]
    assert len(json.loads(str(seen.client.with_key("r-rollout-table")[-1].data))) == 12
    assert str(seen.client.with_key("r-rollout-page")[-1].data).startswith("# Rollouts of iteration 2")


def test_every_iteration_is_an_event_with_its_metrics(seen: Watched) -> None:
    names = [name for name, _, _ in seen.emitted]
    assert names == ["arealflow.run.started", *["arealflow.iteration.committed"] * 3, "arealflow.run.ended"]
    _, about, payload = seen.emitted[-2]
    assert about["prefect.resource.id"].startswith("prefect.flow-run.") and about["arealflow.run"] == "r"
    assert (payload["run"], payload["iteration"], payload["of"]) == ("r", 2, 3)
    assert {"verify", "train", "rollout"} <= payload["metrics"].keys()
    assert (
        payload["metrics"]["verify"]["reward"]
        == seen.run.read_stage(next(ref for ref in seen.run.commit(2).stages if ref.stage == "verify")).metrics[
            "reward"
        ]
    )
    json.dumps(payload, allow_nan=False)


def test_iterations_that_follow_at_once_are_one_sign_of_life(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(observe, "ADVANCED_SECONDS", 0.0)
    found = watched(tmp_path, monkeypatch, False, schedule={"iterations": 2})
    assert [name for name, _, _ in found.emitted].count("arealflow.run.advanced") == 2, "the others above: none so soon"


def test_alerts_are_logged_and_emitted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = watched(tmp_path, monkeypatch, False, schedule={"iterations": 2}, alerts={"max_logprob_gap": 1e-12})
    [(name, about, payload)] = [one for one in found.emitted if one[0].startswith("arealflow.alert.")]
    assert name == "arealflow.alert.engines-disagree" and about["arealflow.run"] == "r"
    assert payload["iteration"] == 0 and payload["value"] > payload["threshold"] == 1e-12
    assert caplog.text.count(f"engines-disagree: {payload['message']}") == 1


# ── a server that is gone, or slow ──────────────────────────────────────────────────────────────────────────────────


def test_a_run_needs_no_artifacts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = watched(tmp_path, monkeypatch, True, schedule={"iterations": 3, "artifact_every": 1})
    head = found.run.head()
    assert head is not None and head.iteration == 2
    assert found.observer.artifacts.lost == 3 and not found.client.made
    assert caplog.text.count("could not be created (ConnectError: All connection attempts failed)") == 1
    assert "artifacts of 3 iterations are missing or incomplete; the run is not" in caplog.text


def test_a_server_that_comes_back_gets_the_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(broken=True)
    monkeypatch.setattr(artifacts, "_new_client", lambda: client)
    found = Artifacts(LOG)

    def repair() -> None:
        client.broken = False

    one = partial(_one, found)
    for make in (one, repair, one):
        found.offer("it", make)
    found.close()
    assert found.lost == 1 and len(client.made) == 1


def test_a_slow_server_makes_nobody_wait(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(artifacts, "_new_client", Client)
    release = threading.Event()
    found = Artifacts(LOG)
    found.offer("the slow one", lambda: release.wait(LIMIT))
    for k in range(artifacts.WAITING + 3):
        found.offer(f"iteration {k}", partial(_one, found))
    assert found.lost >= 2
    found.close(0.1)
    release.set()
    assert found.lost >= artifacts.WAITING, "what still waited at the end is counted too"
    assert "the Prefect server is too slow" in caplog.text


def _one(found: Artifacts) -> None:
    found.create("markdown", "text")
