"""The flow `replay`: builds stages of a recorded run again with changed settings."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

from prefect import flow, get_run_logger
from prefect.runtime import flow_run

from areal_tasks.stages.preflight import check_code, check_engines
from areal_tasks.stages.replay import replay_segments
from areal_tasks.store.backend import open_store
from areal_tasks.store.fork import Origin, ReplayEnd, ReplayStart
from areal_tasks.store.history.diff_curves import Section, compare_replay
from areal_tasks.store.runs import load_run
from flows.artifacts import Artifacts
from flows.credentials import load_s3_keys
from flows.ending import Reporting
from flows.execute import begin_flow, execute, run_name, split_overrides
from flows.observe import artifact_key
from flows.pages import escape_markdown


@flow(name="replay", flow_run_name=run_name, validate_parameters=True)
def replay(
    original: str,
    start: ReplayStart,
    overrides: str = "",
    run: str = "",
    until: ReplayEnd = "",
    at: int = 0,
    on_policy: bool = False,
    store: str = "",
) -> dict[str, Any]:
    """Build the stages of a recorded run that a change affects again, keeping its rollouts (counterfactual).

    Args:
        original: Name of the run to replay.
        start: The first stage that is built again: verify, advantage or train.
        overrides: Fields to change, as `section.field=value` separated by blanks, such as `trainer.lr=1e-5`.
        run: Name of the run that holds the result; the same name again resumes it. Empty: original and a random name.
        until: The last stage that is built: verify or advantage, without training. Empty: all of them.
        at: The first iteration that is replayed; earlier ones are shared.
        on_policy: Generate again from the first iteration that the change affects.
        store: Folder or URL of the store. Empty: AREALFLOW_STORE, else the default folder.
    """
    with Reporting() as report:
        begin_flow()
        load_s3_keys(store)
        loaded, name = load_run(open_store(store), original), run or flow_run.get_name() or f"{original}-replay"
        origin = Origin(original, at, "replay", not on_policy, start, until)
        segments = replay_segments(loaded, origin, name, split_overrides(overrides))
        recipe = segments[-1][1]
        check_engines(recipe)
        check_code(recipe)
        result = execute(recipe, name, origin, segments)
        comparison = compare_replay(loaded.store, name)
        show(name, origin, comparison)
        return report(result | {"comparison": [asdict(section) for section in comparison]})


def show(name: str, origin: Origin, comparison: list[Section]) -> None:
    page = "\n\n".join([f"# {escape_markdown(f'{name} is {origin}')}", *map(markdown_table, comparison)])
    artifacts, key, about = Artifacts(get_run_logger()), artifact_key(name, "comparison"), f"{name} and {origin.parent}"
    artifacts.offer("the comparison", partial(artifacts.create, "markdown", page, key, about))
    artifacts.close()


def markdown_table(section: Section) -> str:
    """A section of a comparison as markdown."""
    columns = list(section.rows[0]) if section.rows else ["(no rows)"]
    lines = [columns, ["---"] * len(columns), *([_cell(value) for value in row.values()] for row in section.rows)]
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"## {escape_markdown(section.title)}\n\n{rows}"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else escape_markdown(str(value))
