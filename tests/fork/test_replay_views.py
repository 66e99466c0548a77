"""A replay that ends before the stage `scalars` has its views all the same: joined when asked, NULL where not built."""

from __future__ import annotations

from pathlib import Path

import pytest
from replays import asked, kept, replay
from stage_driver import finished, store_in, tiny

from areal_tasks.report.page import make_report

JUDGED = "reward.verifier=exact"
#: Replays that end early: by name, where they begin and end.
EARLY = {"verified": (0, "verify"), "judged": (0, "advantage"), "later": (1, "verify"), "last": (2, "advantage")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose store holds `whole`, `full`, its replay with another verifier, and replays that end early."""
    folder = tmp_path_factory.mktemp("early")
    finished(folder, "whole", tiny())
    replay(folder, "full", kept("verify"), JUDGED)
    for name, (at, until) in EARLY.items():
        replay(folder, name, kept("verify", at=at, until=until), JUDGED)
    return folder


@pytest.mark.parametrize("name", EARLY)
@pytest.mark.parametrize("view", ["scalars", "samples", "groups", "servers"])
def test_the_views_have_the_columns_of_a_run_that_was_built_to_the_end(folder: Path, name: str, view: str) -> None:
    described = f"SELECT column_name, column_type FROM (DESCRIBE {view}) ORDER BY 1"
    assert asked(folder, name, described) == asked(folder, "full", described)


@pytest.mark.parametrize("name", EARLY)
def test_every_iteration_is_there_and_what_was_not_built_is_null(folder: Path, name: str) -> None:
    at, until = EARLY[name]
    early = "iteration, sample_id, prompt, completion, reward, verdict, num_generated, version_min"
    query = f"SELECT {early} FROM samples WHERE iteration {{}} {at} ORDER BY ALL"
    for sign, source in (("<", "whole"), (">=", "full")):
        assert asked(folder, name, query.format(sign)) == asked(folder, source, query.format(sign))
    counts = "SELECT count(*) AS n, count(minibatch) AS trained, count(kept) AS weighed FROM scalars WHERE iteration"
    assert asked(folder, name, f"{counts} < {at}") == asked(folder, "whole", f"{counts} < {at}")
    built = (3 - at) * 16
    weighed = built if until == "advantage" else 0
    assert asked(folder, name, f"{counts} >= {at}") == [{"n": built, "trained": 0, "weighed": weighed}]


def test_what_was_built_is_what_a_whole_replay_builds(folder: Path) -> None:
    query = "SELECT iteration, sample_id, kept, shaped_reward, dropped_reason FROM scalars ORDER BY ALL"
    assert asked(folder, "judged", query) == asked(folder, "full", query)
    groups = "SELECT iteration, group_id, samples, kept, reward, zero_variance FROM groups ORDER BY ALL"
    assert asked(folder, "judged", groups) == asked(folder, "full", groups)


def test_a_report_of_such_a_replay(folder: Path) -> None:
    for name in EARLY:
        [run] = make_report(store_in(folder), [name], 20, 10**6).payload["runs"]
        assert run["available"] >= 48 and run["samples"] and run["curves"]["reward"]
