"""Prompts that `data.on_long_prompt: drop` leaves out are counted wherever a run is looked at."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from stage_driver import drive, store_in, tiny

from areal_tasks.report.page import make_report
from areal_tasks.stages.build import Built
from areal_tasks.stages.jobs import IterationResult, Job, run_directly
from areal_tasks.stages.prompts import dropped_eval_prompts
from areal_tasks.store.query import Session
from flows.observe import summary_line
from flows.pages import metrics_text

SHORT = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(3) for b in range(3)]
LONG = {"question": "1+1+1+1+1+1=", "answer": "6"}
DROPPED = {"train": 2, "test": 3}
QUESTION = re.compile(r"\*\*How many prompts were left out.*?```sql\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Seen:
    """A run of one iteration over data with long prompts: what it logged and what its stages say."""

    folder: Path
    log: str
    built: dict[str, Built]

    def metrics(self, label: str) -> dict[str, float]:
        return self.built[label].manifest.metrics


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder, built = tmp_path_factory.mktemp("dropped"), dict[str, Built]()
    for split, count in DROPPED.items():
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, [*SHORT, *[LONG] * count])))

    def execute(jobs: Sequence[Job]) -> list[Built]:
        made = run_directly(jobs)
        built.update(zip([job.label for job in jobs], made, strict=True))
        return made

    data = {"source": str(folder / "{split}.jsonl"), "on_long_prompt": "drop"}
    recipe = tiny(data=data, evaluation={"every": 1, "limit": 0}, schedule={"iterations": 1})
    lines = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("areal_tasks").addHandler(handler)
    try:
        drive(folder, "dropped", recipe, execute)
    finally:
        logging.getLogger("areal_tasks").removeHandler(handler)
    return Seen(folder, "\n".join(lines), built)


def test_the_stage_counts_what_it_leaves_out_of_each_split(seen: Seen) -> None:
    expected = {"prompts_rows": 9, "prompts_dropped": 2, "eval_prompts_rows": 9, "eval_prompts_dropped": 3}
    assert seen.metrics("prompts") == expected


def test_an_evaluation_says_how_many_prompts_it_lacks(seen: Seen) -> None:
    for version in (0, 1):
        assert seen.metrics(f"evaluate version {version}")["prompts_dropped"] == 3
    metrics = seen.metrics("evaluate version 1")
    assert "prompts_dropped 3" in metrics_text("evaluate", metrics)
    assert "prompts_dropped" not in metrics_text("evaluate", metrics | {"prompts_dropped": 0.0})


def test_the_log_says_so_for_each_split_and_with_each_accuracy(seen: Seen) -> None:
    assert "2 of 11 rows of split 'train' leave no room" in seen.log
    assert "3 of 12 rows of split 'test' leave no room" in seen.log
    result = IterationResult(0, 1, {"evaluate": seen.built["evaluate version 0"]}, 1.0)
    assert "(version 0, 3 long prompts left out)" in summary_line(result)


def test_sql_and_the_report_say_so(seen: Seen) -> None:
    found = QUESTION.search((Path(__file__).parents[2] / "docs" / "reference" / "cookbook.md").read_text())
    assert found is not None
    with Session(store_in(seen.folder), "dropped") as session:
        [row] = session.sql(found[1]).to_pylist()
    assert row == {"iteration": 0, "prompts": 9, "left_out": 2, "held_out": 9, "held_out_left_out": 3}
    [run] = make_report(store_in(seen.folder), ["dropped"], 0, 1_000_000).payload["runs"]
    assert ["prompts left out as too long", "2 of 11 that are trained on, 3 of 12 held out"] in run["facts"]


def test_a_manifest_that_has_no_count_gives_none(seen: Seen) -> None:
    prompts = seen.built["prompts"].manifest
    older = prompts.model_copy(update={"metrics": {"prompts_rows": 9.0, "eval_prompts_rows": 9.0}})
    assert dropped_eval_prompts(older) == {}
    assert dropped_eval_prompts(prompts) == {"prompts_dropped": 3}
