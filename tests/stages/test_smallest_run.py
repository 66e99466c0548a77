"""A whole run with the least of everything that a recipe allows."""

from __future__ import annotations

from pathlib import Path

from stage_driver import drive, tiny

from areal_tasks.store.query import run_sql


def test_the_smallest_run_ends_with_all_that_a_run_has(tmp_path: Path) -> None:
    recipe = tiny(
        model={"scratch": {"layers": 1, "hidden": 16, "heads": 1, "intermediate": 16}, "max_length": 8},
        data={"limit": 1},
        rollout={"groups": 1, "group_size": 2, "max_new_tokens": 1, "temperature": 1e-3},
        algorithm={"minibatches": 2, "kl": "none", "kl_coef": 0},
        trainer={"micro_batch_tokens": 16, "eps": 1e-20, "recover_within_seconds": 5e-324},
        inference={"slots": 4, "groups_per_request": 1, "max_concurrent_requests": 1},
        evaluation={"every": 1, "limit": 1, "max_new_tokens": 1},
        store={"compact_every": 1},
        schedule={"iterations": 1},
    )
    run = drive(tmp_path, "smallest", recipe)
    query = "SELECT count(*) AS n, sum(num_generated) AS tokens, bool_and(isfinite(sample_loss)) AS finite FROM samples"
    assert run_sql(run.store, "smallest", query).to_pylist() == [{"n": 2, "tokens": 2, "finite": True}]
    versions = run_sql(run.store, "smallest", "SELECT weights_version AS v FROM evaluations ORDER BY v").to_pylist()
    assert [row["v"] for row in versions] == [0, 1]
