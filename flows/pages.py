"""Pages and tables for the Prefect UI. Texts come from models and data sets, so all of them are escaped.

The UI renders markdown in tables too: an unescaped GSM8K answer `#### 72` would become a heading.
"""

from __future__ import annotations

import html
import math
import re
import shlex
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pyarrow as pa

from areal_tasks.stages.build import Built
from areal_tasks.store.backend import Store
from schemas.manifest import StageManifest, Wait, WaitsRecord

# Widths in characters: the UI wraps neither the cells of its tables nor a page's code blocks.
PROMPT_CUT, COMPLETION_CUT, ANSWER_CUT, NUMBERS_CUT, PAGE_WIDTH = 60, 40, 16, 52, 88
BAR_WIDTH = 50
_MARKUP = re.compile(r"([\\`*_{}\[\]()#+\-.!|~>$:])")
#: The metrics that a stage's final state and line show; `stages.metrics` in SQL has all of them.
SHOWN = {
    "rollout": ("mean_tokens", "truncated"),
    "verify": ("reward", "correct", "incorrect", "unparseable", "timeout", "error"),
    "evaluate": ("accuracy", "unparseable", "timeout", "error", "mean_tokens", "truncated", "prompts_dropped"),
    "train": (
        *("loss", "grad_norm", "lr", "entropy", "kl", "approx_kl", "clip_fraction", "ratio_max", "clamped"),
        *("lag_mean", "lag_max", "stale_kv", "effective_sample_size", "behaviour_clipped"),
        *("logprob_gap_mean", "logprob_gap_max", "ratio_outside", "tokens", "skipped_steps", "train_seconds"),
    ),
}
SHARES = (
    *("truncated", "correct", "incorrect", "unparseable", "timeout", "error", "kept", "accuracy", "clip_fraction"),
    *("ratio_outside", "stale_kv", "effective_sample_size", "behaviour_clipped"),
)
HIDDEN_AT_0 = (
    *("truncated", "unparseable", "timeout", "error", "kl", "skipped_steps", "ratio_outside", "clamped"),
    *("prompts_dropped", "eval_prompts_dropped", "stale_kv", "behaviour_clipped"),
)


def escape_markdown(text: str) -> str:
    """`text` escaped so that markdown shows it literally, on one line."""
    return _MARKUP.sub(r"\\\1", html.escape(" ".join(text.split()), quote=False))


def head(text: str, length: int) -> str:
    """At most `length` characters from the start of a text, on one line, ending in … if it was cut."""
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[: length - 1]}…"


def tail(text: str, length: int) -> str:
    """The same from the end, where the answer is."""
    line = " ".join(text.split())
    return line if len(line) <= length else f"…{line[1 - length :]}"


def rollout_rows(samples: pa.Table, count: int, trained: int | None = None) -> list[dict[str, Any]]:
    """Rows evenly spaced over the samples, so that groups differ; with versions if some are older than `trained`."""
    shown = min(count, len(samples))
    rows = samples.take([i * len(samples) // shown for i in range(shown)]).to_pylist()
    stale = trained is not None and any(row["num_generated"] > 0 and row["version_min"] < trained for row in rows)
    return [_row(row) | ({"versions": versions_text(row)} if stale else {}) for row in rows]


def versions_text(row: dict[str, Any]) -> str:
    """The weight versions that sampled a sample's tokens: `3`, or `3–5` if weights were updated meanwhile."""
    oldest, newest = row["version_min"], row["version_max"]
    return f"{oldest}" if oldest == newest else f"{oldest}–{newest}"


def _row(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "reward": None if math.isnan(row["reward"]) else round(row["reward"], 4),  # JSON knows no NaN
        "verdict": row["verdict"],
        "tokens": row["num_generated"],
        "stop": row["stop_reason"],
        "answer": escape_markdown(tail(row["answer"], ANSWER_CUT)),
        "completion": escape_markdown(tail(row["completion"], COMPLETION_CUT)),
        "prompt": escape_markdown(head(row["prompt"], PROMPT_CUT)),
        "sample": row["sample_id"],
    }


def iteration_page(run: str, store: str, summary: str, stages: Sequence[str], paths: Sequence[str]) -> str:
    """The page of one iteration: `stages` (see `stage_line`), their manifests, and commands for more detail."""
    head_row = "| task run | state | manifest | rows | seconds | numbers |\n| --- | --- | --- | ---: | ---: | --- |"
    commands = _commands(
        store,
        f"arealflow report {run}",
        f'arealflow sql {run} "SELECT prompt, completion, reward, verdict FROM samples ORDER BY reward LIMIT 10"',
        f'arealflow sql {run} "SELECT iteration, stage, committed, metrics FROM stages"',
    )
    parts = (
        f"# {escape_markdown(f'Run {run}')}",
        escape_markdown(summary),
        "\n".join([head_row, *stages]),
        f"## Deeper\n\n{commands}",
        f"## Manifests\n\nBelow {escape_markdown(store)}:",
        "\n".join(f"    {path}" for path in paths),
    )
    return "\n\n".join(parts)


def metrics_text(stage: str, metrics: Mapping[str, float]) -> str:
    """The metrics of SHOWN as text: `reward 0.45, correct 45.3%, unparseable 0.8%`."""
    named = [(name, metrics[name]) for name in SHOWN.get(stage, metrics) if name in metrics]
    return ", ".join(
        f"{name} {value:.1%}" if name in SHARES else f"{name} {value:.4g}"
        for name, value in named
        if value or name not in HIDDEN_AT_0
    )


def stage_line(built: Built, made: bool, ui: str, page: UUID | None) -> str:
    """A stage as a line of the iteration's table; `ui`: the UI's address, empty if it is unknown: no links then."""
    manifest, task_run = built.manifest, built.manifest.provenance.prefect_task_run_id
    cells = (
        _link(built.label, f"{ui}/runs/task-run/{task_run}" if ui and task_run else ""),
        "Committed" if made else "Reused",
        _link("manifest", f"{ui}/artifacts/artifact/{page}") if ui and page else "",
        f"{sum(table.rows for table in manifest.tables.values()):,}",
        f"{seconds_of(manifest):.2f}",
        escape_markdown(head(metrics_text(manifest.stage, manifest.metrics), NUMBERS_CUT)),
    )
    return f"| {' | '.join(cells)} |"


def seconds_of(manifest: StageManifest) -> float:
    """How long the stage took, from its start to its commit."""
    started, committed = manifest.provenance.started, manifest.provenance.committed
    return (datetime.fromisoformat(committed) - datetime.fromisoformat(started)).total_seconds()


def _commands(store: str, *commands: str) -> str:
    """Shell commands as a code block, after one that names the store."""
    return "\n".join(f"    {command}" for command in (f"export AREALFLOW_STORE={shlex.quote(store)}", *commands))


def manifest_page(task: str, store: Store, manifest: StageManifest) -> str:
    """The page of a committed stage: the files of its tables, how to query them, and the manifest itself."""
    shards = [store.uri(shard.path) for table in manifest.tables.values() for shard in table.shards]
    queries = [
        f'arealflow sql {manifest.run} "SELECT * FROM {name} WHERE iteration = {manifest.iteration} LIMIT 10"'
        for name in manifest.tables
    ]
    parts = (
        ("Files", "\n".join(f"    {uri}" for uri in shards)),
        ("Query", _commands(store.url, *queries)),
        ("Manifest", "\n".join(f"    {line}" for line in manifest.model_dump_json(indent=2).splitlines())),
    )
    sections = [f"## {heading}\n\n{text}" for heading, text in parts if text]
    return "\n\n".join([f"# {escape_markdown(task)} of run {escape_markdown(manifest.run)}", *sections])


def _link(text: str, url: str) -> str:
    return f"[{escape_markdown(text)}]({url})" if url else escape_markdown(text)


def waits_page(run: str, record: WaitsRecord, shown_after: float) -> str:
    """What a run waits for, as of when, and when the page is next updated: if it is not, the flow process is gone."""
    title = f"# {escape_markdown(f'What run {run} waits for')}"
    as_of = f"As of {clock_text(record.told)}."
    if not record.waits:
        return f"{title}\n\nNothing for longer than {shown_after:g} seconds. {as_of}"
    renewed = f"This page is updated within {record.seconds:g} seconds; if it is not, its process is gone."
    return "\n\n".join([title, *map(_wait_section, record.waits), f"{as_of} {renewed}"])


def _wait_section(wait: Wait) -> str:
    """A wait as separate lines, not a table row: the UI cuts long cells."""
    lines = (f"{wait.what}, since {clock_text(wait.since)}", wait.says, f"Deadline: {wait.limit}.")
    return "\n\n".join([f"## {escape_markdown(wait.at)}", *(escape_markdown(line) for line in lines if line)])


def clock_text(time: str) -> str:
    """An ISO time in UTC for display, to the second; without the date if it is today."""
    moment = datetime.fromisoformat(time)
    return f"{moment:%H:%M:%S} UTC" if moment.date() == datetime.now(UTC).date() else f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def rollout_page(samples: pa.Table, title: str, trained: int | None = None) -> str:
    """Selected rollouts in full; before them a histogram of lags if some are older than version `trained`."""
    rows = samples.to_pylist()
    sections = [_section(heading, row) for heading, row in _selected(rows)]
    return "\n\n".join([f"# {escape_markdown(title)}", *_ages(rows, trained), *sections])


def _ages(rows: Sequence[dict[str, Any]], trained: int | None) -> list[str]:
    """A text histogram of the samples' lag; empty if all lags are 0."""
    lags = Counter(trained - row["version_min"] for row in rows if trained is not None and row["num_generated"])
    if not any(lags):
        return []
    most = max(lags.values())
    bars = (f"    lag {lag:2}  {n:6,}  {'█' * math.ceil(BAR_WIDTH * n / most)}" for lag, n in sorted(lags.items()))
    return ["\n".join(["## Samples by the lag of their oldest token", "", *bars])]


def _selected(rows: Sequence[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Each sample once, under all of its headings, in order of first occurrence."""
    judged = [row for row in rows if not math.isnan(row["reward"])]
    by_reward = sorted(judged, key=lambda row: (row["reward"], row["num_generated"]))
    found = [("Best", by_reward[-1]), ("Worst", by_reward[0])] if judged else []
    found.append(("Longest", max(rows, key=lambda row: row["num_generated"])))
    for verdict, heading in (("unparseable", "No answer found"), ("timeout", "Timed out"), ("error", "Not verified")):
        found += [(heading, row) for row in rows if row["verdict"] == verdict][:1]
    headings: dict[str, list[str]] = {}
    for heading, row in found:
        headings.setdefault(row["sample_id"], []).append(heading)
    samples = {row["sample_id"]: row for _, row in found}
    return [(" · ".join(names), samples[sample]) for sample, names in headings.items()]


def _section(heading: str, row: dict[str, Any]) -> str:
    facts = (
        f"reward {row['reward']:g} · {row['verdict']} · tokens {row['num_generated']} · "
        f"ended by {row['stop_reason']} · version {versions_text(row)} · sample {row['sample_id']}"
    )
    parts = (("Prompt", row["prompt"]), ("Completion", row["completion"]), ("Answer", row["answer"]))
    shown = (*parts, ("Verifier", row["detail"])) if row["detail"] else parts
    return "\n\n".join(
        [f"## {heading}", escape_markdown(facts), *(f"**{name}**\n\n{_block(text)}" for name, text in shown)]
    )


def _block(text: str) -> str:
    """An indented code block, in which nothing is markup. Long lines are folded, which the UI does not do."""
    folded = textwrap.TextWrapper(PAGE_WIDTH, drop_whitespace=False, break_on_hyphens=False)
    lines = (text or "(empty)").splitlines()
    return "\n".join(f"    {part}" for line in lines for part in folded.wrap(line) or [""])
