"""The query of docs/operate/audit.md: everything behind one token, by one question."""

from __future__ import annotations

import json
import re
from pathlib import Path

from areal_tasks.store.backend import Store
from areal_tasks.store.query import run_sql
from areal_tasks.store.runs import load_run

PAGE = Path(__file__).parents[2] / "docs" / "operate" / "audit.md"


def lineage() -> str:
    [query] = re.findall(r"```sql\n(SELECT t\.token_id.*?)```", PAGE.read_text(), re.DOTALL)
    return str(query)


def test_one_query_tells_what_produced_and_consumed_a_token(small: Store) -> None:
    [row] = run_sql(small, "small", lineage()).to_pylist()
    run = load_run(small, "small")
    manifests = {ref.stage: run.read_stage(ref) for ref in run.commit(1).stages}
    paths = {ref.stage: ref.path for ref in run.commit(1).stages}
    assert (row["weights_version"], row["weights"]) == (1, run.commit(0).weights.path)
    assert (row["generated_in"], row["trained_in"]) == (paths["rollout"], paths["train"])
    assert row["trained_with"] == manifests["train"].provenance.code_version
    assert json.loads(row["recipe"]) == run.recipe_at(1)
    assert row["prompt"].endswith("=") and row["server"].startswith("http://127.0.0.1:")
    assert row["verdict"] in ("correct", "incorrect", "unparseable") and row["logprob"] < 0
    assert row["optimizer_step"] == 2 + row["minibatch"] + 1, "two minibatches an iteration"


def test_a_token_of_the_first_iteration_leads_to_the_initial_weights(small: Store) -> None:
    query = lineage().replace("t.iteration = 1 AND t.sample_id = '2-0'", "t.iteration = 0 AND t.sample_id = '0-0'")
    query = query.replace("t.position = 5", "t.position = 4")  # the first that is generated: every sample has it
    [row] = run_sql(small, "small", query).to_pylist()
    assert row["weights_version"] == 0 and "small/weights/version=000000/attempt=" in row["weights"]
