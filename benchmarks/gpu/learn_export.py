"""What a GSM8K learning run leaves to be kept: small tables, a plot, and an excerpt of what was said."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from areal_tasks.store.backend import Store
from areal_tasks.store.query import run_sql
from benchmarks.gpu.mcnemar import Paired, compare
from benchmarks.gpu.product import committed, rows
from benchmarks.gpu.results import machine

TRAIL: Final = 10
CURVES: Final = (
    "WITH s AS (SELECT iteration, avg(reward) FILTER (NOT isnan(reward)) AS reward, avg(num_generated) AS tokens, "
    "avg(CAST(truncated AS INT)) AS truncated FROM scalars GROUP BY 1), "
    "t AS (SELECT iteration, avg(entropy) AS entropy, avg(approx_kl) AS approx_kl, avg(clip_fraction) AS "
    "clip_fraction, avg(grad_norm) AS grad_norm, avg(lr) AS lr, avg(logprob_gap_mean) AS logprob_gap, "
    "max(logprob_gap_max) AS logprob_gap_max, avg(ratio_outside) AS ratio_outside, sum(total_tokens) AS "
    "trained_tokens, sum(step_seconds) AS train_seconds FROM train_steps GROUP BY 1) "
    "SELECT s.*, t.* EXCLUDE (iteration) FROM s JOIN t USING (iteration) ORDER BY iteration"
)
STAGES: Final = (
    "SELECT stage, count(*) AS times, sum(seconds) AS seconds, avg(seconds) AS mean_seconds, "
    "median(seconds) AS median_seconds, sum(bytes) AS bytes FROM stages GROUP BY 1 ORDER BY 3 DESC"
)
SCALARS: Final = (
    "SELECT iteration, group_id, sample_index, prompt_id, num_tokens, num_generated, stop_reason, reward, verdict, "
    "shaped_reward, kept, minibatch, sample_ratio, sample_kl FROM scalars"
)
TRAJECTORIES: Final = (
    "SELECT iteration, prompt, answer, completion, reward, parsed, num_generated, stop_reason FROM samples "
    "WHERE iteration % greatest(1, (SELECT max(iteration) FROM commits) // 8) = 0 AND sample_index < 2 "
    "AND group_id % 16 = 0 ORDER BY iteration, group_id, sample_index"
)


def export(store: Store, runs: Mapping[str, str], flow_runs: Mapping[str, Any], folder: Path) -> str:
    """Write everything there is so far (at most eight files) to `folder`; the summary as Markdown.

    `runs`: run names of base, sft, grpo, and the evaluations eval-base, eval-sft, eval-grpo.
    """
    folder.mkdir(parents=True, exist_ok=True)
    grpo = runs["grpo"]
    there = {step: committed(store, run) for step, run in runs.items()}
    answers = {step: evaluation(store, run) for step, run in runs.items() if step.startswith("eval") and there[step]}
    if answers:
        pq.write_table(pa.concat_tables(answers.values()), folder / "evaluations.parquet", compression="zstd")
    curves = stages = evaluations = []
    if there["grpo"]:
        curves, stages, evaluations = rows(store, grpo, CURVES), rows(store, grpo, STAGES), inner(store, grpo)
        write_rows(folder / "curves.csv", curves)
        write_rows(folder / "stages.csv", stages)
        pq.write_table(run_sql(store, grpo, SCALARS), folder / "scalars.parquet", compression="zstd")
        lines = [json.dumps(row) for row in rows(store, grpo, TRAJECTORIES)]
        (folder / "trajectories.jsonl").write_text("\n".join(lines) + "\n")
        plot(curves, evaluations, folder / "curve.svg")
    tests = comparisons(answers) | (own_comparison(store, grpo) if evaluations else {})
    text = summary(answers, tests, curves, stages, evaluations)
    (folder / "learn.md").write_text(text)
    facts = {"runs": runs, "flow_runs": flow_runs, "iterations": there, "tests": tests, "evaluations": evaluations}
    (folder / "learn.json").write_text(json.dumps(facts | machine(), indent=1, default=asdict))
    return text


def evaluation(store: Store, run: str) -> pa.Table:
    """A row per question: what was answered and how it was judged."""
    query = "SELECT prompt_id, verdict, reward, parsed, completion, num_generated, stop_reason FROM evaluate"
    found = run_sql(store, run, query)
    return found.append_column("run", pa.array([run] * len(found)))


def inner(store: Store, run: str) -> list[dict[str, Any]]:
    """Accuracy of the evaluations that the run itself made, by weights version."""
    query = (
        "SELECT weights_version AS version, avg(CAST(verdict = 'correct' AS INT)) AS accuracy, count(*) AS questions "
        "FROM evaluate GROUP BY 1 ORDER BY 1"
    )
    if not rows(store, run, "SELECT 1 FROM stages WHERE stage = 'evaluate' LIMIT 1"):
        return []
    return rows(store, run, query)


def comparisons(answers: Mapping[str, pa.Table]) -> dict[str, Paired]:
    """Each evaluation with the one before it."""
    correct = {
        step: dict(zip(t["prompt_id"].to_pylist(), [v == "correct" for v in t["verdict"].to_pylist()], strict=True))
        for step, t in answers.items()
    }
    order = [step for step in ("eval-base", "eval-sft", "eval-grpo") if step in correct]
    return {f"{a} to {b}": compare(correct[a], correct[b]) for a, b in pairwise(order)}


def own_comparison(store: Store, run: str) -> dict[str, Paired]:
    """The first and the last version that a GRPO run evaluated itself."""
    found: dict[int, dict[int, bool]] = {}
    for row in rows(store, run, "SELECT weights_version AS version, prompt_id, verdict FROM evaluate"):
        found.setdefault(row["version"], {})[row["prompt_id"]] = row["verdict"] == "correct"
    first, last = min(found), max(found)
    return {f"version {first} to {last} of the GRPO run": compare(found[first], found[last])} if first < last else {}


def summary(
    answers: Mapping[str, pa.Table],
    tests: Mapping[str, Paired],
    curves: Sequence[Mapping[str, Any]],
    stages: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
) -> str:
    """The tables a person reads first."""
    parts = ["| evaluation | questions | correct | accuracy |", "| --- | --- | --- | --- |"]
    for step, table in answers.items():
        right = sum(v == "correct" for v in table["verdict"].to_pylist())
        parts.append(f"| {step} | {len(table)} | {right} | {right / len(table):.2%} |")
    parts += [
        f"\n{name}: {t.gained} questions gained, {t.lost} lost of {t.questions}; McNemar's exact p = {t.p:.2g}"
        for name, t in tests.items()
    ]
    if evaluations:
        shown = ", ".join(f"{e['version']}: {e['accuracy']:.2%}" for e in evaluations)
        parts.append(f"\nWithin the GRPO run, by version: {shown}")
    if curves:
        parts += [
            "\n| iterations | reward | tokens | entropy | KL | logprob gap |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        parts += [_block(curves[i : i + 10]) for i in range(0, len(curves), 10)]
    if stages:
        parts += ["\n| stage | times | seconds each | seconds in all |", "| --- | --- | --- | --- |"]
        parts += [f"| {s['stage']} | {s['times']} | {s['mean_seconds']:.3f} | {s['seconds']:.1f} |" for s in stages]
    return "\n".join(parts) + "\n"


def _block(part: Sequence[Mapping[str, Any]]) -> str:
    of = {name: mean(row[name] for row in part) for name in ("reward", "tokens", "entropy", "approx_kl", "logprob_gap")}
    return (
        f"| {part[0]['iteration']} to {part[-1]['iteration']} | {of['reward']:.3f} | {of['tokens']:.0f} | "
        f"{of['entropy']:.3f} | {of['approx_kl']:.5f} | {of['logprob_gap']:.4f} |"
    )


def write_rows(file: Path, table: Sequence[Mapping[str, Any]]) -> None:
    with file.open("w", newline="") as sink:
        writer = csv.DictWriter(sink, list(table[0]))
        writer.writeheader()
        writer.writerows(table)


def trailing_mean(values: Sequence[float]) -> list[float]:
    """At each place the mean of the last `TRAIL` values, or of as many as there are."""
    return [mean(values[max(0, end - TRAIL) : end]) for end in range(1, len(values) + 1)]


def plot(curves: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Mean reward of each iteration, and greedy accuracy where it was measured; nothing without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed", flush=True)
        return
    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    iterations, rewards = [c["iteration"] for c in curves], [c["reward"] for c in curves]
    axes.plot(iterations, rewards, color="C0", alpha=0.25)
    axes.plot(iterations, trailing_mean(rewards), color="C0", label=f"mean reward, sampled (of {TRAIL} iterations)")
    if evaluations:
        xs, ys = [e["version"] for e in evaluations], [e["accuracy"] for e in evaluations]
        axes.plot(xs, ys, "o-", color="C1", label="greedy accuracy, test split")
    axes.set(xlabel="iteration", ylabel="share correct", title="GRPO on GSM8K, SmolLM2-135M-Instruct")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(file)
